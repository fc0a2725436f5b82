"""One Reverb server, spoken to without TensorFlow: the calls that ask once and are answered once.

Source: dm-reverb 0.14.0, reverb_service.proto. Inserts and samples, which are streams, are in reverb_writer.py and
reverb_sampler.py.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import grpc

from seedx.replay import reverb_pb2 as pb

_SERVICE = "/deepmind.reverb.ReverbService/"
_CALL_S = 10.0  # deadline of one attempt; writing a checkpoint has `_CHECKPOINT_S`
_CHECKPOINT_S = 600.0
# What a server that stops, or is not there, answers with. Everything else is an error of ours, and no retry mends it.
_LOST = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED, grpc.StatusCode.DEADLINE_EXCEEDED)
_OPTIONS = [
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2000),
    ("grpc.use_local_subchannel_pool", 1),  # a connection of its own
]


class ReverbLostError(ConnectionError):
    """A Reverb server was not to be had for too long; the message names its address."""


def is_lost(error: grpc.RpcError) -> bool:
    """Whether a call failed because its server is gone, for now or for good."""
    return error.code() in _LOST


class ReverbClient:
    """A connection to one server.

    Any thread may call. All calls may be repeated without harm, and are while the server is gone.

    Args:
        address: host:port.
        give_up_s: How long a lost server is waited for.

    Attributes:
        insert_stream: Takes an iterator of InsertStreamRequests, serialized.
        sample_stream: Takes an iterator of SampleStreamRequests, serialized.
    """

    def __init__(self, address: str, give_up_s: float) -> None:
        self.address = address
        self._give_up_s = give_up_s
        self._closed = threading.Event()
        self._channel = grpc.insecure_channel(address, _OPTIONS)
        stream, unary = self._channel.stream_stream, self._channel.unary_unary
        self.insert_stream = _method(stream, "InsertStream", pb.InsertStreamResponse)
        self.sample_stream = _method(stream, "SampleStream", pb.SampleStreamResponse)
        self._server_info = _method(unary, "ServerInfo", pb.ServerInfoResponse)
        self._mutate = _method(unary, "MutatePriorities", pb.MutatePrioritiesResponse)
        self._reset = _method(unary, "Reset", pb.ResetResponse)
        self._checkpoint = _method(unary, "Checkpoint", pb.CheckpointResponse)

    def server_info(self) -> pb.ServerInfoResponse:
        """Every table; see `_repeat` for what all calls raise."""
        return self._repeat(self._server_info, pb.ServerInfoRequest())

    def ask_server_info(self, timeout_s: float) -> pb.ServerInfoResponse | None:
        """Every table; None if there is no answer within the timeout."""
        try:
            return self._server_info(b"", timeout=timeout_s)
        except grpc.RpcError as error:
            if is_lost(error):
                return None
            raise

    def mutate_priorities(self, table: str, updates: Mapping[int, float], delete_keys: list[int]) -> None:
        """Deletes items, then changes priorities, finite and not negative; unknown keys are passed over."""
        pairs = [pb.KeyWithPriority(key=key, priority=priority) for key, priority in updates.items()]
        self._repeat(self._mutate, pb.MutatePrioritiesRequest(table=table, updates=pairs, delete_keys=delete_keys))

    def reset(self, table: str) -> None:
        """Empties a table and sets its counters to 0."""
        self._repeat(self._reset, pb.ResetRequest(table=table))

    def checkpoint(self) -> str:
        """Has the server write a checkpoint; its directory there."""
        return self._repeat(self._checkpoint, pb.CheckpointRequest(), _CHECKPOINT_S).checkpoint_path

    def close(self) -> None:
        """Closes the connection; calls that wait for the server end with ReverbLostError."""
        self._closed.set()
        self._channel.close()

    def _repeat(self, call: Callable[..., Any], request: Any, timeout_s: float = _CALL_S) -> Any:
        """Calls until there is an answer.

        Raises:
            ReverbLostError: there was none for `give_up_s`.
            grpc.RpcError: the server refused, for example an unknown table.
        """
        lost_at, pause_s = time.monotonic(), 0.1
        while True:
            try:
                return call(request.SerializeToString(), timeout=timeout_s)
            except grpc.RpcError as error:
                gone_s = time.monotonic() - lost_at
                if not is_lost(error):
                    raise
                if gone_s > self._give_up_s or self._closed.wait(pause_s):
                    raise ReverbLostError(
                        f"the Reverb server at {self.address} has been gone for {gone_s:.0f} s ({error.code().name}: "
                        f"{error.details()}). Start it, which loads its last checkpoint: "
                        "uv run --script launch/reverb_server.py --help"
                    ) from error
            pause_s = min(2 * pause_s, 2.0)


def _method(make: Callable[..., Any], name: str, response: Any) -> Callable[..., Any]:
    """A method that takes requests as bytes."""
    return make(_SERVICE + name, response_deserializer=response.FromString)


def find_table(info: pb.ServerInfoResponse, name: str, address: str) -> pb.TableInfo:
    """A table of a server.

    Raises:
        ValueError: it has none of this name.
    """
    for table in info.table_info:
        if table.name == name:
            return table
    names = ", ".join(table.name for table in info.table_info)
    raise ValueError(f"the Reverb server at {address} has no table {name!r}; it has {names}.")


def describe_table(table: pb.TableInfo) -> str:
    """A table's size and its rate limiter's counters, for messages."""
    limiter = table.rate_limiter_info
    return (
        f"table {table.name!r} holds {table.current_size} of {table.max_size} items; since its last reset "
        f"{limiter.insert_stats.completed} were inserted and {limiter.sample_stats.completed} sampled. Its rate "
        f"limiter: samples_per_insert {limiter.samples_per_insert:g}, min_size {limiter.min_size_to_sample}, "
        f"difference {limiter.min_diff:g} to {limiter.max_diff:g}"
    )

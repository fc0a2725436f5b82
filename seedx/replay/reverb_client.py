"""One Reverb server, spoken to without TensorFlow: the calls that ask once and are answered once.

Source: dm-reverb 0.14.0, reverb_service.proto. Inserts and samples, which are streams, are in reverb_writer.py and
reverb_sampler.py.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import grpc

from seedx.replay import reverb_pb2 as pb

_SERVICE = "/deepmind.reverb.ReverbService/"
_CALL_S = 10.0  # deadline of one attempt; less where the server will be given up before, but for checkpoints
_LEAST_S = 1.0
_CHECKPOINT_S = 600.0
_APART_S = 30.0  # failures that are further apart are of two absences
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


class _Absence(NamedTuple):
    """When a server has not answered, on the monotonic clock."""

    since: float
    until: float  # the end of the last call that failed


class ReverbClient:
    """A connection to one server.

    Any thread may call. All calls may be repeated without harm, and are while the server is gone. All of them, and the
    streams, count one absence together; a call that began before or after a server went ends as late as the others.

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
        self._lock = threading.Lock()  # guards the next three
        self._heard_at = -math.inf
        self._absence: _Absence | None = None
        self._was_told = False  # whether somebody asked for words about the absence
        self._channel = grpc.insecure_channel(address, _OPTIONS)
        stream, unary = self._channel.stream_stream, self._channel.unary_unary
        self.insert_stream = _method(stream, "InsertStream", pb.InsertStreamResponse)
        self.sample_stream = _method(stream, "SampleStream", pb.SampleStreamResponse)
        self._server_info = _method(unary, "ServerInfo", pb.ServerInfoResponse)
        self._mutate = _method(unary, "MutatePriorities", pb.MutatePrioritiesResponse)
        self._reset = _method(unary, "Reset", pb.ResetResponse)
        self._checkpoint: Any = _method(unary, "Checkpoint", pb.CheckpointResponse)

    def heard(self) -> None:
        """The server answered, or said something on a stream."""
        with self._lock:
            gone_s, was_told = self.gone_s, self._was_told
            self._heard_at, self._absence, self._was_told = time.monotonic(), None, False
        if was_told:
            print(f"Reverb at {self.address} answers again after {gone_s:.0f} s.", flush=True)

    @property
    def gone_s(self) -> float:
        """How long the server has not answered; 0.0 if it did the last time."""
        absence = self._absence
        return 0.0 if absence is None else time.monotonic() - absence.since

    @property
    def give_up_in_s(self) -> float:
        """How long the server is still waited for if it stays away."""
        return max(0.0, self._give_up_s - self.gone_s)

    def describe_absence(self) -> str:
        """Since when the server has been gone, and how long it is still waited for.

        Raises:
            ReverbLostError: no longer.
        """
        if not self.give_up_in_s:
            raise self._lost_error("it does not answer")
        with self._lock:
            self._was_told = self._absence is not None
        since = time.strftime("%H:%M:%S", time.localtime(time.time() - self.gone_s))
        return (
            f"the server does not answer, since {since}; it has {self.give_up_in_s:.0f} s left to come back "
            f"(give_up_s {self._give_up_s:g})"
        )

    def server_info(self, give_up_s: float | None = None) -> pb.ServerInfoResponse:
        """Every table; see `_repeat` for what all calls raise."""
        return self._repeat(self._server_info, pb.ServerInfoRequest(), give_up_s=give_up_s)

    def ask_server_info(self, timeout_s: float) -> pb.ServerInfoResponse | None:
        """Every table; None if there is no answer within the timeout."""
        asked_at = time.monotonic()
        try:
            info = self._server_info(b"", timeout=timeout_s)
        except grpc.RpcError as error:
            if is_lost(error):
                self._missed(asked_at)
                return None
            raise
        self.heard()
        return info

    def mutate_priorities(
        self, table: str, updates: Mapping[int, float], delete_keys: list[int], give_up_s: float | None = None
    ) -> None:
        """Deletes items, then changes priorities, finite and not negative; unknown keys are passed over."""
        pairs = [pb.KeyWithPriority(key=key, priority=priority) for key, priority in updates.items()]
        request = pb.MutatePrioritiesRequest(table=table, updates=pairs, delete_keys=delete_keys)
        self._repeat(self._mutate, request, give_up_s=give_up_s)

    def reset(self, table: str) -> None:
        """Empties a table and sets its counters to 0."""
        self._repeat(self._reset, pb.ResetRequest(table=table))

    def checkpoint(self, give_up_s: float | None = None) -> str:
        """Has the server write a checkpoint; its directory there."""
        return self._repeat(self._wait_for_checkpoint, pb.CheckpointRequest(), _CHECKPOINT_S, give_up_s).checkpoint_path

    def _wait_for_checkpoint(self, request: bytes, timeout: float) -> Any:
        """One may take minutes: the wait ends where other calls found that the server does not answer any more."""
        answer = self._checkpoint.future(request, timeout=timeout)
        while True:
            try:
                return answer.result(_LEAST_S)
            except grpc.FutureTimeoutError:
                if not self.give_up_in_s:
                    answer.cancel()
                    raise self._lost_error("it does not answer") from None

    def close(self) -> None:
        """Closes the connection; calls that wait for the server end with ReverbLostError."""
        self._closed.set()
        self._channel.close()

    def _repeat(
        self, call: Callable[..., Any], request: Any, timeout_s: float | None = None, give_up_s: float | None = None
    ) -> Any:
        """Calls until there is an answer, each time for `timeout_s` or until shortly after the server is given up.

        Raises:
            ReverbLostError: there was none for `give_up_s`, by default the client's.
            grpc.RpcError: the server refused, for example an unknown table.
        """
        give_up_s, pause_s = self._give_up_s if give_up_s is None else give_up_s, 0.1
        while True:
            asked_at = time.monotonic()
            attempt_s = timeout_s or min(_CALL_S, max(give_up_s - self.gone_s, _LEAST_S))
            try:
                answer = call(request.SerializeToString(), timeout=attempt_s)
            except grpc.RpcError as error:
                if not is_lost(error):
                    raise
                self._missed(asked_at)
                if self.gone_s >= give_up_s or self._closed.wait(pause_s):
                    raise self._lost_error(f"{error.code().name}: {error.details()}") from error
            else:
                self.heard()
                return answer
            pause_s = min(2 * pause_s, 2.0)

    def _missed(self, asked_at: float) -> None:
        """A call that was begun then failed, since the server is gone."""
        with self._lock:
            before = self._absence
            is_new = before is None or asked_at - before.until > _APART_S
            self._absence = _Absence(max(asked_at, self._heard_at) if is_new else before.since, time.monotonic())

    def _lost_error(self, why: str) -> ReverbLostError:
        return ReverbLostError(
            f"the Reverb server at {self.address} has been gone for {self.gone_s:.0f} s ({why}). Start it, which loads "
            "its last checkpoint: uv run --script launch/reverb_server.py --port "
            f"{self.address.rpartition(':')[2]} --config TABLES --checkpoint-dir DIR --allow-unauthenticated"
        )


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


def compare_table(table: pb.TableInfo, wanted: Mapping[str, Any]) -> list[str]:
    """The settings that a table has otherwise than a description: "max_size 8 instead of 5000"."""
    sampler, remover, limiter = table.sampler_options, table.remover_options, table.rate_limiter_info
    found = {
        "sampler": sampler.WhichOneof("distribution"),
        "priority_exponent": sampler.prioritized.priority_exponent,
        "remover": remover.WhichOneof("distribution"),
        "max_size": table.max_size,
        "max_times_sampled": max(table.max_times_sampled, 0),
        "samples_per_insert": limiter.samples_per_insert,
        "min_size": limiter.min_size_to_sample,
        "min_diff": limiter.min_diff,
        "max_diff": limiter.max_diff,
    }
    if not found["sampler"] == wanted["sampler"] == "prioritized":
        del found["priority_exponent"]
    return [
        f"{name} {_text(value)} instead of {_text(wanted[name])}"
        for name, value in found.items()
        if value != wanted[name]
    ]


def _text(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def describe_table(table: pb.TableInfo) -> str:
    """A table's size and its rate limiter's counters, for messages."""
    limiter = table.rate_limiter_info
    return (
        f"table {table.name!r} holds {table.current_size} of {table.max_size} items; since its last reset "
        f"{limiter.insert_stats.completed} were inserted and {limiter.sample_stats.completed} sampled. Its rate "
        f"limiter: samples_per_insert {limiter.samples_per_insert:g}, min_size {limiter.min_size_to_sample}, "
        f"difference {limiter.min_diff:g} to {limiter.max_diff:g}"
    )

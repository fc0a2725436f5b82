"""The actor's side of the wire: says hello, opens a stream for each environment group, asks for actions.

NumPy and grpc only; actors must not import jax. Run as a program it asks a decode server, see `decode_client`.
"""

from __future__ import annotations

import os
import signal

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
    # From here on, for Ctrl-C while modules load would otherwise show a traceback. The server notices that we are gone.
    signal.signal(signal.SIGINT, lambda *_: (os.write(2, b"\n"), os._exit(128 + signal.SIGINT)))

import itertools
import queue
import sys
import time
from collections.abc import Iterator
from typing import Any

import grpc
import optree

from seedx import security, specs
from seedx.checks import ConfigError
from seedx.config import InferenceConfig
from seedx.inference import policy_pb2 as pb
from seedx.inference import wire
from seedx.types import EnvSpec, TimeStep, Tree

# A later start of an actor replaces an earlier one, and a process that connects again replaces only itself.
_STARTED_NS = time.time_ns()
_CONNECTIONS = itertools.count()

_OPTIONS = [
    ("grpc.max_receive_message_length", wire.MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", wire.MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 1_000),
]
_LOST = {
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.UNKNOWN,
}
_MISFITS = {
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.UNIMPLEMENTED,  # another service
}


class Finished(Exception):  # noqa: N818  not an error
    """The server ended training; there is nothing left to do."""


class Replaced(Exception):  # noqa: N818  not an error
    """A newer run of this actor has taken its place."""


class ServerLostError(ConnectionError):
    """The server cannot be reached or went away; it may come back."""


class RejectedError(RuntimeError):
    """The server refused what this actor sent; the message is the server's."""


class Connection:
    """One connection of one actor.

    Args:
        address: unix:/path or host:port.
        config: Credentials.
        actor_id: Unique in the run.
        spec: Of the environments.
        groups: Environment groups, each with a stream of its own.
        envs_per_group: Environments of each group.
        evaluation: Act greedily and stay out of training.
        timeout_s: How long the server may take to admit the actor; it compiles first.

    Raises:
        Finished: the server ended training.
        ConfigError: the server refuses this actor.
        ServerLostError: the server cannot be reached.
    """

    def __init__(
        self,
        address: str,
        config: InferenceConfig,
        actor_id: int,
        spec: EnvSpec,
        groups: int,
        envs_per_group: int,
        evaluation: bool,
        timeout_s: float,
    ) -> None:
        self._spec = spec
        self._actor_id = actor_id
        self._envs_per_group = envs_per_group
        self._run_id = pb.RunId(start_time_ns=_STARTED_NS, nonce=next(_CONNECTIONS))
        self._metadata = security.call_metadata(config)
        self._channel = security.open_channel(address, config, _OPTIONS)
        hello = pb.HelloRequest(
            protocol=wire.PROTOCOL,
            actor_id=actor_id,
            run_id=self._run_id,
            groups=groups,
            envs_per_group=envs_per_group,
            evaluation=evaluation,
            spec_json=specs.to_json(spec),
        )
        call = self._channel.unary_unary(wire.HELLO, pb.HelloRequest.SerializeToString, pb.HelloReply.FromString)
        try:
            call(hello, timeout=timeout_s, metadata=self._metadata)
        except grpc.RpcError as error:
            self._channel.close()
            raise _explain(error, address) from None
        self._address = address

    def open_stream(self, group: int) -> GroupStream:
        """The stream of one environment group."""
        attach = pb.Attach(actor_id=self._actor_id, run_id=self._run_id, group=group)
        first = pb.ActRequest(attach=attach).SerializeToString()
        return GroupStream(self._channel, self._address, self._metadata, first, self._spec, self._envs_per_group)

    def close(self) -> None:
        """Ends all streams."""
        self._channel.close()


class GroupStream:
    """The stream of one environment group: `send` its rows, then `receive` its actions."""

    def __init__(
        self,
        channel: grpc.Channel,
        address: str,
        metadata: tuple[tuple[str, str | bytes], ...],
        first: bytes,
        spec: EnvSpec,
        num_envs: int,
    ) -> None:
        self._address = address
        self._timesteps = wire.TimestepCodec(spec, num_envs)
        self._actions = wire.ActionCodec(spec, num_envs)
        self._observation_tree = optree.tree_structure(spec.observation)
        self._action_tree = optree.tree_structure(spec.action)
        self._outgoing: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._outgoing.put(first)
        self._replies = channel.stream_stream(wire.ACT)(self._requests(), metadata=metadata)
        # The thread on which gRPC takes requests ends with the call, or every reconnection would leave one behind.
        self._replies.add_callback(lambda: self._outgoing.put(None))
        self.version = -1

    def send(self, timestep: TimeStep) -> None:
        """Sends the rows of the group.

        Raises:
            WireError: they differ from the spec.
        """
        leaves: list[Any] = self._observation_tree.flatten_up_to(timestep.observation)
        self._outgoing.put(self._timesteps.encode(timestep, leaves))

    def receive(self) -> Tree:
        """The actions for the rows sent last, `[N, ...]`; sets `version` to the weights' that chose them.

        Raises:
            Finished: the server ended training.
            Replaced: a newer run of this actor is connected.
            RejectedError: the server refused the rows.
            ServerLostError: the server went away.
        """
        try:
            message = next(self._replies, None)
        except grpc.RpcError as error:
            raise _explain(error, self._address) from None
        if message is None:
            raise Finished
        leaves, self.version = self._actions.decode(message)
        # Copies, since environments may write into what they are given.
        return optree.tree_unflatten(self._action_tree, [leaf.copy() for leaf in leaves])

    def _requests(self) -> Iterator[bytes]:
        while (message := self._outgoing.get()) is not None:
            yield message


def _explain(error: grpc.RpcError, address: str) -> Exception:
    """The exception that a call's status means for an actor."""
    code, details = error.code(), error.details()  # type: ignore[attr-defined]
    if code in _LOST:
        return ServerLostError(f"the policy server at {address} is lost: {code.name} {details}")
    if code is grpc.StatusCode.OUT_OF_RANGE:
        return Finished()
    if code in (grpc.StatusCode.ABORTED, grpc.StatusCode.ALREADY_EXISTS):
        return Replaced(str(details))
    if code in _MISFITS:
        return ConfigError(f"the policy server at {address} refuses this actor ({code.name}): {details}")
    return RejectedError(f"the policy server at {address} rejects this actor's messages ({code.name}): {details}")


if __name__ == "__main__":
    from seedx.inference import decode_client

    sys.exit(decode_client.main(sys.argv[1:]))

"""Decode hosts as a learner has them: requests are spread over them, and asked again of one that was lost.

A request names the version that the learner had when it asked: no token of it is older. A host that comes back has the
newest weights before it takes requests; the same seeds then give what was lost anew.

Threading: all methods are for any thread. Each host has a thread that connects to it and takes what comes back; gRPC
has others, which send. `_Open`s, what is to be sent and the version are guarded by one lock.
"""

from __future__ import annotations

import contextlib
import itertools
import queue
import threading
import time
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

import grpc
import numpy as np

from seedx import grpc_options, security
from seedx.inference import decode_pb2 as pb
from seedx.inference.requests import Completion, FinishReason, Handle, Request
from seedx.metrics import Number
from seedx.threads import Crew
from seedx.transport.publisher import Publisher
from seedx.types import Tree

_SERVICE = "seedx.v1.DecodeHost"
_RETRY_S = 0.1
_FIGURES_S = 1.0
_OPTIONS = [
    ("grpc.max_receive_message_length", -1),  # a host is trusted
    *grpc_options.WAITING_CLIENT,
]
_REFUSALS = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNIMPLEMENTED)
_DONE = ("stop", "length")


class DecodeHostLostError(ConnectionError):
    """A decode host did not come up, or not again."""


class RemoteScheduler:
    """Has decode hosts serve requests until it is closed.

    Args:
        addresses: Of the hosts.
        publisher: Of the weights, which the hosts read.
        num_slots: Of all hosts together.
        give_up_s: How long a host may be away.
        crew: Runs the threads, and fails with a host.
    """

    def __init__(
        self, addresses: Sequence[str], publisher: Publisher, *, num_slots: int, give_up_s: float, crew: Crew
    ) -> None:
        self.num_slots = num_slots
        self._publisher, self._crew = publisher, crew
        self._lock = threading.RLock()
        self._held = 0  # blocks of `together` that are open
        self._version = 0
        self._ids = itertools.count()
        self._hosts = [_Host(i, address, give_up_s, crew, self._lock) for i, address in enumerate(addresses)]

    def start(self) -> None:
        """Begins to connect."""
        for host in self._hosts:
            self._crew.spawn(host.name, host.loop)

    def close(self) -> None:
        """Ends the connections and the publisher; the crew has stopped."""
        for host in self._hosts:
            host.close()
        self._publisher.close()

    def publish(self, version: int, params: Tree) -> None:
        """New weights, which all that is asked for from now on is made with, or with later ones.

        Raises:
            ValueError: the version is not newer.
        """
        self._publisher.publish(version, params)
        with self._lock:
            self._version = version
            for host in self._hosts:
                host.version = version

    def submit(self, request: Request) -> Handle:
        """Takes a request. That it cannot be done is told by the crew's failure."""
        with self._lock:
            id_ = next(self._ids)
            host = self._hosts[id_ % len(self._hosts)]
            handle = host.add(id_, request)
            if not self._held:
                host.send()
        return handle

    @contextlib.contextmanager
    def together(self) -> Generator[None]:
        """Requests that are submitted inside go to each host in one message, so that it takes them at one turn."""
        with self._lock:
            self._held += 1
            try:
                yield
            finally:
                self._held -= 1
                if not self._held:
                    for host in self._hosts:
                        host.send()

    def figures(self) -> dict[str, Number]:
        """Those of the hosts together, and how many of them answer."""
        found = [figures for host in self._hosts if (figures := host.figures()) is not None]
        merged = {name: _merge(name, [figures[name] for figures in found if name in figures]) for name in _names(found)}
        return merged | {"decode/hosts": len(found), "decode/lost_hosts": sum(host.lost for host in self._hosts)}


@dataclass
class _Open:
    """A request that is not done, and its completions that are."""

    request: Request
    handle: Handle
    completions: dict[int, Completion] = field(default_factory=dict)


class _Host:
    """One host. `add`, `send` and `version` need the lock.

    Attributes:
        name: Of its role.
        version: Of the weights that requests are to be made with at least.
        lost: How often its call broke.
    """

    def __init__(self, index: int, address: str, give_up_s: float, crew: Crew, lock: threading.RLock) -> None:
        self.name = f"decode-{index}"
        self.version = self.lost = 0
        self._address, self._give_up_s, self._crew, self._lock = address, give_up_s, crew, lock
        self._open: dict[int, _Open] = {}
        self._unsent: list[int] = []
        self._outbox: queue.SimpleQueue[bytes | None] | None = None  # None: there is no call
        self._channel = security.open_channel(address, security.Access(), _OPTIONS)
        self._generate = self._channel.stream_stream(f"/{_SERVICE}/Generate", None, pb.OrderReply.FromString)
        self._figures = self._channel.unary_unary(
            f"/{_SERVICE}/Figures", pb.FiguresRequest.SerializeToString, pb.FiguresReply.FromString
        )

    def add(self, id_: int, request: Request) -> Handle:
        """Takes a request, which `send` sends."""
        handle = Handle(lambda _: self._cancel(id_))
        self._open[id_] = _Open(request, handle)
        self._unsent.append(id_)
        return handle

    def send(self) -> None:
        """Sends what was added; without a call it waits for the next one."""
        if self._outbox is not None and self._unsent:
            ids, self._unsent = self._unsent, []
            orders = [pb.Orders.Order(id=id_, request=_message(self._open[id_].request)) for id_ in ids]
            self._outbox.put(pb.Orders(version=self.version, orders=orders).SerializeToString())

    def figures(self) -> dict[str, Number] | None:
        """What it does; None if it does not answer in time."""
        try:
            found = self._figures(pb.FiguresRequest(), timeout=_FIGURES_S).figures
            return {name: int(value) if value.is_integer() else value for name, value in found.items()}
        except (grpc.RpcError, ValueError):  # ValueError: the channel is closed
            return None

    def close(self) -> None:
        """Ends the connection, and with it `loop`."""
        self._channel.close()

    def _cancel(self, id_: int) -> None:
        with self._lock:
            cancelled = self._open.pop(id_, None)
            if cancelled is None:
                return
            if id_ in self._unsent:
                self._unsent.remove(id_)
            elif self._outbox is not None:
                self._outbox.put(pb.Orders(cancelled=[id_]).SerializeToString())
        whole = cancelled.completions
        cancelled.handle.finish([whole.get(i) or _nothing() for i in range(cancelled.request.num_samples)])

    # ---- its thread

    def loop(self) -> None:
        """Talks to the host until the crew stops.

        Raises:
            DecodeHostLostError: it was away for too long.
            RuntimeError: it refuses a request.
        """
        heard_at = time.monotonic()
        while not self._crew.stop.is_set():
            try:
                self._talk()
            except grpc.RpcError as error:
                code, details = error.code(), error.details()  # type: ignore[attr-defined]
                if self._crew.stop.is_set():
                    return
                if code in _REFUSALS:
                    raise RuntimeError(f"{self.name} refuses a request ({code.name}): {details}") from None
                with self._lock:
                    if self._outbox is not None:  # it had taken requests
                        self._outbox, heard_at = None, time.monotonic()
                        self.lost += 1
                if time.monotonic() - heard_at > self._give_up_s:
                    raise DecodeHostLostError(
                        f"{self.name} at {self._address} has taken no requests for {self._give_up_s:g} s "
                        f"(--rollout.timeout-s): {code.name} {details}. Its log, logs/{self.name}.log in the run "
                        "directory, says more."
                    ) from None
            self._crew.stop.wait(_RETRY_S)

    def _talk(self) -> None:
        """One call; raises what ends it."""
        outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        call = self._generate(iter(outbox.get, None))
        try:
            call.initial_metadata()  # waits until the host takes requests, or the call has ended
            if call.is_active():
                with self._lock:
                    self._outbox, self._unsent = outbox, list(self._open)
                    self.send()
            for reply in call:
                self._receive(reply)
        finally:
            call.cancel()
            outbox.put(None)  # ends gRPC's thread that sends

    def _receive(self, reply: pb.OrderReply) -> None:
        completion = _completion(reply.completion)
        if completion.finish_reason not in _DONE:  # by its end, which the call's will follow, or because we said so
            return
        with self._lock:
            found = self._open.get(reply.id)
            if found is None:  # cancelled meanwhile
                return
            found.completions.setdefault(reply.completion.sample, completion)
            found.handle.num_done = len(found.completions)
            if found.handle.num_done < found.request.num_samples:
                return
            del self._open[reply.id]
        found.handle.finish([found.completions[i] for i in range(found.request.num_samples)])


def _message(request: Request) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        tokens=pb.GenerateRequest.Tokens(ids=request.prompt),
        max_tokens=request.max_tokens,
        temperature=request.temperature,
        top_k=request.top_k,
        top_p=request.top_p,
        seed=request.seed,
        num_samples=request.num_samples,
        stop_tokens=request.stop_tokens,
        stop=request.stop,
        priority=request.priority,
        on_swap=request.on_swap.upper(),
    )


def _completion(given: pb.GenerateReply) -> Completion:
    return Completion(
        np.array(given.tokens, np.int32),
        np.array(given.logprobs, np.float32),
        np.array(given.raw_logprobs, np.float32),
        np.array(given.versions, np.int32),
        cast(FinishReason, pb.GenerateReply.FinishReason.Name(given.finish_reason).lower()),
        given.text,
    )


def _nothing() -> Completion:
    """Of a sample that was cancelled."""
    none = np.zeros(0, np.float32)
    return Completion(none.astype(np.int32), none, none, none.astype(np.int32), "cancelled", "")


def _names(found: Sequence[Mapping[str, Number]]) -> set[str]:
    return {name for figures in found for name in figures}


def _merge(name: str, values: Sequence[Number]) -> Number:
    """One figure of all hosts: the oldest version, the mean occupancy, the sum of what is counted."""
    match name:
        case "decode/version":
            return min(values)
        case "decode/occupancy":
            return sum(values) / len(values)
    return sum(values)

"""Versions for readers that ask over gRPC.

A reader says what it has, waits until there is something newer, and gets it as a stream: a manifest, then chunks. It is
a delta if the reader has the version that it was made to. A reader that takes no chunk for STALL_S, or all of them more
slowly than SLOWEST, is dropped, so that later versions need not wait for it.

Threading: handlers run on the loop's thread, the other methods on the publisher's. The newest version and who reads
what are guarded by the condition.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
from collections import Counter
from collections.abc import Callable, Generator
from typing import NamedTuple

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from seedx import grpc_options, security
from seedx.loop_thread import LoopThread
from seedx.metrics import Metrics
from seedx.security import Credentials
from seedx.transport import transport_pb2 as pb
from seedx.transport.encode import Encoded, Version, chunks
from seedx.transport.manifest import PROTOCOL, WRITER_BYTES, VersionId

SERVICE, METHOD = "seedx.v1.WeightService", "Receive"
MAX_WAIT_S = 60.0  # that a reader may ask for at once
MAX_READERS = 256
STALL_S = 30.0
SLOWEST = 10e6  # bytes/s
_CLOSE_S = 5.0


class _Request(NamedTuple):
    newer_than: int
    wait_s: float
    held: VersionId | None
    writer: bytes


class GrpcSink:
    """A server of versions.

    Args:
        address: unix:/path or host:port.
        access: Credentials.
        on_failure: Told of an exception on the loop's thread.
        metrics: Counts what is sent.

    Attributes:
        port: Where it listens.

    Raises:
        ConfigError: the address is in use, cannot be bound, or is not local while there are no credentials, or these
            cannot be read.
    """

    def __init__(
        self,
        address: str,
        access: Credentials,
        on_failure: Callable[[BaseException], None],
        metrics: Metrics,
    ) -> None:
        security.check_listen_address(address, access)
        self._address, self._access, self._metrics = address, access, metrics
        self._token = security.read_token(access)
        self._changed = threading.Condition()
        self._newest: Version | None = None
        self._reading: Counter[int] = Counter()  # streams by version
        self._arrived = asyncio.Event()
        self._stopping = asyncio.Event()
        self._thread = LoopThread("weights", self._serve, on_failure)
        self.port = 0
        self._thread.start()

    def wait_for_room(self, timeout_s: float) -> bool:
        """Whether nobody reads another version than the newest."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._older(), timeout_s)

    def offer(self, version: Version) -> None:
        """Readers that come, or wait, get this one."""
        with self._changed:
            self._newest = version
        self._thread.call(self._announce)

    def close(self) -> None:
        """Ends all streams with UNAVAILABLE."""
        self._thread.call(self._stopping.set)
        self._thread.join(_CLOSE_S + 1.0)

    def _older(self) -> list[int]:
        return [n for n in self._reading if self._newest is None or n != self._newest.id.version]

    # ---- the loop's thread

    async def _serve(self) -> None:
        server = grpc.aio.server(options=grpc_options.SERVER, maximum_concurrent_rpcs=MAX_READERS)
        handler = grpc.unary_stream_rpc_method_handler(self._receive)  # raw bytes
        server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(SERVICE, {METHOD: handler})])
        self.port = security.bind(server, self._address, self._access)
        await server.start()
        self._thread.ready()
        await self._stopping.wait()
        self._announce()  # to those who wait
        await server.stop(grace=_CLOSE_S)

    def _announce(self) -> None:
        arrived, self._arrived = self._arrived, asyncio.Event()
        arrived.set()

    async def _receive(self, message: bytes, context: grpc.aio.ServicerContext) -> None:
        if not security.authorized(tuple(context.invocation_metadata() or ()), self._token):
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "missing or wrong token; give the publisher's.")
        try:
            request = _parse(message)
        except ValueError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except _ProtocolError as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        await self._wait(request)
        if self._stopping.is_set():
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the publisher ends.")
        try:
            with self._newer(request) as version:
                if version is not None:
                    await self._send(_encoded(version, request.held), context)
        except TimeoutError:
            self._metrics.count("weights/dropped_readers")
            await context.abort(grpc.StatusCode.ABORTED, "the reader was too slow.")

    async def _wait(self, request: _Request) -> None:
        """Until there is a newer version, or the time is over, or the server ends."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(request.wait_s):
                while not (self._stopping.is_set() or self._is_newer(request)):
                    await self._arrived.wait()

    def _is_newer(self, than: _Request) -> bool:
        if self._newest is None:
            return False
        return self._newest.id.version > than.newer_than or than.writer not in (b"", self._newest.id.writer)

    @contextlib.contextmanager
    def _newer(self, than: _Request) -> Generator[Version | None]:
        """The newest version while it is read; None if it is not newer."""
        with self._changed:
            version = self._newest if self._is_newer(than) else None
            if version is not None:
                self._reading[version.id.version] += 1
        try:
            yield version
        finally:
            if version is not None:
                with self._changed:
                    self._reading[version.id.version] -= 1
                    self._reading += Counter()  # without those that nobody reads
                    self._changed.notify_all()

    async def _send(self, encoded: Encoded, context: grpc.aio.ServicerContext) -> None:
        async with asyncio.timeout(STALL_S + encoded.manifest.stream_bytes / SLOWEST):
            await context.write(encoded.manifest.to_bytes())
            for chunk in chunks(encoded):
                async with asyncio.timeout(STALL_S):
                    await context.write(chunk)
                self._metrics.count("weights/sent_bytes", len(chunk))
        self._metrics.count("weights/sent")


class _ProtocolError(Exception):
    """The reader speaks another protocol."""


def _parse(message: bytes) -> _Request:
    """The request.

    Raises:
        ValueError: it is malformed; the message names the field.
        _ProtocolError: it is of another protocol.
    """
    try:
        given = pb.ReceiveRequest.FromString(message)
    except DecodeError:
        raise ValueError("the message is no ReceiveRequest.") from None
    if given.protocol != PROTOCOL:
        raise _ProtocolError(
            f"protocol is {given.protocol}, the publisher's is {PROTOCOL}; use the same seedx on both."
        )
    if not (math.isfinite(given.wait_s) and 0 <= given.wait_s <= MAX_WAIT_S):
        raise ValueError(f"wait_s ({given.wait_s}) must be from 0 to {MAX_WAIT_S:g} seconds.")
    held = VersionId(given.held.writer, given.held.version) if given.HasField("held") else None
    for name, writer in (("writer", given.writer or None), ("held.writer", held and held.writer)):
        if writer is not None and len(writer) != WRITER_BYTES:
            raise ValueError(f"{name} has {len(writer)} bytes; it must have {WRITER_BYTES}.")
    return _Request(given.newer_than, given.wait_s, held, given.writer)


def _encoded(version: Version, held: VersionId | None) -> Encoded:
    """What a reader needs that has another version."""
    delta = version.delta
    return delta if delta and held == (version.id.writer, delta.manifest.base) else version.full

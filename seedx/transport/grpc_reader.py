"""A reader of versions over gRPC. No jax."""

from __future__ import annotations

import time

import grpc
import grpc.experimental

from seedx import grpc_options, security
from seedx.checks import ConfigError
from seedx.metrics import Metrics
from seedx.security import Credentials
from seedx.transport import transport_pb2 as pb
from seedx.transport.assembly import Assembly, Held
from seedx.transport.buffers import Buffers
from seedx.transport.errors import CorruptedError, WeightsLostError
from seedx.transport.grpc_sink import MAX_WAIT_S, METHOD, SERVICE
from seedx.transport.manifest import PROTOCOL, Manifest, check_tensors
from seedx.types import Tree
from seedx.weights import Weights

_RETRY_S = 0.1
_CALL_S = 3600.0  # pings notice a dead publisher, and a slow reader is dropped: this bounds the rest
_MAX_MANIFEST_BYTES = 2**26
_OPTIONS = [
    ("grpc.max_receive_message_length", _MAX_MANIFEST_BYTES),
    *grpc_options.WAITING_CLIENT,
    (grpc.experimental.ChannelOptions.SingleThreadedUnaryStream, 1),  # a fifth faster
]
_MISFITS = (
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.UNIMPLEMENTED,
)


class GrpcReader:
    """Receives versions; for one thread. `close` may be called by any.

    Args:
        address: unix:/path or host:port of the publisher.
        access: Credentials.
        expected: Tree of arrays, or of what else has shape and dtype: others are refused; None: any are taken.
        delta: Keeps the last version, so that the publisher need only send what changed.
        metrics: Counts what is received.

    Raises:
        ConfigError: the address is none, or credentials cannot be read.
    """

    def __init__(
        self, address: str, access: Credentials, *, expected: Tree | None, delta: bool, metrics: Metrics
    ) -> None:
        self._address, self._expected, self._delta, self._metrics = address, expected, delta, metrics
        self._metadata = security.call_metadata(access)
        self._channel = security.open_channel(address, access, _OPTIONS)
        self._call = self._channel.unary_stream(f"/{SERVICE}/{METHOD}")
        self._held: Held | None = None
        self._writer = b""  # of what was received last
        self._buffers = Buffers()
        self._closed = False

    def receive(self, newer_than: int, timeout_s: float) -> Weights | None:
        """The newest version; None if there is none above `newer_than`, or of another publisher than before, in time.

        A version that has begun to arrive is taken to its end. Arrays may be shared with the version before, and
        cannot be written to.

        Raises:
            WeightsLostError: the publisher cannot be reached at the end of the time; call again.
            CorruptedError: what came last did not arrive as it was published; call again.
            ConfigError: the publisher refuses this reader, or has other tensors than expected.
        """
        deadline, wants_delta = time.monotonic() + timeout_s, True
        while True:
            left_s = max(deadline - time.monotonic(), 0.0)
            try:
                found = self._fetch(newer_than, min(left_s, MAX_WAIT_S), self._held if wants_delta else None)
                if found is not None or left_s <= MAX_WAIT_S:
                    return found
                continue
            except CorruptedError as error:
                self._metrics.count("weights/corrupted")
                fault, wants_delta = error, False
            except grpc.RpcError as error:
                self._metrics.count("weights/lost")
                fault = self._explain(error)
            is_final = self._closed or not isinstance(fault, (CorruptedError, WeightsLostError))
            if is_final or time.monotonic() >= deadline:
                raise fault from None
            time.sleep(_RETRY_S)

    def close(self) -> None:
        """Ends the connection; a `receive` that waits raises WeightsLostError."""
        self._closed = True
        self._channel.close()

    def _fetch(self, newer_than: int, wait_s: float, held: Held | None) -> Weights | None:
        request = pb.ReceiveRequest(protocol=PROTOCOL, newer_than=newer_than, wait_s=wait_s, writer=self._writer)
        if held is not None:
            request.held.writer, request.held.version = held.id
        if self._closed:
            raise WeightsLostError("this reader is closed.")
        call = self._call(request.SerializeToString(), timeout=wait_s + _CALL_S, metadata=self._metadata)
        try:
            first = next(call, None)
            if first is None:
                return None
            manifest = Manifest.from_bytes(first)
            if self._expected is not None:
                check_tensors(self._expected, manifest)
            assembly = Assembly(manifest, held, self._buffers)
            for chunk in call:
                assembly.feed(chunk)
            found = assembly.finish()
        finally:
            call.cancel()
            self._buffers.trim()
        self._metrics.count("weights/received")
        self._metrics.count("weights/received_bytes", manifest.payload_bytes)
        self._held, self._writer = found if self._delta else None, found.id.writer
        return found.weights()

    def _explain(self, error: grpc.RpcError) -> Exception:
        code, details = error.code(), error.details()  # type: ignore[attr-defined]
        if code in _MISFITS:
            return ConfigError(f"the publisher at {self._address} refuses this reader ({code.name}): {details}")
        return WeightsLostError(f"the publisher at {self._address} is lost: {code.name} {details}")

"""Publishers and readers by address."""

from __future__ import annotations

import platform
from collections.abc import Callable
from pathlib import Path
from typing import Protocol, runtime_checkable

from seedx.checks import require
from seedx.metrics import Metrics
from seedx.security import Credentials
from seedx.transport.directory import DirectoryFiles, DirectorySink
from seedx.transport.file_reader import FileReader
from seedx.transport.grpc_reader import GrpcReader
from seedx.transport.grpc_sink import GrpcSink
from seedx.transport.publisher import Publisher, Sink
from seedx.transport.shm_files import ShmFiles
from seedx.transport.shm_sink import ShmSink
from seedx.types import Tree
from seedx.weights import Weights

_IN_ORDER = ("x86_64", "AMD64")


@runtime_checkable
class Reader(Protocol):
    """Receives versions; for one thread."""

    def receive(self, newer_than: int, timeout_s: float) -> Weights | None:
        """The newest version above `newer_than`, or of another publisher than before; None: there is none in time."""
        ...

    def close(self) -> None:
        """Holds nothing any more."""
        ...


def open_publisher(
    address: str,
    access: Credentials,
    on_failure: Callable[[BaseException], None],
    *,
    delta: bool = False,
    checksums: bool = True,
    metrics: Metrics | None = None,
) -> Publisher:
    """A publisher at `address`.

    Args:
        address: Where readers find it: unix:/path or host:port, where it listens; shm:NAME for those on this host,
            whose memory then holds two versions more; dir:PATH, where it keeps two versions as files.
        access: Credentials.
        on_failure: Told of an exception on one of its threads; it publishes nothing any more.
        delta: Whether readers over gRPC that have the version before get what changed alone.
        checksums: Whether each tensor has one; shared memory can do without on processors that keep stores in order.
        metrics: Counts what is published.

    Raises:
        ConfigError: the address is in use or cannot be bound, or credentials are missing or cannot be read, or there
            must be checksums.
    """
    metrics = Metrics() if metrics is None else metrics
    kind, _, rest = address.partition(":")
    require(
        checksums or kind != "shm" or platform.machine() in _IN_ORDER,
        f"{address} on {platform.machine()} needs checksums: only on x86-64 do readers see stores in their order.",
    )
    sink: Sink
    match kind:
        case "shm":
            sink = ShmSink(rest, metrics)
        case "dir":
            sink = DirectorySink(Path(rest), metrics)
        case _:
            sink = GrpcSink(address, access, on_failure, metrics)
    delta = delta and isinstance(sink, GrpcSink)
    return Publisher(sink, on_failure, delta=delta, checksums=checksums, metrics=metrics)


def open_reader(
    address: str,
    access: Credentials,
    *,
    expected: Tree | None = None,
    delta: bool = False,
    metrics: Metrics | None = None,
) -> Reader:
    """A reader of the publisher at `address`, which need not be there yet.

    Args:
        address: As the publisher has it.
        access: Credentials.
        expected: Tree of arrays, or of what else has shape and dtype: others are refused; None: any are taken.
        delta: Keeps the last version, so that the publisher need only send what changed.
        metrics: Counts what is received.

    Raises:
        ConfigError: the address is none, or credentials cannot be read.
    """
    metrics = Metrics() if metrics is None else metrics
    kind, _, rest = address.partition(":")
    if kind == "shm":
        return FileReader(ShmFiles(rest), expected, metrics)
    if kind == "dir":
        return FileReader(DirectoryFiles(Path(rest)), expected, metrics)
    return GrpcReader(address, access, expected=expected, delta=delta, metrics=metrics)

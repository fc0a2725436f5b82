"""Weights to another process of this host: `python benchmarks/scaling.py publish`.

A version of --gigabytes is published, over and over, to a reader in another process, and counts from the call of
`publish` to the return of `receive`, on the clock that all processes share: over gRPC, and in shared memory with and
without checksums. Beside it, in the same rounds: as many bytes as bare gRPC messages over the same kind of connection,
as bare TCP, as a copy within a process, and as a copy whose checksum is taken. Figures are medians over the rounds.
Targets: gRPC at least 0.8 of bare gRPC; shared memory 0.5 of the copy, and with checksums 0.8 of the copy with one.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection

import grpc
import grpc.aio
import numpy as np
import xxhash

from seedx.loop_thread import LoopThread
from seedx.security import Access
from seedx.transport.encode import PIECE_BYTES
from seedx.transport.open import open_publisher, open_reader

_DEADLINE_S = 300.0
_TENSORS = 64
_COLD = 3  # rounds in which memory is used for the first time
_BARE = "/bench/Bytes"
_RATIOS = {
    "grpc_tcp": "bare_grpc_tcp",
    "grpc_unix": "bare_grpc_unix",
    "shm": "memcpy_and_checksum",
    "shm_without_checksums": "memcpy",
}

Tree = dict[str, np.ndarray]
Seconds = Callable[[], float]


def fail(error: BaseException) -> None:
    raise error


def tree_of(size: int) -> Tree:
    data = np.random.default_rng(0).integers(0, 256, size, dtype=np.uint8)
    return {f"tensor{i:03d}": part for i, part in enumerate(np.array_split(data, _TENSORS))}


# ---- the other process: does what it is told, says that it is ready, and on a word from us starts


def receive(pipe: Connection, address: str) -> None:
    reader, version = open_reader(address, Access()), -1
    while pipe.recv():
        weights = reader.receive(version, _DEADLINE_S)
        pipe.send(time.monotonic())
        assert weights is not None
        version = weights.version
        del weights  # before the next one needs the memory
    reader.close()


def receive_bare(pipe: Connection, address: str, size: int) -> None:
    with grpc.insecure_channel(address) as channel:
        stream = channel.unary_stream(_BARE)
        assert not [*stream(b"none")]  # connects
        while pipe.recv():
            assert sum(map(len, stream(b"all"))) == size
            pipe.send(time.monotonic())


def receive_tcp(pipe: Connection, address: str, size: int) -> None:
    host, port = address.rsplit(":", 1)
    buffer = bytearray(PIECE_BYTES)
    with socket.create_connection((host, int(port))) as connection:
        while pipe.recv():
            left = size
            while left:
                left -= connection.recv_into(buffer, min(left, PIECE_BYTES))
            pipe.send(time.monotonic())


class Other:
    """A process that runs one of these, and how long it takes."""

    def __init__(self, target: Callable[..., None], *args: object) -> None:
        context = get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=target, args=(theirs, *args), daemon=True)
        self._process.start()

    def seconds(self, start: Callable[[], None]) -> float:
        """Until it has all, from `start`, of which it is told just before."""
        self._pipe.send(True)
        time.sleep(0.1)  # it waits for what comes
        began = time.monotonic()
        start()
        assert self._pipe.poll(_DEADLINE_S)
        return self._pipe.recv() - began

    def close(self) -> None:
        self._pipe.send(False)
        self._process.join(_DEADLINE_S)


# ---- what is measured


def published(address: str, tree: Tree, checksums: bool = True) -> tuple[Seconds, Callable[[], None]]:
    publisher = open_publisher(address, Access(), fail, checksums=checksums)
    other, versions = Other(receive, address), iter(range(10**9))

    def close() -> None:
        other.close()
        publisher.close()

    return lambda: other.seconds(lambda: publisher.publish(next(versions), tree)), close


class BareServer:
    """Streams messages that are made beforehand."""

    def __init__(self, address: str, messages: list[bytes]) -> None:
        self._address, self._messages = address, messages
        self._go = asyncio.Event()
        self._stop = asyncio.Event()
        self._thread = LoopThread("bare", self._serve, fail)
        self.port = 0
        self._thread.start()

    async def _serve(self) -> None:
        server = grpc.aio.server()
        handler = grpc.unary_stream_rpc_method_handler(self._bytes)
        server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("bench", {"Bytes": handler})])
        self.port = server.add_insecure_port(self._address)
        await server.start()
        self._thread.ready()
        await self._stop.wait()
        await server.stop(None)

    async def _bytes(self, message: bytes, context: grpc.aio.ServicerContext) -> None:
        if message == b"all":
            await self._go.wait()
            self._go.clear()
            for chunk in self._messages:
                await context.write(chunk)

    def go(self) -> None:
        self._thread.call(self._go.set)

    def close(self) -> None:
        self._thread.call(self._stop.set)
        self._thread.join(_DEADLINE_S)


def bare(address: str, messages: list[bytes]) -> tuple[Seconds, Callable[[], None]]:
    server, size = BareServer(address, messages), sum(map(len, messages))
    other = Other(receive_bare, address.replace(":0", f":{server.port}"), size)

    def close() -> None:
        other.close()
        server.close()

    return lambda: other.seconds(server.go), close


def tcp(tree: Tree, size: int) -> tuple[Seconds, Callable[[], None]]:
    listening = socket.create_server(("127.0.0.1", 0))
    other = Other(receive_tcp, f"127.0.0.1:{listening.getsockname()[1]}", size)
    connection, _ = listening.accept()

    def send() -> None:
        for tensor in tree.values():
            connection.sendall(tensor.data)

    def close() -> None:
        other.close()
        connection.close()
        listening.close()

    return lambda: other.seconds(send), close


def copied(tree: Tree, into: Tree, checksums: bool) -> float:
    began = time.monotonic()
    for name, tensor in tree.items():
        np.copyto(into[name], tensor)
        if checksums:
            xxhash.xxh3_64_intdigest(into[name].data)
    return time.monotonic() - began


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="scaling.py publish", description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=1.0, help="of a version; default 1")
    parser.add_argument("--rounds", type=int, default=7, help=f"default 7, after {_COLD} that do not count")
    flags = parser.parse_args(argv)
    size = int(flags.gigabytes * 1e9)
    tree = tree_of(size)
    messages = [bytes(t[i : i + PIECE_BYTES].data) for t in tree.values() for i in range(0, t.size, PIECE_BYTES)]
    into = {name: np.ones_like(tensor) for name, tensor in tree.items()}
    with tempfile.TemporaryDirectory() as directory, socket.create_server(("127.0.0.1", 0)) as probe:
        port, name = probe.getsockname()[1], f"seedx-bench-{os.getpid()}"
        probe.close()
        measured: dict[str, tuple[Seconds, Callable[[], None]]] = {
            "grpc_tcp": published(f"127.0.0.1:{port}", tree),
            "bare_grpc_tcp": bare("127.0.0.1:0", messages),
            "grpc_unix": published(f"unix:{directory}/weights", tree),
            "bare_grpc_unix": bare(f"unix:{directory}/bare", messages),
            "shm": published(f"shm:{name}", tree),
            "shm_without_checksums": published(f"shm:{name}-bare", tree, checksums=False),
            "raw_tcp": tcp(tree, size),
            "memcpy": (lambda: copied(tree, into, False), lambda: None),
            "memcpy_and_checksum": (lambda: copied(tree, into, True), lambda: None),
        }
        rounds = defaultdict(list)
        for number in range(_COLD + flags.rounds):
            for name, (seconds, _) in measured.items():
                taken = seconds()
                if number >= _COLD:
                    rounds[name].append(size / taken / 1e9)
        for _, close in measured.values():
            close()
    rates = {name: statistics.median(values) for name, values in rounds.items()}
    for name, values in rounds.items():
        print(f"RESULT publish_{name} {rates[name]:.2f} GB/s ({min(values):.2f} to {max(values):.2f})")
    for name, other in _RATIOS.items():
        print(f"RESULT publish_{name}_over_{other} {rates[name] / rates[other]:.2f} ratio")

"""Weights to another process of this host: `python benchmarks/scaling.py publish`.

The gRPC part publishes versions of --gigabytes to a reader in another process, and beside it streams as many bytes with
bare gRPC and with bare TCP over the same kind of address. A version counts from `publish` to the return of `receive`, on
the clock that both processes share. Rounds are interleaved, figures are medians.
"""

from __future__ import annotations

import argparse
import asyncio
import socket
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection

import grpc
import grpc.aio
import numpy as np

from seedx.loop_thread import LoopThread
from seedx.security import Access
from seedx.transport.encode import PIECE_BYTES
from seedx.transport.open import open_publisher, open_reader

_DEADLINE_S = 300.0
_TENSORS = 64
_SECOND = 1e9  # of time.monotonic_ns, which all processes of a host share
_BARE = "/bench/Bytes"


def fail(error: BaseException) -> None:
    raise error


def tree_of(size: int) -> dict[str, np.ndarray]:
    """Random bytes as bfloat16-sized tensors, float16 here: their values mean nothing."""
    data = np.random.default_rng(0).integers(0, 2**16, size // 2, dtype=np.uint16).view(np.float16)
    return {f"tensor{i:03d}": part for i, part in enumerate(np.array_split(data, _TENSORS))}


# ---- the other process


def other(pipe: Connection) -> None:
    """Does what it is told, and answers with the time when it was done, in ns."""
    readers = {}
    while (task := pipe.recv()) is not None:
        kind, address, argument = task
        if kind == "receive":
            if address not in readers:
                readers[address] = open_reader(address, Access())
                pipe.send(0)
                continue
            weights = readers[address].receive(argument, _DEADLINE_S)
            done, weights = time.monotonic_ns(), weights.version
        elif kind == "grpc":
            with grpc.insecure_channel(address) as channel:
                channel.unary_unary("/bench/Nothing")(b"")
                pipe.send(0)
                pipe.recv()
                assert sum(map(len, channel.unary_stream(_BARE)(str(argument).encode()))) == argument
                done = time.monotonic_ns()
        else:
            done = _receive_tcp(address, argument, pipe)
        pipe.send(done)


def _receive_tcp(address: str, size: int, pipe: Connection) -> int:
    host, port = address.rsplit(":", 1)
    with socket.create_connection((host, int(port))) as connection:
        pipe.send(0)
        pipe.recv()
        connection.sendall(b"x")
        buffer, left = bytearray(PIECE_BYTES), size
        while left:
            left -= connection.recv_into(buffer, min(left, PIECE_BYTES))
    return time.monotonic_ns()

"""A version as manifest and payloads, in full and as a delta to the version before."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import xxhash

from seedx.transport import delta
from seedx.transport import transport_pb2 as pb
from seedx.transport.manifest import Manifest, Tensor, VersionId
from seedx.transport.tree import Path, bytes_of

CHUNK_BYTES = 2**20  # the fastest for gRPC, and far below what it allows in a message

Arrays = Sequence[tuple[Path, np.ndarray]]


class Encoded(NamedTuple):
    """A version, in full or as a delta."""

    manifest: Manifest
    payloads: Sequence[np.ndarray | bytes]


class Version(NamedTuple):
    """A version on this host, ready to be read.

    Attributes:
        arrays: C order; nobody changes them.
        delta: To the version before; None: there is none, or it is no smaller.
    """

    arrays: Arrays
    full: Encoded
    delta: Encoded | None

    @property
    def id(self) -> VersionId:
        """Which one."""
        return self.full.manifest.id


def encode(id_: VersionId, arrays: Arrays, base: Version | None, checksums: bool) -> Version:
    """Makes a version of its arrays.

    Args:
        id_: Which version.
        arrays: By path, C order.
        base: What a delta is made to, if it has the same tensors; None: no delta.
        checksums: Whether the manifest has them.
    """
    tensors = [
        Tensor(path, array.dtype, array.shape, pb.Tensor.FULL, array.nbytes, checksum_of(array) if checksums else None)
        for path, array in arrays
    ]
    full = Encoded(Manifest(id_, None, tensors), [bytes_of(array) for _, array in arrays])
    return Version(arrays, full, None if base is None else _delta(full, arrays, base))


def checksum_of(array: np.ndarray) -> int:
    """XXH3-64 of a tensor's bytes."""
    return xxhash.xxh3_64_intdigest(bytes_of(array).data)


def _delta(full: Encoded, arrays: Arrays, base: Version) -> Encoded | None:
    if _kinds(base.full) != _kinds(full):
        return None
    tensors, payloads = [], []
    for tensor, payload, (_, array), (_, before) in zip(
        full.manifest.tensors, full.payloads, arrays, base.arrays, strict=True
    ):
        found = delta.encode(before, array)
        if found is not None:
            encoding, payload = found
            tensor = tensor._replace(encoding=encoding, payload_bytes=len(payload))
        tensors.append(tensor)
        payloads.append(payload)
    manifest = full.manifest._replace(base=base.id.version, tensors=tensors)
    return Encoded(manifest, payloads) if manifest.payload_bytes < full.manifest.payload_bytes else None


def _kinds(encoded: Encoded) -> list[tuple]:
    return [(tensor.path, tensor.dtype, tensor.shape) for tensor in encoded.manifest.tensors]


def chunks(payloads: Sequence[np.ndarray | bytes]) -> Iterator[bytes]:
    """All payloads, one after the other, in pieces of CHUNK_BYTES."""
    parts: list[memoryview] = []
    room = CHUNK_BYTES
    for payload in payloads:
        rest = payload.data if isinstance(payload, np.ndarray) else memoryview(payload)
        while len(rest):
            part, rest = rest[:room], rest[room:]
            parts.append(part)
            room -= len(part)
            if not room:
                yield b"".join(parts)
                parts, room = [], CHUNK_BYTES
    if parts:
        yield b"".join(parts)

"""A version as manifest and payloads, in full and as a delta to the version before."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import xxhash

from seedx.transport import delta
from seedx.transport import transport_pb2 as pb
from seedx.transport.manifest import CHECKSUM_BYTES, Manifest, Tensor, VersionId
from seedx.transport.tree import Path, bytes_of

PIECE_BYTES = 2**20  # fits the cache of a core
CHUNK_BYTES = 2**21  # half of what gRPC takes as a message by default

Arrays = Sequence[tuple[Path, np.ndarray]]


class Payload(NamedTuple):
    """Of one tensor.

    Attributes:
        data: Bytes.
        checksum: Of the tensor; None: it is taken of `data`, which is all of it, on the way.
    """

    data: memoryview
    checksum: int | None


class Encoded(NamedTuple):
    """A version, in full or as a delta."""

    manifest: Manifest
    payloads: Sequence[Payload]


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
        checksums: Whether they travel with the payloads.
    """
    tensors = [Tensor(path, array.dtype, array.shape, pb.Tensor.FULL, array.nbytes) for path, array in arrays]
    payloads = [Payload(bytes_of(array).data, None) for _, array in arrays]
    full = Encoded(Manifest(id_, None, checksums, tensors), payloads)
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
            encoding, data = found
            tensor = tensor._replace(encoding=encoding, payload_bytes=len(data))
            payload = Payload(memoryview(data), checksum_of(array) if data else None)
        tensors.append(tensor)
        payloads.append(payload)
    manifest = full.manifest._replace(base=base.id.version, tensors=tensors)
    return Encoded(manifest, payloads) if manifest.payload_bytes < full.manifest.payload_bytes else None


def _kinds(encoded: Encoded) -> list[tuple]:
    return [(tensor.path, tensor.dtype, tensor.shape) for tensor in encoded.manifest.tensors]


def pieces(encoded: Encoded) -> Iterator[memoryview]:
    """All payloads and checksums, one after the other, in pieces of at most PIECE_BYTES.

    A checksum is taken while its tensor passes, just before a piece is copied, which then is in the cache.
    """
    for tensor, (data, checksum) in zip(encoded.manifest.tensors, encoded.payloads, strict=True):
        if tensor.encoding == pb.Tensor.UNCHANGED:
            continue
        digest = xxhash.xxh3_64()
        for start in range(0, len(data), PIECE_BYTES):
            piece = data[start : start + PIECE_BYTES]
            if encoded.manifest.checksums and checksum is None:
                digest.update(piece)
            yield piece
        if encoded.manifest.checksums:
            whole = digest.intdigest() if checksum is None else checksum
            yield memoryview(whole.to_bytes(CHECKSUM_BYTES, "little"))


def chunks(encoded: Encoded) -> Iterator[bytes]:
    """The same in chunks of CHUNK_BYTES."""
    parts: list[memoryview] = []
    room = CHUNK_BYTES
    for piece in pieces(encoded):
        while len(piece):
            part, piece = piece[:room], piece[room:]
            parts.append(part)
            room -= len(part)
            if not room:
                yield b"".join(parts)
                parts, room = [], CHUNK_BYTES
    if parts:
        yield b"".join(parts)

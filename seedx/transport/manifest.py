"""What a version consists of: its tensors by path, and how each is encoded."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from google.protobuf.message import DecodeError

from seedx.transport import transport_pb2 as pb
from seedx.transport.errors import CorruptedError, TreeMismatchError
from seedx.transport.tree import DTYPES, Path, flatten, name_of
from seedx.types import Tree

PROTOCOL = 1
WRITER_BYTES = 16
CHECKSUM_BYTES = 8
_MAX_AXES = 32
_SHOWN = 5  # mismatches in a message


class VersionId(NamedTuple):
    """Which weights: a publisher and its number for them."""

    writer: bytes
    version: int


class Tensor(NamedTuple):
    """One tensor of a version."""

    path: Path
    dtype: np.dtype
    shape: tuple[int, ...]
    encoding: int  # of pb.Tensor.Encoding
    payload_bytes: int


class Manifest(NamedTuple):
    """All tensors of a version."""

    id: VersionId
    base: int | None  # version that it is a delta to
    checksums: bool
    tensors: Sequence[Tensor]

    @property
    def payload_bytes(self) -> int:
        """Of all tensors."""
        return sum(tensor.payload_bytes for tensor in self.tensors)

    @property
    def stream_bytes(self) -> int:
        """Of all payloads and checksums."""
        sums = sum(tensor.encoding != pb.Tensor.UNCHANGED for tensor in self.tensors) if self.checksums else 0
        return self.payload_bytes + CHECKSUM_BYTES * sums

    def to_bytes(self) -> bytes:
        """As it travels."""
        return pb.Manifest(
            protocol=PROTOCOL,
            writer=self.id.writer,
            version=self.id.version,
            base=self.base,
            checksums=self.checksums,
            tensors=[
                pb.Tensor(
                    path=tensor.path,
                    dtype=str(tensor.dtype),
                    shape=tensor.shape,
                    encoding=tensor.encoding,  # type: ignore[bad-argument-type]  a number will do
                    payload_bytes=tensor.payload_bytes,
                )
                for tensor in self.tensors
            ],
        ).SerializeToString()

    @classmethod
    def from_bytes(cls, message: bytes) -> Manifest:
        """What `to_bytes` gave.

        Raises:
            CorruptedError: it is no manifest; the message names the field.
        """
        try:
            given = pb.Manifest.FromString(message)
        except DecodeError:
            raise CorruptedError("a version begins with something else than a manifest") from None
        if given.protocol != PROTOCOL or len(given.writer) != WRITER_BYTES or given.version < 0:
            raise CorruptedError(
                f"a manifest has protocol {given.protocol}, version {given.version} and a writer of "
                f"{len(given.writer)} bytes; it must have {PROTOCOL}, no negative version and {WRITER_BYTES} bytes"
            )
        base = given.base if given.HasField("base") else None
        tensors = [_tensor(entry, base) for entry in given.tensors]
        if len({tensor.path for tensor in tensors}) != len(tensors):
            raise CorruptedError("a manifest names a tensor twice")
        return cls(VersionId(given.writer, given.version), base, given.checksums, tensors)


def _tensor(given: pb.Tensor, base: int | None) -> Tensor:
    path, shape = tuple(given.path), tuple(given.shape)
    dtype = DTYPES.get(given.dtype)
    if dtype is None or len(shape) > _MAX_AXES or any(n < 0 for n in shape):
        raise CorruptedError(f"tensor {name_of(path)} cannot have dtype {given.dtype!r} and shape {list(shape)}")
    size = math.prod(shape) * dtype.itemsize
    full = given.encoding == pb.Tensor.FULL
    if given.payload_bytes != size if full else given.payload_bytes > size:
        raise CorruptedError(f"tensor {name_of(path)} has payload_bytes {given.payload_bytes}; its size is {size}")
    if not full and (base is None or given.encoding not in pb.Tensor.Encoding.values()):
        raise CorruptedError(f"tensor {name_of(path)} has encoding {given.encoding}, and the version base {base}")
    return Tensor(path, dtype, shape, given.encoding, given.payload_bytes)


def check_tensors(expected: Tree, manifest: Manifest) -> None:
    """Refuses a version with other tensors than a tree of arrays, or of their shapes and dtypes.

    Raises:
        TreeMismatchError: the message names tensors.
    """
    want = {path: _kind(leaf) for path, leaf in flatten(expected)}
    have = {tensor.path: _kind(tensor) for tensor in manifest.tensors}
    wrong = [
        f"{name_of(path)} is {have.get(path, 'absent')}, not {want.get(path, 'expected')}"
        for path in sorted(want.keys() | have.keys())
        if want.get(path) != have.get(path)
    ]
    if wrong:
        more = f" and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
        raise TreeMismatchError(
            f"version {manifest.id.version} is of another model: {'; '.join(wrong[:_SHOWN])}{more}. Start publisher "
            "and reader with the same model."
        )


def _kind(leaf: Any) -> str:
    return f"{leaf.dtype}{list(leaf.shape)}"

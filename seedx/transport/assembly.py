"""A version as it arrives: tensors filled piece by piece, checked, and handed on only when all are whole."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import xxhash

from seedx.transport import delta
from seedx.transport import transport_pb2 as pb
from seedx.transport.buffers import Buffers
from seedx.transport.encode import PIECE_BYTES, checksum_of
from seedx.transport.errors import CorruptedError
from seedx.transport.manifest import CHECKSUM_BYTES, Manifest, Tensor, VersionId
from seedx.transport.tree import Path, name_of, unflatten
from seedx.weights import Weights


class Held:
    """A version that a reader has, and may get a delta to. Its arrays cannot be written to.

    Attributes:
        id: Which one.
        arrays: By path.
    """

    def __init__(self, id_: VersionId, arrays: dict[Path, np.ndarray]) -> None:
        self.id, self.arrays = id_, arrays
        for array in arrays.values():
            array.flags.writeable = False

    def weights(self) -> Weights:
        """As others know it."""
        return Weights(self.id.version, unflatten(self.arrays.items()))


class Assembly:
    """One version while it arrives.

    Args:
        manifest: Of the version.
        held: What the reader has; None: nothing.
        buffers: Memory for the tensors.

    Raises:
        CorruptedError: the version is a delta to another one, or to other tensors.
    """

    def __init__(self, manifest: Manifest, held: Held | None, buffers: Buffers) -> None:
        self._manifest, self._buffers = manifest, buffers
        self._base = {} if manifest.base is None else _base(manifest, held)
        self._arrays: dict[Path, np.ndarray] = {}
        self._left = iter(manifest.tensors)
        self._tensor: _Arriving | None = None
        self._next()

    def space(self) -> np.ndarray | None:
        """Where the next bytes go, uint8 `[n]` of at most PIECE_BYTES; None if the version is whole."""
        return None if self._tensor is None else self._tensor.space()

    def advance(self, count: int) -> None:
        """Says that so many bytes are there.

        Raises:
            CorruptedError: with them a tensor is whole, and not what its checksum says.
        """
        assert self._tensor is not None
        if self._tensor.advance(count):
            self._finish_tensor(self._tensor)
            self._next()

    def feed(self, chunk: bytes) -> None:
        """Takes the next bytes.

        Raises:
            CorruptedError: a tensor is not what its checksum says, or there are bytes too many.
        """
        rest = np.frombuffer(chunk, np.uint8)
        while rest.size:
            space = self.space()
            if space is None:
                raise CorruptedError(f"version {self._manifest.id.version} has {rest.size} bytes too many")
            count = min(rest.size, space.size)
            space[:count] = rest[:count]
            self.advance(count)
            rest = rest[count:]

    def finish(self) -> Held:
        """The version.

        Raises:
            CorruptedError: it is not whole.
        """
        if self._tensor is not None:
            raise CorruptedError(f"version {self._manifest.id.version} ends within tensor {self._tensor.name}")
        return Held(self._manifest.id, self._arrays)

    def _next(self) -> None:
        """Goes to the next tensor of which there are bytes."""
        for tensor in self._left:
            self._tensor = _Arriving(tensor, self._manifest.checksums, self._buffers)
            if not self._tensor.whole:
                return
            self._finish_tensor(self._tensor)
        self._tensor = None

    def _finish_tensor(self, arrived: _Arriving) -> None:
        tensor = arrived.tensor
        if tensor.encoding == pb.Tensor.FULL:
            array = arrived.payload.view(tensor.dtype).reshape(tensor.shape)
        elif tensor.encoding == pb.Tensor.UNCHANGED:
            array = self._base[tensor.path]
        else:
            array = self._buffers.take(self._base[tensor.path].nbytes).view(tensor.dtype).reshape(tensor.shape)
            array[...] = self._base[tensor.path]
            try:
                delta.apply(tensor.encoding, arrived.payload, array)
            except CorruptedError as error:
                raise CorruptedError(f"tensor {arrived.name}: {error}") from None
        if arrived.checksum is not None:
            checksum = arrived.digest.intdigest() if tensor.encoding == pb.Tensor.FULL else checksum_of(array)
            if checksum != arrived.checksum:
                raise CorruptedError(
                    f"tensor {arrived.name} of version {self._manifest.id.version} has checksum {checksum:016x}, not "
                    f"{arrived.checksum:016x}"
                )
        self._arrays[tensor.path] = array


class _Arriving:
    """One tensor while its payload arrives, and then its checksum.

    Attributes:
        payload: uint8 `[n]`.
        digest: Of it, if it is the tensor in full.
    """

    def __init__(self, tensor: Tensor, checksums: bool, buffers: Buffers) -> None:
        self.tensor = tensor
        full = tensor.encoding == pb.Tensor.FULL
        self.payload = buffers.take(tensor.payload_bytes) if full else np.empty(tensor.payload_bytes, np.uint8)
        self.digest = xxhash.xxh3_64()
        has_sum = checksums and tensor.encoding != pb.Tensor.UNCHANGED
        self._sum = np.empty(CHECKSUM_BYTES if has_sum else 0, np.uint8)
        self._filled = 0

    @property
    def name(self) -> str:
        return name_of(self.tensor.path)

    @property
    def whole(self) -> bool:
        return self._filled == self.payload.size + self._sum.size

    @property
    def checksum(self) -> int | None:
        return int.from_bytes(self._sum.tobytes(), "little") if self._sum.size else None

    def space(self) -> np.ndarray:
        if self._filled < self.payload.size:
            return self.payload[self._filled : self._filled + PIECE_BYTES]
        return self._sum[self._filled - self.payload.size :]

    def advance(self, count: int) -> bool:
        """Whether it is whole now."""
        if self._sum.size and self._filled < self.payload.size and self.tensor.encoding == pb.Tensor.FULL:
            # While the processor's cache still has it.
            self.digest.update(self.payload[self._filled : self._filled + count].data)
        self._filled += count
        return self.whole


def _base(manifest: Manifest, held: Held | None) -> dict[Path, np.ndarray]:
    wanted = VersionId(manifest.id.writer, manifest.base or 0)
    if held is None or held.id != wanted:
        has = "nothing" if held is None else f"version {held.id.version}"
        raise CorruptedError(
            f"version {manifest.id.version} is a delta to version {manifest.base}, and this reader has {has}"
            f"{' of another publisher' if held is not None and held.id.version == manifest.base else ''}"
        )
    _check_base(manifest.tensors, held)
    return held.arrays


def _check_base(tensors: Sequence[Tensor], held: Held) -> None:
    for tensor in tensors:
        array = held.arrays.get(tensor.path)
        if array is None or (array.dtype, array.shape) != (tensor.dtype, tensor.shape):
            raise CorruptedError(f"tensor {name_of(tensor.path)} is not as in version {held.id.version}, its base")

"""A version as it arrives: tensors filled piece by piece, checked, and handed on only when all are whole."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import xxhash

from seedx.transport import delta
from seedx.transport import transport_pb2 as pb
from seedx.transport.encode import checksum_of
from seedx.transport.errors import CorruptedError
from seedx.transport.manifest import Manifest, Tensor, VersionId
from seedx.transport.tree import Path, bytes_of, name_of, unflatten
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

    Raises:
        CorruptedError: the version is a delta to another one, or to other tensors.
    """

    def __init__(self, manifest: Manifest, held: Held | None) -> None:
        self._manifest = manifest
        self._base = {} if manifest.base is None else _base(manifest, held)
        self._arrays: dict[Path, np.ndarray] = {}
        self._left = iter(manifest.tensors)
        self._next()

    def feed(self, chunk: bytes | memoryview | np.ndarray) -> None:
        """Takes the next bytes of the payloads.

        Raises:
            CorruptedError: a tensor is not what its checksum says, or there are bytes too many.
        """
        rest = np.frombuffer(chunk, np.uint8)
        while rest.size:
            if self._tensor is None:
                raise CorruptedError(f"version {self._manifest.id.version} has {rest.size} bytes too many")
            count = min(rest.size, self._buffer.size - self._filled)
            place = self._buffer[self._filled : self._filled + count]
            place[:] = rest[:count]
            if self._hash is not None:
                self._hash.update(place.data)  # while the processor's cache still has it
            self._filled += count
            rest = rest[count:]
            if self._filled == self._buffer.size:
                self._finish_tensor()

    def finish(self) -> Held:
        """The version.

        Raises:
            CorruptedError: it is not whole.
        """
        if self._tensor is not None:
            raise CorruptedError(f"version {self._manifest.id.version} ends within tensor {self._name}")
        return Held(self._manifest.id, self._arrays)

    @property
    def _name(self) -> str:
        assert self._tensor is not None
        return name_of(self._tensor.path)

    def _next(self) -> None:
        """Goes to the next tensor; those without payload are done at once."""
        for tensor in self._left:
            self._tensor: Tensor | None = tensor
            self._filled = 0
            self._hash = None
            if tensor.encoding == pb.Tensor.FULL:
                self._array = np.empty(tensor.shape, tensor.dtype)
                self._buffer = bytes_of(self._array)
                if tensor.checksum is not None:
                    self._hash = xxhash.xxh3_64()
            else:
                self._buffer = np.empty(tensor.payload_bytes, np.uint8)
            if self._buffer.size:
                return
            self._finish_payload()
        self._tensor = None

    def _finish_tensor(self) -> None:
        self._finish_payload()
        self._next()

    def _finish_payload(self) -> None:
        tensor = self._tensor
        assert tensor is not None
        if tensor.encoding == pb.Tensor.FULL:
            array, checksum = self._array, self._hash and self._hash.intdigest()
        else:
            try:
                array = delta.apply(tensor.encoding, self._buffer, self._base[tensor.path])
            except CorruptedError as error:
                raise CorruptedError(f"tensor {self._name}: {error}") from None
            changed = tensor.encoding != pb.Tensor.UNCHANGED
            checksum = checksum_of(array) if changed and tensor.checksum is not None else None
        if checksum is not None and checksum != tensor.checksum:
            raise CorruptedError(
                f"tensor {self._name} of version {self._manifest.id.version} has checksum {checksum:016x} instead of "
                f"{tensor.checksum:016x}"
            )
        self._arrays[tensor.path] = array


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

"""A GGUF file: metadata, an index of tensors, and tensors as float32. Versions 2 and 3, little-endian.

Format: ggml/docs/gguf.md of llama.cpp. Nothing is trusted: every length is compared with the file before it is used.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from seedx.networks.ggml_blocks import FORMATS, TYPE_NAMES, BlockFormat, dequantize
from seedx.networks.model_error import ModelError

_BOOL, _STRING, _ARRAY = 7, 8, 9
# Metadata value types; strings and arrays are read by hand.
_SCALARS = {0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", _BOOL: "<u1"}
_SCALARS |= {10: "<u8", 11: "<i8", 12: "<f8"}
_MAX_DIMS = 4


class TensorInfo(NamedTuple):
    """Where a tensor lies. `shape` is NumPy's order: GGUF's dimensions reversed."""

    shape: tuple[int, ...]
    block_format: BlockFormat
    start: int  # bytes from the file's begin
    num_bytes: int


class GgufFile:
    """An open file; tensors are read from the disk when asked for.

    Attributes:
        path: Of the file.
        metadata: Key to int, float, bool, str, or a list of strings or a NumPy array of numbers.
        tensors: Name to where it lies, in the file's order.

    Raises:
        ModelError: the file is none, is truncated or malformed, or holds a type of weights that is not supported.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            self._data = np.memmap(path, np.uint8, "r")
        except (OSError, ValueError) as error:  # ValueError: an empty file
            raise ModelError(f"{path} cannot be opened: {error}.") from error
        cursor = _Cursor(self._data)
        try:
            self.metadata, self.tensors = _read(cursor)
        except ModelError as error:
            raise ModelError(f"{path} at byte {cursor.place}: {error}") from None

    def tensor(self, name: str) -> np.ndarray:
        """A tensor as float32, in memory of its own."""
        info = self.tensors[name]
        raw = self._data[info.start : info.start + info.num_bytes]
        return dequantize(np.asarray(raw), info.block_format).reshape(info.shape)


class _Cursor:
    """Reads forward through the header; `place` is the byte that is read next."""

    def __init__(self, data: np.ndarray) -> None:
        self._data, self.size = data.data, len(data)
        self.place = 0

    def take(self, num_bytes: int, what: str) -> memoryview:
        if num_bytes > self.size - self.place:
            left = self.size - self.place
            raise ModelError(f"{what} needs {num_bytes} bytes, but the file ends after {left}; is it truncated?")
        taken = self._data[self.place : self.place + num_bytes]
        self.place += num_bytes
        return taken

    def uint32(self, what: str) -> int:
        return struct.unpack("<I", self.take(4, what))[0]

    def uint64(self, what: str) -> int:
        return struct.unpack("<Q", self.take(8, what))[0]

    def string(self, what: str) -> str:
        raw = self.take(self.uint64(f"the length of {what}"), what)
        try:
            return str(raw, "utf-8")
        except UnicodeDecodeError as error:
            raise ModelError(f"{what} is not UTF-8: {error}.") from None

    def value(self, what: str) -> Any:
        kind = self.uint32(f"the type of {what}")
        if kind == _STRING:
            return self.string(what)
        if kind == _ARRAY:
            return self._array(what)
        number = self._numbers(kind, 1, what)[0].item()
        return bool(number) if kind == _BOOL else number

    def _array(self, what: str) -> list[str] | np.ndarray:
        kind, count = self.uint32(f"the item type of {what}"), self.uint64(f"the length of {what}")
        if kind == _STRING:
            if count * 8 > self.size - self.place:  # a length that was invented must not keep us busy
                raise ModelError(f"{what} claims {count} strings, more than the file can hold; is it truncated?")
            return [self.string(f"item {i} of {what}") for i in range(count)]
        return self._numbers(kind, count, what)

    def _numbers(self, kind: int, count: int, what: str) -> np.ndarray:
        if kind not in _SCALARS:
            raise ModelError(f"{what} has the value type {kind}, which is none of {sorted([*_SCALARS, _STRING])}.")
        dtype = np.dtype(_SCALARS[kind])
        return np.frombuffer(self.take(count * dtype.itemsize, what), dtype)


def _read(cursor: _Cursor) -> tuple[dict[str, Any], dict[str, TensorInfo]]:
    magic = bytes(cursor.take(4, "the magic number"))
    if magic != b"GGUF":
        raise ModelError(f"it begins with {magic!r}, not with b'GGUF': this is no GGUF file.")
    version = cursor.uint32("the version")
    if version not in (2, 3):
        swapped = " The file is big-endian." if version in (2 << 24, 3 << 24) else ""
        raise ModelError(f"version {version} is not supported, only 2 and 3.{swapped} Convert the model anew.")
    num_tensors, num_keys = cursor.uint64("the number of tensors"), cursor.uint64("the number of keys")
    metadata: dict[str, Any] = {}
    for i in range(num_keys):
        key = cursor.string(f"the name of key {i} of {num_keys}")
        if key in metadata:
            raise ModelError(f"key {key!r} comes twice.")
        metadata[key] = cursor.value(f"key {key!r}")
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1:
        raise ModelError(f"general.alignment ({alignment}) must be a positive integer.")
    tensors: dict[str, TensorInfo] = {}
    for i in range(num_tensors):
        name = cursor.string(f"the name of tensor {i} of {num_tensors}")
        if name in tensors:
            raise ModelError(f"tensor {name!r} comes twice.")
        tensors[name] = _read_info(cursor, name, alignment)
    data_start = -(-cursor.place // alignment) * alignment  # offsets count from here
    placed = {name: info._replace(start=data_start + info.start) for name, info in tensors.items()}
    _check_ends(placed, cursor.size)
    return metadata, placed


def _read_info(cursor: _Cursor, name: str, alignment: int) -> TensorInfo:
    """With `start` still counted from where the tensors begin."""
    what = f"tensor {name!r}"
    num_dims = cursor.uint32(f"the number of dimensions of {what}")
    if not 1 <= num_dims <= _MAX_DIMS:
        raise ModelError(f"{what} has {num_dims} dimensions; 1 to {_MAX_DIMS} are allowed.")
    dims = [cursor.uint64(f"the shape of {what}") for _ in range(num_dims)]
    kind, start = cursor.uint32(f"the type of {what}"), cursor.uint64(f"the offset of {what}")
    if kind not in FORMATS:
        name_of_type = TYPE_NAMES[kind] if kind < len(TYPE_NAMES) else kind
        supported = ", ".join(block_format.name for block_format in FORMATS.values())
        raise ModelError(f"{what} is of type {name_of_type}, which is not supported. Use a file with {supported}.")
    block_format = FORMATS[kind]
    if 0 in dims or dims[0] % block_format.size:
        size = block_format.size
        raise ModelError(f"{what} has the shape {dims}; {block_format.name} stores rows in blocks of {size} weights.")
    if start % alignment:
        raise ModelError(f"{what} has the offset {start}, which is no multiple of the alignment {alignment}.")
    num_bytes = math.prod(dims) // block_format.size * block_format.record.itemsize
    return TensorInfo(tuple(reversed(dims)), block_format, start, num_bytes)


def _check_ends(tensors: Mapping[str, TensorInfo], size: int) -> None:
    for name, info in tensors.items():
        end = info.start + info.num_bytes
        if end > size:
            raise ModelError(f"tensor {name!r} ends at byte {end}, but the file at {size}; is it truncated?")

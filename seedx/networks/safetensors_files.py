"""Safetensors files: 8 bytes of header length, a JSON header, the tensors' bytes.

The format is documented at https://github.com/huggingface/safetensors#format. A file is checked in full against its
header before a byte of a tensor is read; tensors are read and written one at a time.
"""

import json
import math
import os
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from seedx.networks.model_error import ModelError

DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(jnp.bfloat16),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_MAX_HEADER_BYTES = 100_000_000  # as the format says


class StoredTensor(NamedTuple):
    """Where a tensor lies."""

    path: Path
    dtype: np.dtype
    shape: tuple[int, ...]
    offset: int

    def read(self) -> np.ndarray:
        """The tensor, in an array of its own."""
        count = math.prod(self.shape)
        return np.fromfile(self.path, self.dtype, count, offset=self.offset).reshape(self.shape)


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a file by name.

    Raises:
        ModelError: the file is not what the format allows; the message says how.
    """
    try:
        return _read_header(path)
    except _MalformedError as error:
        raise ModelError(f"{path} is not a valid safetensors file: {error} Fetch it again.") from None


class _MalformedError(Exception):
    """What is wrong with a file."""


def _read_header(path: Path) -> dict[str, StoredTensor]:
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        if len(start) < 8:
            raise _MalformedError(f"it has {size} bytes, fewer than the 8 of the header's length.")
        (length,) = struct.unpack("<Q", start)
        if length > min(_MAX_HEADER_BYTES, size - 8):
            raise _MalformedError(f"it has {size} bytes, and its header should have {length}.")
        header = _json_object(file.read(length))
    header.pop("__metadata__", None)
    begin, end, tensors = 8 + length, 0, {}
    ranges = {name: _checked(name, entry) for name, entry in header.items()}
    for name, (dtype, shape, first, last) in sorted(ranges.items(), key=lambda item: item[1][2:]):
        if first != end:
            fault = "overlaps with the one before" if first < end else "leaves a hole"
            raise _MalformedError(f"tensor {name} starts at byte {first}, but those before end at {end}: it {fault}.")
        end = last
        tensors[name] = StoredTensor(path, dtype, shape, begin + first)
    if begin + end != size:
        raise _MalformedError(f"it has {size} bytes, but its header describes {begin + end}.")
    return tensors


def _json_object(text: bytes) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(found := dict(pairs)) != len(pairs):
            raise _MalformedError("its header names something twice.")
        return found

    try:
        header = json.loads(text, object_pairs_hook=unique)
    except ValueError as error:
        raise _MalformedError(f"its header is not JSON ({error}).") from None
    if not isinstance(header, dict):
        raise _MalformedError("its header is not a JSON object.")
    return header


def _checked(name: str, entry: Any) -> tuple[np.dtype, tuple[int, ...], int, int]:
    """Dtype, shape, first byte and the byte after the last."""
    match entry:
        case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [int(first), int(last)]}:
            pass
        case _:
            raise _MalformedError(f"tensor {name} is described by {entry}, not by dtype, shape and data_offsets.")
    if dtype not in DTYPES:
        raise ModelError(f"Tensor {name} has dtype {dtype}; {', '.join(DTYPES)} can be read.")
    if not all(isinstance(n, int) and n >= 0 for n in shape):
        raise _MalformedError(f"tensor {name} has shape {shape}.")
    if first < 0 or last - first != math.prod(shape) * DTYPES[dtype].itemsize:
        raise _MalformedError(f"tensor {name} of {dtype}{shape} cannot have the bytes {first} to {last}.")
    return DTYPES[dtype], tuple(shape), first, last


def write(path: Path, specs: dict[str, tuple[np.dtype, tuple[int, ...]]], tensors: Iterable[np.ndarray]) -> None:
    """Writes a file; it takes its name once it is whole.

    Args:
        path: Of the file.
        specs: Dtype and shape of each tensor by name.
        tensors: The tensors in the order of `specs`, taken one at a time.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, (dtype, shape) in specs.items():
        size = math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    unfinished = path.with_name(path.name + ".part")
    with unfinished.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for (dtype, shape), tensor in zip(specs.values(), tensors, strict=True):
            assert (tensor.dtype, tensor.shape) == (dtype, shape)
            file.write(np.ascontiguousarray(tensor).view(np.uint8).data)
    os.replace(unfinished, path)

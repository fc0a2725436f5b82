"""Items as Reverb's chunks and columns, and back; everything read is checked. No TensorFlow, no network.

A row column is a concatenation of slices of chunks; every other column has one row and is "squeezed": its row axis is
dropped on reading.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import cramjam
import numpy as np

from seedx.checks import ConfigError
from seedx.replay import reverb_pb2 as pb
from seedx.replay.reverb_layout import DTYPE_NUMBERS, Column, Layout

_DTYPES = {number: dtype for dtype, number in DTYPE_NUMBERS.items()}
_MAX_ROWS = 2**31 - 1  # of a chunk: a slice's fields are int32
_MAX_RATIO = 32  # more than Snappy can compress: 64 bytes by three


class ReverbDataError(ConfigError):
    """An item that cannot be read as what was expected; the message names the column and what is wrong."""


# ---- writing: requests in pieces, which are joined once, when they are sent; requests joined are one request


class Chunk(NamedTuple):
    """A chunk of consecutive rows."""

    key: int
    rows: int
    pieces: tuple[bytes, ...]  # of an InsertStreamRequest that holds it


def make_chunk(key: int, episode: int, start: int, arrays: Sequence[np.ndarray]) -> Chunk:
    """A chunk with one tensor for each array `[rows, ...]`.

    Args:
        key: Random uint64.
        episode: Non-zero uint64; the sequence that the rows are of.
        start: Number of the first row in it.
        arrays: Any memory order.
    """
    rows = len(arrays[0])
    head = pb.ChunkData(
        chunk_key=key,
        sequence_range=pb.SequenceRange(episode_id=episode, start=start, end=start + rows - 1),
        data_tensors_len=len(arrays),
        data_uncompressed_size=sum(array.nbytes for array in arrays),
    )
    tensors: list[bytes] = []
    for array in arrays:
        content = _field(pb.Tensor.TENSOR_CONTENT_FIELD_NUMBER, [compress(array)])
        tensors += _field(pb.ChunkData.Data.TENSORS_FIELD_NUMBER, [_tensor_head(array.dtype, array.shape), *content])
    chunk = [head.SerializeToString(), *_field(pb.ChunkData.DATA_FIELD_NUMBER, tensors)]
    return Chunk(key, rows, tuple(_field(pb.InsertStreamRequest.CHUNKS_FIELD_NUMBER, chunk)))


@functools.lru_cache(maxsize=1024)
def _tensor_head(dtype: np.dtype, shape: tuple[int, ...]) -> bytes:
    dims = [pb.TensorShape.Dim(size=size) for size in shape]
    return pb.Tensor(dtype=DTYPE_NUMBERS[dtype], tensor_shape=pb.TensorShape(dim=dims)).SerializeToString()


def _field(number: int, pieces: Sequence[bytes]) -> list[bytes]:
    """A message's pieces as a field of another: tag and length go before. Spares protobuf's copies of large data."""
    length, prefix = sum(map(len, pieces)), bytearray([number << 3 | 2])
    while length > 127:
        prefix.append(length & 127 | 128)
        length >>= 7
    prefix.append(length)
    return [bytes(prefix), *pieces]


def compress(array: np.ndarray) -> bytes:
    """Raw Snappy of an array's elements in C order."""
    flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
    return memoryview(cramjam.snappy.compress_raw(flat)).tobytes()


def make_item(
    key: int, table: str, priority: float, layout: Layout, row_chunks: Sequence[Chunk], state_chunks: Sequence[Chunk]
) -> bytes:
    """An InsertStreamRequest that holds an item: all rows of `row_chunks`, and the one of `state_chunks`."""
    request = pb.InsertStreamRequest()
    item = request.items.add(key=key, table=table, priority=priority)
    row_index, state_index = itertools.count(), itertools.count()
    for column in layout.columns:
        message = item.flat_trajectory.columns.add(squeeze=column.squeeze)
        index = next(state_index if column.squeeze else row_index)
        for chunk in state_chunks if column.squeeze else row_chunks:
            message.chunk_slices.add(chunk_key=chunk.key, length=chunk.rows, index=index)
    return request.SerializeToString()


# ---- reading

Chunks = Mapping[int, pb.ChunkData]


def count_rows(trajectory: pb.FlatTrajectory, chunks: Chunks, layout: Layout) -> int:
    """How many rows an item has; of a ragged one, no more than the chunks that came with it hold.

    So damaged data cannot make us reserve more than came.

    Raises:
        ReverbDataError: it is not an item of this layout, or its columns have different numbers of rows.
    """
    if len(trajectory.columns) != len(layout.columns):
        wanted = ", ".join(f"{column.name} {column}" for column in layout.columns)
        raise ReverbDataError(
            f"the item has {len(trajectory.columns)} columns instead of {len(layout.columns)}: {wanted}."
        )
    if layout.rows is not None:
        return layout.rows
    columns = zip(trajectory.columns, layout.columns, strict=True)
    counts = {column.name: _count_rows(message, chunks, column) for message, column in columns if not column.squeeze}
    if len(set(counts.values())) != 1:
        raise ReverbDataError(f"its columns must have equally many rows, not {counts}.")
    return next(iter(counts.values()))


def read_item(trajectory: pb.FlatTrajectory, chunks: Chunks, layout: Layout, out: Sequence[np.ndarray]) -> None:
    """Writes an item, after `count_rows`, into arrays `[rows, ...]` of the layout's dtypes and row shapes, in C order.

    Columns that are squeezed have one row.

    Raises:
        ReverbDataError: it is not such an item, or its data are damaged.
    """
    for message, column, rows in zip(trajectory.columns, layout.columns, out, strict=True):
        try:
            if message.squeeze != column.squeeze:
                raise ReverbDataError("one has a row axis, the other does not.")
            _read_column(message, chunks, rows)
        except ReverbDataError as error:
            raise ReverbDataError(f"column {column.name}, expected as {column}: {error}") from None


def _count_rows(message: pb.FlatTrajectory.Column, chunks: Chunks, column: Column) -> int:
    held, row_bytes = {}, column.dtype.itemsize * math.prod(column.row_shape)
    try:
        for piece in message.chunk_slices:
            _, tensor, rows = _find(piece, chunks, column.dtype, column.row_shape)
            _check_size(tensor.tensor_content, rows * row_bytes)
            held[piece.chunk_key, piece.index] = rows
        count = sum(piece.length for piece in message.chunk_slices)
        if not 1 <= count <= sum(held.values()):
            raise ReverbDataError(f"it has {count} rows, and its chunks {sum(held.values())}.")
    except ReverbDataError as error:
        raise ReverbDataError(f"column {column.name}, expected as {column}: {error}") from None
    return count


def _read_column(message: pb.FlatTrajectory.Column, chunks: Chunks, rows: np.ndarray) -> None:
    if sum(piece.length for piece in message.chunk_slices) != len(rows):
        raise ReverbDataError(f"it has {[piece.length for piece in message.chunk_slices]} rows.")
    start = 0
    for piece in message.chunk_slices:
        chunk, tensor, count = _find(piece, chunks, rows.dtype, rows.shape[1:])
        _read_slice(chunk, tensor, count, piece.offset, rows[start : start + piece.length])
        start += piece.length


def _find(
    piece: pb.FlatTrajectory.ChunkSlice, chunks: Chunks, dtype: np.dtype, row_shape: tuple[int, ...]
) -> tuple[pb.ChunkData, pb.Tensor, int]:
    """The chunk and tensor of a slice, which are as they must be, and the tensor's rows."""
    chunk = chunks.get(piece.chunk_key)
    if chunk is None or not 0 <= piece.index < len(chunk.data.tensors):
        raise ReverbDataError(f"tensor {piece.index} of chunk {piece.chunk_key} did not come with it.")
    tensor = chunk.data.tensors[piece.index]
    shape = tuple(dim.size for dim in tensor.tensor_shape.dim)
    found = _DTYPES.get(tensor.dtype)
    if found != dtype or not shape or shape[1:] != row_shape:
        raise ReverbDataError(f"its data are {found or f'of dtype number {tensor.dtype}'}{list(shape)} in a chunk.")
    stop = piece.offset + piece.length
    if not 0 <= piece.offset < stop <= shape[0] <= _MAX_ROWS:
        raise ReverbDataError(f"it has rows {piece.offset} to {stop} of a chunk of {shape[0]} rows.")
    return chunk, tensor, shape[0]


def _read_slice(chunk: pb.ChunkData, tensor: pb.Tensor, rows: int, offset: int, out: np.ndarray) -> None:
    """Writes the rows from `offset` on of a chunk that has so many."""
    if len(out) == rows and not chunk.delta_encoded:
        _decompress(tensor.tensor_content, out)
        return
    _check_size(tensor.tensor_content, rows * out[0].nbytes)  # before anything is reserved
    whole = np.empty((rows, *out.shape[1:]), out.dtype)
    _decompress(tensor.tensor_content, whole)
    if chunk.delta_encoded and whole.ndim >= 2 and whole.dtype.kind in "iu":
        unsigned = whole.view(f"u{whole.itemsize}")
        np.cumsum(unsigned, axis=0, dtype=unsigned.dtype, out=unsigned)
    out[...] = whole[offset : offset + len(out)]


def _check_size(content: bytes, expected: int) -> None:
    try:
        size = cramjam.snappy.decompress_raw_len(content)
    except cramjam.DecompressionError as error:
        raise ReverbDataError(f"its compressed data are damaged: {error}.") from None
    if size != expected or size > _MAX_RATIO * len(content):
        raise ReverbDataError(f"its {len(content)} compressed bytes hold {size} bytes instead of {expected}.")


def _decompress(content: bytes, out: np.ndarray) -> None:
    _check_size(content, out.nbytes)
    try:
        cramjam.snappy.decompress_raw_into(content, out.reshape(-1).view(np.uint8).data)
    except cramjam.DecompressionError as error:
        raise ReverbDataError(f"its compressed data are damaged: {error}.") from None

"""Items as Reverb's chunks and columns, and back; everything read is checked. No TensorFlow, no network.

An item's leaves are columns, in the order of `jax.tree.leaves` (dict keys sorted), which is also that of Reverb's own
client. A column of an unroll's rows is a concatenation of slices of chunks; every other leaf is a column of one row,
"squeezed": its row axis is dropped on reading.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import cramjam
import jax
import numpy as np

from seedx.replay import reverb_pb2 as pb
from seedx.types import Tree, Unroll

# tensorflow.DataType
_NUMBERS = {
    np.dtype(dtype): number
    for dtype, number in (
        (np.float32, 1),
        (np.float64, 2),
        (np.int32, 3),
        (np.uint8, 4),
        (np.int16, 5),
        (np.int8, 6),
        (np.complex64, 8),
        (np.int64, 9),
        (np.bool_, 10),
        (jax.numpy.bfloat16, 14),
        (np.uint16, 17),
        (np.complex128, 18),
        (np.float16, 19),
        (np.uint32, 22),
        (np.uint64, 23),
    )
}
_MAX_RATIO = 32  # more than Snappy can compress: 64 bytes by three
_DTYPES = {number: dtype for dtype, number in _NUMBERS.items()}


class ReverbDataError(ValueError):
    """An item that cannot be read as what was expected; the message names the column and what is wrong."""


class Column(NamedTuple):
    """What is expected of one leaf of an item."""

    name: str  # its path, for example ".timestep.observation"
    dtype: np.dtype
    shape: tuple[int, ...]  # of one item; of a row column, rows included
    squeeze: bool  # one row, without its axis

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


class Layout(NamedTuple):
    """What every item of a table looks like."""

    structure: jax.tree_util.PyTreeDef
    columns: tuple[Column, ...]
    rows: int  # of the row columns; 0: there are none


def layout_of(items: Tree) -> Layout:
    """The layout of items `[N, ...]`.

    Raises:
        ValueError: a dtype that Reverb has no number for, or leaves whose numbers of items or rows differ.
    """
    leaves, structure = jax.tree_util.tree_flatten_with_path(items)
    num_state = len(jax.tree.leaves(items.state)) if isinstance(items, Unroll) else len(leaves)
    columns = []
    for i, (path, leaf) in enumerate(leaves):
        name, leaf = jax.tree_util.keystr(path), np.asarray(leaf)
        if leaf.dtype not in _NUMBERS:
            raise ValueError(f"{name} is {leaf.dtype}; Reverb takes {', '.join(map(str, _NUMBERS))}.")
        columns.append(Column(name, leaf.dtype, leaf.shape[1:], squeeze=i >= len(leaves) - num_state))
    rows = {column.shape[:1] for column in columns if not column.squeeze}
    if len({np.shape(leaf)[:1] for _, leaf in leaves}) != 1 or len(rows) > 1 or () in rows:
        shapes = ", ".join(f"{jax.tree_util.keystr(path)} {np.shape(leaf)}" for path, leaf in leaves)
        raise ValueError(f"leaves must agree in their number of items, and those of unrolls in their rows: {shapes}.")
    return Layout(structure, tuple(columns), next(iter(rows))[0] if rows else 0)


def check_layout(layout: Layout, expected: Layout) -> None:
    """Raises ValueError unless items of one layout can go where items of another are."""
    for ours, theirs in zip(layout.columns, expected.columns, strict=False):
        if ours != theirs:
            raise ValueError(
                f"{ours.name} of the new items is {ours}, but the table's items have {theirs.name}, {theirs}; a table "
                "holds items of one kind. Use another table, or empty this one."
            )
    if layout.structure != expected.structure:
        raise ValueError(f"the new items are {layout.structure}, but the table's are {expected.structure}.")


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
    return pb.Tensor(dtype=_NUMBERS[dtype], tensor_shape=pb.TensorShape(dim=dims)).SerializeToString()


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


def read_item(
    trajectory: pb.FlatTrajectory, chunks: Mapping[int, pb.ChunkData], layout: Layout, out: Sequence[np.ndarray], n: int
) -> None:
    """Writes an item's columns into place n of arrays `[N, ...]` of the layout's dtypes and shapes, in C order.

    Raises:
        ReverbDataError: it is not such an item, or its data are damaged.
    """
    if len(trajectory.columns) != len(layout.columns):
        raise ReverbDataError(f"the item has {len(trajectory.columns)} columns instead of {len(layout.columns)}.")
    for message, column, array in zip(trajectory.columns, layout.columns, out, strict=True):
        try:
            if message.squeeze != column.squeeze:
                raise ReverbDataError("one has a row axis, the other does not.")
            _read_column(message, chunks, array[n : n + 1] if column.squeeze else array[n])
        except ReverbDataError as error:
            raise ReverbDataError(f"column {column.name}, expected as {column}: {error}") from None


def _read_column(message: pb.FlatTrajectory.Column, chunks: Mapping[int, pb.ChunkData], rows: np.ndarray) -> None:
    length = sum(piece.length for piece in message.chunk_slices)
    if length != len(rows) or any(piece.length < 1 for piece in message.chunk_slices):
        raise ReverbDataError(f"it has {[piece.length for piece in message.chunk_slices]} rows.")
    start = 0
    for piece in message.chunk_slices:
        chunk = chunks.get(piece.chunk_key)
        if chunk is None or not 0 <= piece.index < len(chunk.data.tensors):
            raise ReverbDataError(f"tensor {piece.index} of chunk {piece.chunk_key} did not come with it.")
        _read_slice(chunk, piece, rows[start : start + piece.length])
        start += piece.length


def _read_slice(chunk: pb.ChunkData, piece: pb.FlatTrajectory.ChunkSlice, out: np.ndarray) -> None:
    tensor = chunk.data.tensors[piece.index]
    shape = tuple(dim.size for dim in tensor.tensor_shape.dim)
    dtype = _DTYPES.get(tensor.dtype)
    if dtype != out.dtype or shape[1:] != out.shape[1:]:
        raise ReverbDataError(f"its data are {dtype or f'of dtype number {tensor.dtype}'}{list(shape)} in a chunk.")
    if piece.offset < 0 or piece.offset + piece.length > shape[0]:
        raise ReverbDataError(f"rows {piece.offset} to {piece.offset + piece.length} of a chunk of {shape[0]} rows.")
    if len(out) == shape[0] and not chunk.delta_encoded:
        _decompress(tensor.tensor_content, out)
        return
    _check_size(tensor.tensor_content, shape[0] * out[0].nbytes)  # before anything is reserved
    whole = np.empty(shape, dtype)
    _decompress(tensor.tensor_content, whole)
    if chunk.delta_encoded and whole.ndim >= 2 and whole.dtype.kind in "iu":
        unsigned = whole.view(f"u{whole.itemsize}")
        np.cumsum(unsigned, axis=0, dtype=unsigned.dtype, out=unsigned)
    out[...] = whole[piece.offset : piece.offset + piece.length]


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

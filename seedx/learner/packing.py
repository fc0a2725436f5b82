"""Packs sequences of different lengths into rows of one length, and rows into microbatches of one shape. NumPy.

Letters: N sequences, R rows, L tokens of a row.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from seedx.types import Tree


class Packing(NamedTuple):
    """Where each sequence lies."""

    lengths: np.ndarray  # int64 [N]
    rows: np.ndarray  # int64 [N]
    starts: np.ndarray  # int64 [N], in their rows
    num_rows: int  # R, those that fill up the last microbatch included
    row_tokens: int  # L

    @property
    def places(self) -> np.ndarray:
        """Of each token, one sequence after the other, its place in `[R * L]`; int64 `[sum(lengths)]`."""
        return _spread(self.rows * self.row_tokens + self.starts, self.lengths)


def pack(lengths: np.ndarray, row_tokens: int, rows_multiple: int = 1) -> Packing:
    """First fit, longest first: each sequence goes to the first row with room for it.

    Args:
        lengths: int `[N]`, tokens of each sequence, at least one.
        row_tokens: L.
        rows_multiple: What R is a multiple of: the rows of a microbatch.

    Raises:
        ValueError: a sequence is longer than a row, or empty.
    """
    lengths = np.asarray(lengths, np.int64)
    if len(lengths) == 0 or lengths.min() < 1 or lengths.max() > row_tokens:
        raise ValueError(f"lengths ({lengths}) must be at least one, each from 1 to row_tokens ({row_tokens}).")
    rows, starts = np.empty_like(lengths), np.empty_like(lengths)
    used = np.zeros(len(lengths), np.int64)  # of each row
    for i in np.argsort(-lengths, kind="stable"):
        row = int(np.argmax(used + lengths[i] <= row_tokens))
        rows[i], starts[i] = row, used[row]
        used[row] += lengths[i]
    num_rows = int(np.count_nonzero(used))
    return Packing(lengths, rows, starts, -(-num_rows // rows_multiple) * rows_multiple, row_tokens)


def positions_and_segments(packing: Packing) -> tuple[np.ndarray, np.ndarray]:
    """Of each token its position in its sequence, and that one's number in its row, from 1; int32 `[R, L]`."""
    order = np.lexsort((packing.starts, packing.rows))
    segments = np.empty(len(order), np.int64)
    firsts = np.flatnonzero(np.diff(packing.rows[order], prepend=-1))  # of each row, in that order
    segments[order] = _spread(np.ones(len(firsts), np.int64), np.diff(firsts, append=len(order)))
    positions = _spread(np.zeros_like(packing.lengths), packing.lengths)
    return tuple(place(packing, x.astype(np.int32)) for x in (positions, np.repeat(segments, packing.lengths)))  # type: ignore


def place(packing: Packing, values: np.ndarray) -> np.ndarray:
    """Values of tokens `[sum(lengths)]`, one sequence after the other, as rows `[R, L]`; 0 between."""
    out = np.zeros(packing.num_rows * packing.row_tokens, values.dtype)
    out[packing.places] = values
    return out.reshape(packing.num_rows, packing.row_tokens)


def _spread(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """start, start + 1, ... for each length, one after the other."""
    return np.repeat(starts - (np.cumsum(lengths) - lengths), lengths) + np.arange(int(lengths.sum()))


def microbatches(batch: Tree, rows: int) -> list[Tree]:
    """A batch of NamedTuple leaves `[R, L]` as parts of `rows` rows."""
    return [type(batch)(*(leaf[i : i + rows] for leaf in batch)) for i in range(0, len(batch[0]), rows)]

"""Turns unrolls into items and chunks, and does not send again the rows that an unroll shares with the one before.

Threading: any thread may call; unrolls of one source come from one thread.
"""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from seedx.replay.reverb_codec import Chunk, Layout, make_chunk, make_item
from seedx.replay.reverb_writer import Item, remember

_MIN_OVERLAP = 2  # one row is cheaper to send again than to refer to


class _Tail(NamedTuple):
    """The last rows of a source's last item."""

    episode: int
    start: int  # number of the first of them in the episode
    chunks: tuple[Chunk, ...]


class Encoder:
    """Makes items for one table.

    Args:
        table: The table's name.
        overlap: Rows that two items in a row from one source have in common.
    """

    def __init__(self, table: str, overlap: int) -> None:
        self._table = table
        self._overlap = overlap
        self._tails: OrderedDict[int, _Tail] = OrderedDict()
        self._lock = threading.Lock()  # guards `_tails`
        self._random = np.random.default_rng()

    def keys(self, count: int) -> list[int]:
        """Random keys, none of them 0."""
        return self._random.integers(1, 2**64, count, np.uint64).tolist()

    def encode(
        self, layout: Layout, leaves: Sequence[np.ndarray], n: int, key: int, priority: float, source: int | None
    ) -> Item:
        """Item n of leaves `[N, ...]`; see `Replay.insert` for sources."""
        if layout.rows == 0 or self._overlap < _MIN_OVERLAP:
            source = None
        rows = [leaf[n] for leaf, column in zip(leaves, layout.columns, strict=True) if not column.squeeze]
        state = [leaf[n : n + 1] for leaf, column in zip(leaves, layout.columns, strict=True) if column.squeeze]
        tail = self._take_tail(source)
        chunks = list(tail.chunks)
        for first, last in self._cuts(
            layout.rows, known=sum(chunk.rows for chunk in chunks), shared=source is not None
        ):
            part = [leaf[first:last] for leaf in rows]
            chunks.append(make_chunk(self.keys(1)[0], tail.episode, tail.start + first, part))
        state_chunks = [make_chunk(self.keys(1)[0], tail.episode, tail.start, state)] if state else []
        request = make_item(key, self._table, priority, layout, chunks, state_chunks)
        if source is None:
            return Item(key, request, (*chunks, *state_chunks))
        new_tail = self._make_tail(tail, layout.rows, chunks)
        with self._lock:
            remember(self._tails, source, new_tail)
        return Item(key, request, (*chunks, *state_chunks), source, new_tail.chunks)

    def _cuts(self, rows: int, known: int, shared: bool) -> Iterator[tuple[int, int]]:
        """Where rows after the known ones are cut: shared, so that all later items begin and end at a cut."""
        period = rows - self._overlap if shared else rows
        cuts = {row for row in range(known, rows) if row % period == 0 or (rows - row) % period == 0}
        return itertools.pairwise(sorted({known, rows} | cuts))

    def _take_tail(self, source: int | None) -> _Tail:
        with self._lock:
            tail = self._tails.get(source) if source is not None else None
        return tail or _Tail(self.keys(1)[0], 0, ())

    def _make_tail(self, tail: _Tail, rows: int, chunks: Sequence[Chunk]) -> _Tail:
        """The tail of the item after `tail`, which has these chunks."""
        ends = itertools.accumulate(chunk.rows for chunk in chunks)
        kept = [chunk for chunk, end in zip(chunks, ends, strict=True) if end > rows - self._overlap]
        return _Tail(tail.episode, tail.start + rows - self._overlap, tuple(kept))

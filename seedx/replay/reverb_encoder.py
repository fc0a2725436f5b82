"""Turns items into messages and chunks, and does not send again the rows that an unroll shares with the one before.

Threading: any thread may call; unrolls of one source come from one thread.
"""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from seedx.replay.reverb_codec import Chunk, make_chunk, make_item
from seedx.replay.reverb_layout import Layout, Parts
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
        max_sources: Sources whose last rows are remembered.
    """

    def __init__(self, table: str, overlap: int, max_sources: int) -> None:
        self._table = table
        self._overlap = overlap
        self._max_sources = max_sources
        self._tails: OrderedDict[int, _Tail] = OrderedDict()
        self._lock = threading.Lock()  # guards `_tails`
        self._random = np.random.default_rng()

    def keys(self, count: int) -> list[int]:
        """Random keys, none of them 0."""
        return self._random.integers(1, 2**64, count, np.uint64).tolist()

    def encode(self, layout: Layout, parts: Parts, key: int, priority: float, source: int | None) -> Item:
        """An item of a layout; see `Replay.insert` for sources. Ragged items share no rows."""
        if not layout.rows or self._overlap < _MIN_OVERLAP:
            source = None
        rows = len(parts.rows[0]) if parts.rows else 0
        tail = self._take_tail(source)
        chunks = list(tail.chunks)
        for first, last in self._cuts(rows, known=sum(chunk.rows for chunk in chunks), shared=source is not None):
            part = [leaf[first:last] for leaf in parts.rows]
            chunks.append(make_chunk(self.keys(1)[0], tail.episode, tail.start + first, part))
        state_chunks = [make_chunk(self.keys(1)[0], tail.episode, tail.start, parts.state)] if parts.state else []
        request = make_item(key, self._table, priority, layout, chunks, state_chunks)
        if source is None:
            return Item(key, request, (*chunks, *state_chunks))
        new_tail = self._make_tail(tail, rows, chunks)
        with self._lock:
            remember(self._tails, source, new_tail, self._max_sources)
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

"""How many rows a table has room for, and whether that is enough; in bytes, before it has items."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np

from seedx.checks import require
from seedx.config import TableConfig
from seedx.memory import memory_bytes
from seedx.replay import pool, roster
from seedx.replay.items import Ragged, lengths_of, split
from seedx.types import Tree, Unroll

_ITEM_BYTES = 8  # of the first rows and the lengths, for an item


class Needs(NamedTuple):
    """What a table needs to be full of items like some."""

    item_bytes: int  # of one item with all its rows, the mean of ragged ones
    base_bytes: int  # of all but rows
    row_bytes: int  # of a row and what is noted of it
    rows: int  # expected: where unrolls overlap, those of a source follow each other without a gap
    most_rows: int  # where nothing is shared
    ragged: bool  # of any length, so that nothing is known of `rows`

    @property
    def total_bytes(self) -> int:
        """Bytes expected."""
        return self.base_bytes + self.rows * self.row_bytes


def needs_of(items: Tree, table: TableConfig, overlap: int, max_sources: int) -> Needs:
    """What a table needs.

    Args:
        items: Like those that it will hold, leaves `[N, ...]` or ragged.
        table: Its settings.
        overlap: Rows that an unroll has in common with the one before from its source.
        max_sources: Sources whose last rows it keeps.
    """
    rows, state = (jax.tree.leaves(part) for part in split(items))
    ragged, lengths = isinstance(items, Ragged), lengths_of(items)
    row_bytes, state_bytes = _bytes(rows, 1 if ragged else 2), _bytes(state, 1)
    kept = max_sources * overlap if isinstance(items, Unroll) else 0
    length = float(lengths.mean())
    return Needs(
        item_bytes=round(length * row_bytes) + state_bytes,
        base_bytes=table.max_size * state_bytes + books_bytes(table),
        row_bytes=row_bytes + pool.BOOKS_BYTES,
        rows=round(table.max_size * (length - overlap if kept else length)) + kept,
        most_rows=pool.MAX_ROWS if ragged else table.max_size * int(length) + kept,
        ragged=ragged,
    )


def check_needs(needs: Needs, table: TableConfig) -> None:
    """Raises ConfigError where there is no memory for the rows expected, or for those of one ragged item."""
    size = needs.base_bytes + needs.item_bytes if needs.ragged else needs.total_bytes
    held = "the rows of one of them" if needs.ragged else f"{needs.rows:,} rows"
    for name, bound in _bounds(table).items():
        require(
            size <= bound,
            f"a table of {table.max_size:,} items of {needs.item_bytes:,} bytes takes {size:,} bytes"
            + (f" with {held}" if needs.most_rows else "")
            + f", more than {name} ({bound:,}). Lower --table.max-size, or raise --table.max-bytes if it is that.",
        )


def rows_within(needs: Needs, table: TableConfig) -> int:
    """How many rows a table may hold that passed `check_needs`: as many as its items can have, or as memory has."""
    least = min(_bounds(table).values())
    return min(needs.most_rows, pool.MAX_ROWS, (least - needs.base_bytes) // needs.row_bytes)


def check_books(table: TableConfig) -> None:
    """Raises ConfigError if what a table notes of its items alone does not fit, whatever they are."""
    size, bound = books_bytes(table), memory_bytes() // 2
    require(
        size <= bound,
        f"a table of {table.max_size:,} items takes {size:,} bytes beside them, more than half of this machine's "
        f"memory ({bound:,}). Lower --table.max-size.",
    )


def books_bytes(table: TableConfig) -> int:
    """Bytes of what a table notes of all its items, but for their rows."""
    return table.max_size * _ITEM_BYTES + roster.books_bytes(table)


def _bounds(table: TableConfig) -> dict[str, int]:
    """What a table may take, bytes."""
    return {"table.max_bytes": table.max_bytes, "half of this machine's memory": memory_bytes() // 2}


def _bytes(leaves: Sequence[np.ndarray], axes: int) -> int:
    """Bytes of the leaves behind their first axes."""
    return sum(leaf.dtype.itemsize * math.prod(leaf.shape[axes:]) for leaf in leaves)

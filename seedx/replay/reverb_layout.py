"""What items look like as columns of a Reverb table, and how their leaves are taken apart.

An item's leaves are columns, in the order of `jax.tree.leaves` (dict keys sorted), which is also that of Reverb's own
client. The rows of unrolls and of ragged items are columns with a row axis; every other leaf is a column of one row.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import jax
import numpy as np

from seedx.replay.items import Ragged, number_of
from seedx.types import Tree, Unroll

# tensorflow.DataType
DTYPE_NUMBERS = {
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


class Column(NamedTuple):
    """What is expected of one leaf of an item."""

    name: str  # its path, for example ".timestep.observation"
    dtype: np.dtype
    shape: tuple[int | None, ...]  # of one item; of a row column, rows included, None where their number varies
    squeeze: bool  # one row, without its axis

    @property
    def row_shape(self) -> tuple[int, ...]:
        """Of one row."""
        return self.shape if self.squeeze else self.shape[1:]  # type: ignore[return-value]

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join('rows' if size is None else str(size) for size in self.shape)}]"


class Leaves(NamedTuple):
    """Ragged items but for their lengths, which their columns tell."""

    rows: Tree
    state: Tree


class Layout(NamedTuple):
    """What every item of a table looks like."""

    structure: jax.tree_util.PyTreeDef  # of ragged items: of their `Leaves`
    columns: tuple[Column, ...]
    rows: int | None  # of the row columns; 0: there are none; None: each item has its own number, as ragged ones do


def layout_of(items: Tree) -> Layout:
    """The layout of items `[N, ...]`, or of ragged ones.

    Raises:
        ValueError: a dtype that Reverb has no number for, or leaves whose numbers of items or rows differ.
    """
    ragged = isinstance(items, Ragged)
    if ragged:
        number_of(items)  # checks them
        items = Leaves(items.rows, items.state)
    leaves, structure = jax.tree_util.tree_flatten_with_path(items)
    num_state = len(jax.tree.leaves(items.state)) if isinstance(items, (Unroll, Leaves)) else len(leaves)
    columns = []
    for i, (path, leaf) in enumerate(leaves):
        name, leaf = jax.tree_util.keystr(path), np.asarray(leaf)
        if leaf.dtype not in DTYPE_NUMBERS:
            raise ValueError(f"{name} is {leaf.dtype}; Reverb takes {', '.join(map(str, DTYPE_NUMBERS))}.")
        squeeze = i >= len(leaves) - num_state
        rows = (None,) if ragged and not squeeze else ()
        columns.append(Column(name, leaf.dtype, (*rows, *leaf.shape[1:]), squeeze))
    return Layout(structure, tuple(columns), _rows_of(items, columns))


def _rows_of(items: Tree, columns: list[Column]) -> int | None:
    rows = {column.shape[:1] for column in columns if not column.squeeze}
    if isinstance(items, Leaves):
        if not rows:
            raise ValueError("ragged items need a leaf in `rows`, which says how long each is.")
        return None
    leaves = jax.tree_util.tree_leaves_with_path(items)
    if len({np.shape(leaf)[:1] for _, leaf in leaves}) != 1 or len(rows) > 1 or () in rows:
        shapes = ", ".join(f"{jax.tree_util.keystr(path)} {np.shape(leaf)}" for path, leaf in leaves)
        raise ValueError(f"leaves must agree in their number of items, and those of unrolls in their rows: {shapes}.")
    return next(iter(rows))[0] if rows else 0


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


class Parts(NamedTuple):
    """The leaves of one item."""

    rows: list[np.ndarray]  # each [rows, ...]
    state: list[np.ndarray]  # each [1, ...]


def split(items: Tree, layout: Layout) -> Iterator[Parts]:
    """The parts of each of N items of a layout; views."""
    count = number_of(items)
    places: list[int | slice] = list(range(count))
    if isinstance(items, Ragged):
        stops = np.cumsum(items.lengths).tolist()
        places = [slice(start, stop) for start, stop in itertools.pairwise([0, *stops])]
        items = Leaves(items.rows, items.state)
    leaves = list(zip(map(np.asarray, jax.tree.leaves(items)), layout.columns, strict=True))
    rows = [leaf for leaf, column in leaves if not column.squeeze]
    state = [leaf for leaf, column in leaves if column.squeeze]
    for n, place in enumerate(places):
        yield Parts([leaf[place] for leaf in rows], [leaf[n : n + 1] for leaf in state])

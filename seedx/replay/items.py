"""What items are: unrolls, or others of one shape, or ragged ones; and how to count, choose and join them.

Leaves of one shape have a leading item axis N. Those of ragged items have it in `lengths` and `state`, while the rows
of all items follow each other in `rows`: there is no padding, here and in every replay.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np

from seedx.types import Tree, Unroll


class Ragged(NamedTuple):
    """N items with a number of rows each, for example the tokens of a group of completions."""

    rows: Tree  # leaves [sum(lengths), ...]; the rows of item 0, then those of item 1, ...
    lengths: np.ndarray  # int64 [N], each at least 1
    state: Tree  # leaves [N, ...], one for each item; None where there are none


def number_of(items: Tree) -> int:
    """N.

    Raises:
        ValueError: ragged items whose leaves do not agree in it or in their rows, or that have one without rows.
    """
    if not isinstance(items, Ragged):
        return len(jax.tree.leaves(items)[0])
    lengths, total = np.asarray(items.lengths), int(np.sum(items.lengths))
    if lengths.ndim != 1 or lengths.dtype.kind not in "iu" or not (lengths >= 1).all():
        raise ValueError(f"lengths must be a vector of whole numbers from 1, one for each item, not {lengths}.")
    for name, tree, wanted in (("rows", items.rows, total), ("state", items.state, len(lengths))):
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            if leaf.shape[:1] != (wanted,):
                raise ValueError(
                    f"{name}{jax.tree_util.keystr(path)} has shape {list(leaf.shape)}, but must begin with {wanted}: "
                    f"there are {len(lengths)} items with {total} rows in all."
                )
    return len(lengths)


def split(items: Tree) -> tuple[Tree, Tree]:
    """The parts of items that have a row axis, and those that do not; in the order of the leaves."""
    match items:
        case Ragged():
            return items.rows, items.state
        case Unroll():
            return items[:-1], items.state
    return None, items


def lengths_of(items: Tree) -> np.ndarray:
    """How many rows each item has, int64 `[N]`."""
    match items:
        case Ragged():
            return np.asarray(items.lengths, np.int64)
        case Unroll():
            return np.full(*items.timestep.step_type.shape[:2])
    return np.zeros(number_of(items), np.int64)


def kind_of(items: Tree) -> Tree:
    """What items have in common with others like them: none of them, leaves `[0, ...]`."""
    return jax.tree.map(lambda leaf: np.empty((0, *leaf.shape[1:]), leaf.dtype), items)


def check_kind(items: Tree, kind: Tree, count: int) -> None:
    """Raises ValueError unless these are `count` items of a kind, see `kind_of`; the lengths of ragged ones may differ.

    Leaves of ragged items must agree in their first axis; see `number_of`.
    """
    leaves, structure = jax.tree_util.tree_flatten_with_path(items)
    if structure != jax.tree.structure(kind):
        wanted = jax.tree.structure(kind)
        raise ValueError(f"items must have the structure of the first ones, {wanted}, not {structure}.")
    rows = len(jax.tree.leaves(kind.rows)) if isinstance(kind, Ragged) else 0
    firsts = [int(lengths_of(items).sum())] * rows + [count] * (len(leaves) - rows)
    for (path, leaf), like, first in zip(leaves, jax.tree.leaves(kind), firsts, strict=True):
        shape = (first, *like.shape[1:])
        if (leaf.dtype, leaf.shape) != (like.dtype, shape):
            raise ValueError(
                f"items{jax.tree_util.keystr(path)} is {leaf.dtype}{list(leaf.shape)}, but must be "
                f"{like.dtype}{list(shape)}, as the first items of this table were."
            )


def leaves_of(items: Tree) -> list[str]:
    """Path and layout of each leaf of one of the items, for example "items['x'] float32[3]"."""
    leaves = jax.tree_util.tree_leaves_with_path(items)
    return [f"items{jax.tree_util.keystr(path)} {leaf.dtype}{list(leaf.shape[1:])}" for path, leaf in leaves]


def choose(items: Tree, places: slice | np.ndarray) -> Tree:
    """Some of N items: a slice, a bool for each, or their numbers."""
    if not isinstance(items, Ragged):
        return jax.tree.map(lambda leaf: leaf[places], items)
    lengths = items.lengths[places]
    if isinstance(places, slice) and (places.step or 1) == 1:  # no copy
        ends = np.concatenate([[0], np.cumsum(items.lengths)])
        start, stop, _ = places.indices(len(items.lengths))
        rows: slice | np.ndarray = slice(int(ends[start]), int(ends[max(start, stop)]))
    else:
        rows = rows_of((np.cumsum(items.lengths) - items.lengths)[places], lengths)
    rows_chosen, state = (
        jax.tree.map(lambda leaf, where=where: leaf[where], tree)
        for tree, where in ((items.rows, rows), (items.state, places))
    )
    return Ragged(rows_chosen, lengths, state)


def rows_of(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """The numbers `start, start + 1, ...` of each item's rows, one item after the other, int64 `[sum(lengths)]`."""
    firsts = np.cumsum(lengths) - lengths  # where each item begins among them
    return np.repeat(np.asarray(starts) - firsts, lengths) + np.arange(int(np.sum(lengths)))


def join(parts: Sequence[Tree]) -> Tree:
    """All items of several parts, in their order."""
    # np.concatenate keeps the memory order of its inputs: time-major unrolls stay time-major.
    return parts[0] if len(parts) == 1 else jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts)

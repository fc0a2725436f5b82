"""The arrays that hold a table's items, one row for each slot.

Unrolls are gathered time-major in memory, as the learner wants them; other items as they are.
"""

from __future__ import annotations

import math

import jax
import numpy as np

from seedx.types import Tree, Unroll


class Storage:
    """Room for `capacity` items like `items`; the memory is claimed as the slots are first written."""

    def __init__(self, capacity: int, items: Tree) -> None:
        leaves, self._structure = jax.tree.flatten(items)
        self._arrays = [np.empty((capacity, *leaf.shape[1:]), leaf.dtype) for leaf in leaves]
        # One item as it lies in a file: a field for each leaf, in their order.
        fields = [(str(i), array.dtype, array.shape[1:]) for i, array in enumerate(self._arrays)]
        self.record = np.dtype(fields)
        # All leaves of an unroll but its state, which comes last.
        self._num_time_major = len(leaves) - len(jax.tree.leaves(items.state)) if isinstance(items, Unroll) else 0

    def check(self, items: Tree, count: int) -> None:
        """Raises ValueError unless these are `count` items like those that the storage was made for."""
        leaves, structure = jax.tree_util.tree_flatten_with_path(items)
        if structure != self._structure:
            raise ValueError(f"items must have the structure of the first ones, {self._structure}, not {structure}.")
        for (path, leaf), array in zip(leaves, self._arrays, strict=True):
            if leaf.dtype != array.dtype or leaf.shape != (count, *array.shape[1:]):
                raise ValueError(
                    f"items{jax.tree_util.keystr(path)} is {leaf.dtype}{list(leaf.shape)}, but must be "
                    f"{array.dtype}{[count, *array.shape[1:]]}, as the first items of this table were."
                )

    def write(self, slots: np.ndarray, items: Tree) -> None:
        """Copies items `[N, ...]` into slots."""
        self._write(slots, jax.tree.leaves(items))

    def write_records(self, slots: np.ndarray, records: np.ndarray) -> None:
        """Copies records `[N]` of dtype `record` into slots."""
        self._write(slots, [records[name] for name in self._names])

    def read_records(self, slots: np.ndarray, records: np.ndarray) -> None:
        """Copies the items in slots into records `[N]` of dtype `record`."""
        where = _piece(slots)
        for name, array in zip(self._names, self._arrays, strict=True):
            records[name] = array[where]

    @property
    def _names(self) -> tuple[str, ...]:
        return self.record.names or ()

    def _write(self, slots: np.ndarray, leaves: list[np.ndarray]) -> None:
        where = _piece(slots)
        for array, leaf in zip(self._arrays, leaves, strict=True):
            array[where] = leaf

    def gather(self, slots: np.ndarray) -> Tree:
        """Copies of the items in slots, `[N, ...]`."""
        turned, others = self._arrays[: self._num_time_major], self._arrays[self._num_time_major :]
        leaves = [_take_time_major(array, slots) for array in turned] + [array.take(slots, axis=0) for array in others]
        return jax.tree.unflatten(self._structure, leaves)


def bytes_per_item(items: Tree) -> int:
    """Bytes of one of the items `[N, ...]`."""
    return sum(leaf.dtype.itemsize * math.prod(leaf.shape[1:]) for leaf in jax.tree.leaves(items))


def leaves_of(items: Tree) -> list[str]:
    """Path and layout of each leaf of one of the items `[N, ...]`, for example "items['x'] float32[3]"."""
    leaves = jax.tree_util.tree_leaves_with_path(items)
    return [f"items{jax.tree_util.keystr(path)} {leaf.dtype}{list(leaf.shape[1:])}" for path, leaf in leaves]


def _piece(slots: np.ndarray) -> slice | np.ndarray:
    """The slots as an index: a slice where they follow each other, since a copy of one piece is faster."""
    if len(slots) and slots[-1] - slots[0] == len(slots) - 1 and (np.diff(slots) == 1).all():
        return slice(int(slots[0]), int(slots[-1]) + 1)
    return slots


def _take_time_major(array: np.ndarray, slots: np.ndarray) -> np.ndarray:
    """Rows `[N, T, ...]` of an array, that lie in memory as `[T, N, ...]`."""
    length = array.shape[1]
    rows = array.reshape(len(array) * length, *array.shape[2:])
    return np.moveaxis(rows.take(slots * length + np.arange(length)[:, None], axis=0), 1, 0)

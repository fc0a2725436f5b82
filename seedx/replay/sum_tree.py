"""A sum-tree over a fixed number of leaves, in NumPy: weighted draws and updates of whole batches.

Invariant: every inner node is the sum of its children as they are now, never a sum of changes, so rounding errors do
not add up and a node is 0 exactly when all leaves below it are.
"""

from __future__ import annotations

import numpy as np

# Wide nodes take fewer NumPy calls a level, narrow ones less work in each: 16 was fastest for batches of 512.
_BRANCHING = 16
_LARGEST_ROOT = 4096  # children of the root, whose running sums are all made anew with every `set`
MAX_VALUE = 1e290  # so that sums of many stay finite


class SumTree:
    """Values that can be drawn in proportion to their size.

    Args:
        capacity: Number of leaves, whose values begin at 0.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        counts = _rows_of_levels(capacity)
        # Each [nodes, _BRANCHING], leaves first; node i of a level is child i of the level above, row by row.
        self._levels = [np.zeros((count, _BRANCHING)) for count in counts]
        self._root = np.zeros(counts[-1])  # children of the root: the rows of the last level
        self._running = np.zeros(counts[-1])

    @property
    def total(self) -> float:
        """The sum of all values."""
        return float(self._running[-1])

    def get(self, indices: np.ndarray) -> np.ndarray:
        """Values of leaves, float64 `[N]`."""
        return self._levels[0].reshape(-1).take(indices)

    def set(self, indices: np.ndarray, values: np.ndarray) -> None:
        """Gives leaves new values.

        Args:
            indices: int `[N]`; of equal ones the last counts.
            values: `[N]`, 0 to `MAX_VALUE`; not checked.
        """
        nodes = indices
        for level in self._levels:
            level.reshape(-1)[nodes] = values
            nodes = nodes // _BRANCHING
            # A node with several changed children is summed several times, which is cheaper than finding out.
            values = np.einsum("ij->i", level.take(nodes, axis=0))
        self._root[nodes] = values
        np.cumsum(self._root, out=self._running)

    def find(self, draws: np.ndarray) -> np.ndarray:
        """The leaves where draws fall when the values are laid end to end, int64 `[N]`; never one whose value is 0.

        Args:
            draws: float64 `[N]` in [0, 1), fractions of the total, which must not be 0.
        """
        nodes, rest = _descend(self._running, draws * self.total)
        for level in reversed(self._levels):
            running = np.cumsum(level.take(nodes, axis=0), axis=1)
            # Rounding may leave more than the row holds: its last child that is not 0 has it then.
            rest = np.minimum(rest, np.nextafter(running[:, -1], 0.0))
            children = (running <= rest[:, None]).argmin(axis=1)
            rows = np.arange(len(nodes))
            before = running[rows, children - 1]
            rest = rest - np.where(children > 0, before, 0.0)
            nodes = nodes * _BRANCHING + children
        return nodes


def bytes_of(capacity: int) -> int:
    """Bytes of all nodes of a tree."""
    counts = _rows_of_levels(capacity)
    return 8 * (_BRANCHING * sum(counts) + 2 * counts[-1])


def _rows_of_levels(capacity: int) -> list[int]:
    """How many nodes each level's leaves or nodes are gathered in, leaves first."""
    counts = [-(-capacity // _BRANCHING)]
    while counts[-1] > _LARGEST_ROOT:
        counts.append(-(-counts[-1] // _BRANCHING))
    return counts


def _descend(running: np.ndarray, targets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The children of the root that targets fall into, and how far into them."""
    targets = np.minimum(targets, np.nextafter(running[-1], 0.0))
    children = np.searchsorted(running, targets, side="right")
    return children, targets - np.where(children > 0, running[children - 1], 0.0)

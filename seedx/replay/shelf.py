"""Arrays that hold records of several leaves, each leaf in one array with a place for each record."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


class Shelf:
    """Room for `capacity` records; the memory is claimed as the places are first written.

    Args:
        capacity: Places.
        leaves: Like those of the records, `[..., ...]`.
        axes: How many axes of the leaves come before those of a record.

    Attributes:
        record: One record as it lies in a file: a field for each leaf, in their order.
        arrays: `[capacity, ...]`, one for each leaf.
    """

    def __init__(self, capacity: int, leaves: Sequence[np.ndarray], axes: int) -> None:
        self.capacity = capacity
        self.arrays = [np.empty((capacity, *leaf.shape[axes:]), leaf.dtype) for leaf in leaves]
        self.record = np.dtype([(str(i), array.dtype, array.shape[1:]) for i, array in enumerate(self.arrays)])

    def write(self, places: np.ndarray, leaves: Sequence[np.ndarray]) -> None:
        """Copies leaves `[*places.shape, ...]` to places."""
        where = _piece(places)
        for array, leaf in zip(self.arrays, leaves, strict=True):
            array[where] = leaf

    def write_records(self, places: np.ndarray, records: np.ndarray) -> None:
        """Copies records `[N]` to places `[N]`."""
        self.write(places, [records[name] for name in self.record.names or ()])

    def read_records(self, places: np.ndarray, records: np.ndarray) -> None:
        """Copies what is at places `[N]` into records `[N]`."""
        where = _piece(places)
        for name, array in zip(self.record.names or (), self.arrays, strict=True):
            records[name] = array[where]

    def take(self, places: np.ndarray) -> list[np.ndarray]:
        """Copies of the leaves at places, `[*places.shape, ...]`."""
        return [array.take(places, axis=0) for array in self.arrays]


def _piece(places: np.ndarray) -> slice | np.ndarray:
    """The places as an index: a slice where they follow each other, since a copy of one piece is faster."""
    if places.ndim == 1 and len(places) and places[-1] - places[0] == len(places) - 1 and (np.diff(places) == 1).all():
        return slice(int(places[0]), int(places[-1]) + 1)
    return places

"""Memory of versions, used again: memory that is new to the process costs more than the copy into it."""

from __future__ import annotations

import weakref
from collections import defaultdict

import numpy as np


class Buffers:
    """Memory for the tensors of a reader's versions.

    What is taken comes back by itself once no array is left that shows it. Any thread may drop the last one.
    """

    def __init__(self) -> None:
        self._spare: defaultdict[int, list[np.ndarray]] = defaultdict(list)  # by size

    def take(self, size: int) -> np.ndarray:
        """Memory of that many bytes, uint8 `[size]`, with anything in it."""
        if not size:
            return np.empty(0, np.uint8)
        try:
            memory = self._spare[size].pop()
        except IndexError:
            memory = np.empty(size, np.uint8)
        array = np.frombuffer(memory.data, np.uint8)  # the base of all views of it, as it is none of an array itself
        weakref.finalize(array, self._spare[size].append, memory).atexit = False
        return array

    def trim(self) -> None:
        """Frees what the last version had no use for."""
        for memories in [*self._spare.values()]:
            memories.clear()

"""Places for rows: which of them are held, by how many, under which keys, and which row comes after which.

Invariants: a key is given out once; places that were freed are used again before those that never held a row, whose
memory is not claimed.
"""

from __future__ import annotations

import numpy as np

from seedx.replay.slots import slots_of

MAX_ROWS = 2**31 - 1  # places are int32
BOOKS_BYTES = 20  # of a place
_ONE = np.int32(1)  # of the counts' dtype, or counting takes forty times as long


class Pool:
    """The places 0 .. capacity-1. Not for several threads at once.

    Attributes:
        following: int32 `[capacity]`; the place of the row after each one, see `chains.Chains`.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.following = np.empty(capacity, np.int32)
        self._holders = np.empty(capacity, np.int32)  # how many hold a row; 0: its place is free
        # The key of the row at a place, or of the next one there: place + generation * capacity.
        self._keys = np.empty(capacity, np.uint64)
        self._used = 0  # places from here on never held a row
        self._freed = np.empty(capacity, np.int32)  # a stack of the free places before
        self._num_freed = 0

    @property
    def size(self) -> int:
        """Rows held."""
        return self._used - self._num_freed

    @property
    def free(self) -> int:
        """Rows for which there is room."""
        return self.capacity - self.size

    def take(self, count: int) -> np.ndarray:
        """So many free places, of which there must be enough, int64 `[count]`; to be held at once."""
        again = min(count, self._num_freed)
        self._num_freed -= again
        new = np.arange(self._used, self._used + count - again)
        self._keys[new] = new
        self._used += len(new)
        places = np.concatenate([self._freed[self._num_freed : self._num_freed + again], new])
        self._holders[places] = 0
        return places

    def hold(self, places: np.ndarray) -> None:
        """Counts one holder more for each time that a row is named."""
        np.add.at(self._holders, places, _ONE)

    def let_go(self, places: np.ndarray) -> None:
        """Counts one holder less for each time that a row is named; rows without any are gone."""
        np.subtract.at(self._holders, places, _ONE)
        free = places[self._holders[places] == 0]
        # Each once: of those that are named several times, the number of the last one is what is read back.
        numbers = np.arange(len(free))
        self._holders[free] = numbers
        free = free[self._holders[free] == numbers]
        self._holders[free] = 0
        self._keys[free] += np.uint64(self.capacity)
        self._freed[self._num_freed : self._num_freed + len(free)] = free
        self._num_freed += len(free)

    def link(self, places: np.ndarray, lengths: np.ndarray) -> None:
        """Notes that rows follow each other, those of one item after those of another, so many each."""
        ends = np.cumsum(lengths) - 1
        # That of an item's last row is any, until the next item of its source says which.
        self.following[places[ends]] = places[ends]
        inner = np.delete(np.arange(len(places)), ends)
        self.following[places[inner]] = places[inner + 1]

    def find(self, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Which keys are those of rows that are there, bool `[N]`, and the places of these, int64."""
        places = slots_of(keys, self.capacity)
        lives = self._keys[places] == keys
        return lives, places[lives]

    def keys(self, places: np.ndarray) -> np.ndarray:
        """Keys of the rows at some places, uint64 `[N]`."""
        return self._keys[places]

    def copies(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Copies of `following`, of the keys of rows, and of how many hold each, for the places ever used."""
        used = slice(self._used)
        return self.following[used].copy(), self._keys[used].copy(), self._holders[used].copy()

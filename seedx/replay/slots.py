"""Which slots of a table hold items, under which keys, and in which order the items came.

Invariants: a key is given out once, so that of an item that left is never that of the next one in its slot; every
operation costs in proportion to the items it names, not to the capacity (but for a tidying-up each `capacity` inserts).
"""

from __future__ import annotations

import numpy as np

# A key that is never given out: of items that made room for others as they came, and of what is not there.
DROPPED = np.uint64(2**64 - 1)
SLOT_BYTES = 40  # of all arrays, for a slot


class Slots:
    """The slots 0 .. capacity-1. Not for several threads at once."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.size = 0
        # A permutation of the slots, those that hold items first, and where each slot stands in it.
        self._slots = np.arange(capacity)
        self._place = np.arange(capacity)
        # The key of the item in a slot, or of the next one there: slot + generation * capacity.
        self._keys = np.arange(capacity, dtype=np.uint64)
        # Keys in the order in which they came, those of items that left among them, from `_head` to `_tail`.
        self._order = np.empty(2 * capacity, np.uint64)
        self._head = self._tail = 0

    def held(self) -> np.ndarray:
        """The slots that hold items, int64 `[size]`, in no order; a view."""
        return self._slots[: self.size]

    def keys(self, slots: np.ndarray) -> np.ndarray:
        """Keys of the items in some slots, uint64 `[N]`."""
        return self._keys[slots]

    def in_order(self) -> np.ndarray:
        """Keys of all items, oldest first, uint64 `[size]`."""
        keys = self._order[self._head : self._tail]
        return keys[self._lives(keys)]

    def copies(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Keys in the order in which they came, those of items that left among them; slots and keys for `restore`."""
        return self._order[self._head : self._tail].copy(), self._slots.copy(), self._keys.copy()

    def restore(self, order: np.ndarray, slots: np.ndarray, keys: np.ndarray) -> None:
        """Makes the slots, as many as these, what they were when `copies` gave this.

        Args:
            order: int64 `[size]`; the slots that hold items, the oldest item's first.
            slots: int64 `[capacity]`; all slots, those that hold items first.
            keys: uint64 `[capacity]`; of each slot, the key of its item or of its next one.
        """
        self._slots[:], self._keys[:], self.size = slots, keys, len(order)
        self._place[slots] = np.arange(self.capacity)
        self._order[: self.size] = keys[order]
        self._head, self._tail = 0, self.size

    def take(self, count: int) -> np.ndarray:
        """Puts so many new items into free slots, of which there must be enough; int64 `[count]`."""
        slots = self._slots[self.size : self.size + count].copy()
        self.size += count
        if self._tail + count > len(self._order):
            kept = self.in_order()
            self._head, self._tail = 0, len(kept)
            self._order[: self._tail] = kept
        self._order[self._tail : self._tail + count] = self._keys[slots]
        self._tail += count
        return slots

    def release(self, slots: np.ndarray) -> None:
        """Frees slots, which must be distinct and hold items."""
        size = self.size - len(slots)
        leaving = np.zeros(len(slots), bool)  # of the places that the free slots will take, which are of leaving items
        places = self._place[slots]
        leaving[places[places >= size] - size] = True
        staying = self._slots[size : self.size][~leaving]
        gaps = places[places < size]
        self._slots[gaps] = staying
        self._place[staying] = gaps
        self._slots[size : self.size] = slots
        self._place[slots] = np.arange(size, self.size)
        self._keys[slots] += np.uint64(self.capacity)
        self.size = size

    def find(self, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Which keys are those of items that are there, bool `[N]`, and the slots of these, int64."""
        keys = np.asarray(keys, np.uint64)
        lives = self._lives(keys)
        return lives, self._slots_of(keys[lives])

    def oldest(self, count: int) -> np.ndarray:
        """The slots of the `count` oldest items, oldest first; `count` must not exceed the size."""
        width = count
        while True:
            keys = self._order[self._head : min(self._head + width, self._tail)]
            lives = self._lives(keys)
            if np.count_nonzero(lives) >= count:
                self._head += int(lives.argmax()) if count else 0
                return self._slots_of(keys[lives][:count])
            width *= 2

    def newest(self, count: int) -> np.ndarray:
        """The slots of the `count` newest items, newest first; `count` must not exceed the size."""
        width = count
        while True:
            keys = self._order[max(self._tail - width, self._head) : self._tail][::-1]
            lives = self._lives(keys)
            if np.count_nonzero(lives) >= count:
                self._tail -= int(lives.argmax()) if count else 0
                return self._slots_of(keys[lives][:count])
            width *= 2

    def _slots_of(self, keys: np.ndarray) -> np.ndarray:
        return slots_of(keys, self.capacity)

    def _lives(self, keys: np.ndarray) -> np.ndarray:
        slots = self._slots_of(keys)
        return (self._keys[slots] == keys) & (self._place[slots] < self.size)


def slots_of(keys: np.ndarray, capacity: int) -> np.ndarray:
    """The slots of items with these keys, int64 `[N]`; a slot has one item at a time."""
    return (keys % np.uint64(capacity)).astype(np.int64)

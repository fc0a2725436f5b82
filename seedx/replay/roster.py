"""Which items a table holds: their keys, priorities and uses; draws them and chooses which make room.

Invariant: as if items were inserted and sampled one by one, each draw seeing what those before it used up.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from seedx.config import TableConfig
from seedx.replay.slots import DROPPED, SLOT_BYTES, Slots, slots_of
from seedx.replay.sum_tree import SumTree, bytes_of

_ITEM_BYTES = 12  # of priorities and uses, for an item


class Draws(NamedTuple):
    """Sampled items, `[N]` each; see `Sample`."""

    slots: np.ndarray
    keys: np.ndarray
    probabilities: np.ndarray
    times_sampled: np.ndarray
    table_size: np.ndarray


class RosterState(NamedTuple):
    """A roster at one moment."""

    order: np.ndarray  # int64 [N]; slots of the items, oldest first
    slots: np.ndarray  # int64 [max_size]; see `Slots.restore`, as for `keys`
    keys: np.ndarray  # uint64 [max_size]
    priorities: np.ndarray  # float64 [N]; in the order of the items, as `times_sampled`
    times_sampled: np.ndarray  # int32 [N]
    rng: dict[str, Any]  # state of the bit generator; JSON can hold it


class RosterBooks(NamedTuple):
    """Copies of a roster's arrays: made at once, to be looked at while it goes on."""

    came: np.ndarray  # uint64 [C]; keys in the order in which items came, those of items that left among them
    slots: np.ndarray  # int64 [max_size]
    keys: np.ndarray  # uint64 [max_size]
    priorities: np.ndarray  # float64 [max_size]; by slot, as `times_sampled`
    times_sampled: np.ndarray  # int32 [max_size]
    rng: dict[str, Any]

    def state(self) -> RosterState:
        """The roster when they were made."""
        order = slots_of(self.came, len(self.keys))
        order = order[self.keys[order] == self.came]
        return RosterState(order, self.slots, self.keys, self.priorities[order], self.times_sampled[order], self.rng)


class Roster:
    """The items of a table, but for their data. Not for several threads at once.

    Args:
        table: Says who is sampled and who makes room.
        seed: Of the random draws.
    """

    def __init__(self, table: TableConfig, seed: int) -> None:
        self._table = table
        self._rng = np.random.default_rng(seed)
        self._slots = Slots(table.max_size)
        self._priorities = np.zeros(table.max_size)  # 0 where there is no item
        self._times_sampled = np.zeros(table.max_size, np.int32)
        # Weights p^alpha, 0 where there is no item.
        self._weights = SumTree(table.max_size) if table.sampler == "prioritized" else None
        self._left: list[np.ndarray] = []

    @property
    def size(self) -> int:
        """Items held."""
        return self._slots.size

    @property
    def mean_priority(self) -> float:
        """Mean priority of the items held; 0 if there are none."""
        return float(self._priorities.sum()) / max(self.size, 1)

    def books(self) -> RosterBooks:
        """Copies of all that later draws depend on."""
        arrays = *self._slots.copies(), self._priorities.copy(), self._times_sampled.copy()
        return RosterBooks(*arrays, dict(self._rng.bit_generator.state))

    def restore(self, state: RosterState) -> np.ndarray:
        """Takes in the items of a state, if this roster is empty; with another `max_size` the newest, under new keys.

        Returns:
            Keys of these items, uint64 `[n]`: the last n of the state, in its order.
        """
        count = min(len(state.order), self._table.max_size)
        if len(state.slots) == self._table.max_size:
            self._slots.restore(state.order, state.slots, state.keys)
            slots = state.order
        else:
            slots = self._slots.take(count)
        first, limit = len(state.order) - count, self._table.max_times_sampled
        times = state.times_sampled[first:]
        # Where the limit was lowered, an item that is past it may be sampled once more.
        self._times_sampled[slots] = np.minimum(times, limit - 1) if limit else times
        self._set_priorities(slots, state.priorities[first:])
        self._rng.bit_generator.state = state.rng
        return self._slots.keys(slots)

    def find(self, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """See `Slots.find`."""
        return self._slots.find(keys)

    def add(self, priorities: np.ndarray, stays: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Adds those of N items that stay, for which there must be room; see `make_room`.

        Returns:
            The slots of these; keys of all, uint64 `[N]`.
        """
        slots = self._slots.take(int(np.count_nonzero(stays)))
        self._times_sampled[slots] = 0
        self._set_priorities(slots, priorities[stays])
        keys = np.full(len(priorities), DROPPED)
        keys[stays] = self._slots.keys(slots)
        return slots, keys

    def left(self) -> np.ndarray:
        """The slots whose items left since this was last asked, int64 `[N]`; to be asked before items are added."""
        left, self._left = self._left, []
        return np.concatenate(left) if left else np.empty(0, np.int64)

    def remove(self, keys: np.ndarray) -> None:
        """Removes the items with these keys, where there are any."""
        self._release(np.unique(self.find(keys)[1]))

    def clear(self) -> None:
        """Removes all items."""
        self._release(self._slots.held().copy())

    def update(self, keys: np.ndarray, priorities: np.ndarray) -> None:
        """Gives the items with these keys, where there are any, new priorities; of equal keys the last counts."""
        lives, slots = self.find(keys)
        self._set_priorities(slots, priorities[lives])

    def uses_left(self, enough: int) -> int:
        """How often items may still be sampled; `enough` stands for anything from there on."""
        limit = self._table.max_times_sampled
        if self.size == 0 or limit == 0 or self.size >= enough:
            return enough if self.size else 0
        return min(enough, limit * self.size - int(self._times_sampled[self._slots.held()].sum()))

    def sample(self, count: int) -> Draws:
        """Samples items with replacement, of which `uses_left` must allow so many; removes those that it uses up."""
        rounds, missing = [], count
        while missing:
            rounds.append(self._sample_some(missing))
            missing -= len(rounds[-1].slots)
        return rounds[0] if len(rounds) == 1 else Draws(*map(np.concatenate, zip(*rounds, strict=True)))

    def _sample_some(self, count: int) -> Draws:
        """Draws `count` items, and leaves out those whose items draws before them used up: the first never is."""
        limit = self._table.max_times_sampled
        slots, shares, total = self._draw(count)
        times = self._times_sampled[slots] + _occurrences(slots)
        if limit:
            kept = times <= limit
            slots, shares, times = slots[kept], shares[kept], times[kept]
        last = times == limit
        shares_gone, items_gone = (np.cumsum(part) - part for part in (shares * last, last.astype(np.int64)))
        if self._table.sampler in ("fifo", "lifo"):
            probabilities = np.ones(len(slots))
        else:
            probabilities = shares / np.maximum(total - shares_gone, shares)
        self._times_sampled[slots] = times  # of equal slots the last, which has the largest
        draws = Draws(slots, self._slots.keys(slots), probabilities, times, self.size - items_gone)
        if limit:
            self._release(slots[last])
        return draws

    def _draw(self, count: int) -> tuple[np.ndarray, np.ndarray, float]:
        """Slots drawn as the table is now, what each item's probability is in proportion to, and the sum of that."""
        match self._table.sampler:
            case "fifo":
                slots = self._in_turn(self._slots.oldest(min(count, self.size)), count)
            case "lifo":
                slots = self._in_turn(self._slots.newest(min(count, self.size)), count)
            case "prioritized" if self._weights is not None and self._weights.total > 0:
                slots = self._weights.find(self._rng.random(count))
                return slots, self._weights.get(slots), self._weights.total
            case _:  # as in Reverb also where all priorities are 0
                slots = self._slots.held()[self._rng.integers(self.size, size=count)]
        return slots, np.ones(count), float(self.size)

    def _in_turn(self, slots: np.ndarray, count: int) -> np.ndarray:
        """Each of some slots as often as its item may be sampled, `count` in all."""
        limit = self._table.max_times_sampled
        return np.repeat(slots, limit - self._times_sampled[slots] if limit else count)[:count]

    def make_room(self, count: int) -> np.ndarray:
        """Lets items go as if new ones, at most `max_size`, came one by one; which of these stay, bool `[count]`."""
        size, capacity = self.size, self._table.max_size
        stays = np.ones(count, bool)
        excess = size + count - capacity
        if excess <= 0:
            return stays
        match self._table.remover:
            case "fifo":
                self._release(self._slots.oldest(excess))
            case "lifo":  # each is the newest as it comes
                stays[count - excess :] = False
            case "uniform":
                # Each of the last `excess` makes capacity + 1 items: those held, the new ones before, and itself at
                # the end. One goes, and it takes that one's place. Here from the last new one to the first.
                victims = self._rng.integers(capacity + 1, size=excess)
                places, lasts = np.unique(victims, return_index=True)
                inside = places < capacity
                stays[count - excess :] = False
                stays[count - 1 - lasts[inside]] = True
                stays[places[inside & (places >= size)] - size] = False
                self._release(self._slots.held()[places[places < size]])
        return stays

    def make_more_room(self, stays: np.ndarray, count: int) -> None:
        """Lets up to `count` more go, of those held and the new ones that stay, before these are added.

        Args:
            stays: bool `[N]`, from `make_room`; is changed.
            count: At least 1; of as many as there are, one goes.
        """
        new = np.flatnonzero(stays)
        match self._table.remover:
            case "fifo":
                self._release(self._slots.oldest(min(count, self.size)))
            case "lifo":
                stays[new[-count:]] = False
            case "uniform":
                victims = np.unique(self._rng.integers(self.size + len(new), size=count))
                stays[new[victims[victims >= self.size] - self.size]] = False
                self._release(self._slots.held()[victims[victims < self.size]])

    def _release(self, slots: np.ndarray) -> None:
        self._left.append(slots)
        self._slots.release(slots)
        self._set_priorities(slots, np.zeros(len(slots)))

    def _set_priorities(self, slots: np.ndarray, priorities: np.ndarray) -> None:
        self._priorities[slots] = priorities
        if self._weights is not None:
            # As in Reverb, 0 stays 0 whatever the exponent is.
            self._weights.set(slots, np.where(priorities > 0, priorities**self._table.priority_exponent, 0.0))


def books_bytes(table: TableConfig) -> int:
    """Bytes of all arrays of a table's roster."""
    weights = bytes_of(table.max_size) if table.sampler == "prioritized" else 0
    return table.max_size * (SLOT_BYTES + _ITEM_BYTES) + weights


def _occurrences(slots: np.ndarray) -> np.ndarray:
    """The how-manieth of its kind each element is, from 1, int32 `[N]`."""
    order = np.argsort(slots, kind="stable")
    ordered, places = slots[order], np.arange(len(slots))
    begins = np.concatenate([[True], ordered[1:] != ordered[:-1]])
    counts = np.empty(len(slots), np.int32)
    counts[order] = places - np.maximum.accumulate(np.where(begins, places, 0)) + 1
    return counts

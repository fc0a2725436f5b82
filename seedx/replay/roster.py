"""Which items a table holds: their keys, priorities and uses; draws them and chooses which make room.

Invariant: as if items were inserted and sampled one by one, each draw seeing what those before it used up.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from seedx.config import TableConfig
from seedx.replay.slots import Slots
from seedx.replay.sum_tree import MAX_VALUE, SumTree

# The key of items that made room for others as they came. No item has it.
DROPPED = np.uint64(2**64 - 1)


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

    @property
    def size(self) -> int:
        """Items held."""
        return self._slots.size

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        weights = self._weights.nbytes if self._weights else 0
        return self._slots.nbytes + self._priorities.nbytes + self._times_sampled.nbytes + weights

    @property
    def mean_priority(self) -> float:
        """Mean priority of the items held; 0 if there are none."""
        return float(self._priorities.sum()) / max(self.size, 1)

    def state(self) -> RosterState:
        """Copies of all that later draws depend on."""
        order, slots, keys = self._slots.state()
        priorities, times_sampled = self._priorities[order], self._times_sampled[order]
        return RosterState(order, slots, keys, priorities, times_sampled, dict(self._rng.bit_generator.state))

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

    def checked(self, priorities: np.ndarray) -> np.ndarray:
        """Priorities as float64 `[N]`.

        Raises:
            ValueError: one is negative, not finite, or too large for p^alpha; or they are no vector.
        """
        largest = MAX_VALUE ** (1 / max(self._table.priority_exponent, 1.0))
        priorities = np.asarray(priorities, np.float64)
        if priorities.ndim != 1:
            raise ValueError(f"priorities {list(priorities.shape)} must be a vector, one for each item.")
        wrong = ~((priorities >= 0) & (priorities <= largest))
        if wrong.any():
            raise ValueError(
                f"priority {priorities[wrong][0]} (item {int(wrong.argmax())} of {len(priorities)}) must lie in 0 to "
                f"{largest:.3g}; see what the agent's initial_priorities or loss made it from."
            )
        return priorities

    def add(self, priorities: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Adds N items, at most `max_size`, and lets others go where there is no room.

        Returns:
            Which of the new ones stay, bool `[N]`; the slots of these; keys of all, uint64 `[N]`.
        """
        stays = self._make_room(len(priorities))
        slots = self._slots.take(int(np.count_nonzero(stays)))
        self._times_sampled[slots] = 0
        self._set_priorities(slots, priorities[stays])
        keys = np.full(len(priorities), DROPPED)
        keys[stays] = self._slots.keys(slots)
        return stays, slots, keys

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

    def _make_room(self, count: int) -> np.ndarray:
        """Lets items go as if new ones came one by one; which of the new ones stay, bool `[count]`."""
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

    def _release(self, slots: np.ndarray) -> None:
        self._slots.release(slots)
        self._set_priorities(slots, np.zeros(len(slots)))

    def _set_priorities(self, slots: np.ndarray, priorities: np.ndarray) -> None:
        self._priorities[slots] = priorities
        if self._weights is not None:
            # As in Reverb, 0 stays 0 whatever the exponent is.
            self._weights.set(slots, np.where(priorities > 0, priorities**self._table.priority_exponent, 0.0))


def _occurrences(slots: np.ndarray) -> np.ndarray:
    """The how-manieth of its kind each element is, from 1, int32 `[N]`."""
    order = np.argsort(slots, kind="stable")
    ordered, places = slots[order], np.arange(len(slots))
    begins = np.concatenate([[True], ordered[1:] != ordered[:-1]])
    counts = np.empty(len(slots), np.int32)
    counts[order] = places - np.maximum.accumulate(np.where(begins, places, 0)) + 1
    return counts

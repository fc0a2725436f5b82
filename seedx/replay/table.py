"""The embedded replay: a table in the learner's process, with the semantics of Reverb's (2102.04736). Queues: `fifo`.

Threading: any thread may call; one lock guards all, and is held while items are copied in or out. Invariant: items,
priorities and the rate limiter's counters change together or not at all.
"""

from __future__ import annotations

import logging
import threading

import numpy as np

from seedx.checks import require
from seedx.config import TableConfig
from seedx.replay.capacity import Needs, check_books, check_needs, needs_of, rows_within
from seedx.replay.items import lengths_of, number_of
from seedx.replay.priorities import checked
from seedx.replay.rate_limiter import Limits, RateLimiter
from seedx.replay.replay import Sample
from seedx.replay.roster import Roster
from seedx.replay.shelf import Shelf
from seedx.replay.storage import Storage
from seedx.replay.table_state import Keys, Kind, TableState
from seedx.replay.waiting import Waiting
from seedx.types import Tree

log = logging.getLogger(__name__)


class Table:
    """A table of at most `table.max_size` items. See `Replay`.

    Args:
        table: Its settings.
        limits: Its rate limiter's, from `limits_for`.
        seed: Of the random draws.
        overlap: Rows that an unroll has in common with the one before from its source.
        max_sources: Sources whose next unroll is stored without these; the one that was silent for longest is
            forgotten, and its next unroll is stored whole.

    Raises:
        ConfigError: the table has no size, or does not fit into memory whatever its items are.
    """

    def __init__(self, table: TableConfig, limits: Limits, seed: int, overlap: int = 0, max_sources: int = 0) -> None:
        require(table.max_size > 0, "table.max_size (0) must be positive; give --table.max-size.")
        check_books(table)
        self._config = table
        self._limiter = RateLimiter(limits)
        self._roster = Roster(table, seed)
        self._overlap = overlap
        self._max_sources = max_sources
        self._storage: Storage | None = None  # made when the first items show their shapes
        self._short_of_rows = False  # was so once
        self._changed = threading.Condition()
        self._waiting = Waiting(self._changed, self._describe)

    def insert(
        self, items: Tree, priorities: np.ndarray, timeout_s: float, sources: np.ndarray | None = None
    ) -> np.ndarray:
        """Copies N items in, but for rows that are there. They are let in whole; see `RateLimiter.may_insert`.

        Where rows would take more than the table's bytes, the remover makes room as if the table were smaller.

        Raises:
            ReplayTimeoutError: they were not let in within the timeout; nothing was added.
            ValueError: a priority is wrong, items differ from the first ones, or there are more than the table holds;
                nothing was added.
            ConfigError: the first items show that the table would not fit into memory.
        """
        count = number_of(items)
        priorities = checked(priorities, count, self._config.priority_exponent)
        with self._changed:
            self._waiting.check_open("insert", count)
            storage = self._storage_for(items)
            storage.check(items, count)
            self._waiting.until(lambda: self._limiter.may_insert(count), "insert", count, timeout_s)
            stays = self._make_room(storage, lengths_of(items), sources)
            slots, keys = self._roster.add(priorities, stays)
            storage.write(slots, items, stays, sources)
            self._limiter.inserted += count
            self._limiter.deleted += int(np.count_nonzero(~stays))
        return keys

    def sample(self, batch_size: int, timeout_s: float) -> Sample:
        """Samples items with replacement, as if one by one; waits until that is possible for all of them.

        Raises:
            ReplayTimeoutError: it was not within the timeout; nothing was sampled.
        """
        with self._changed:
            self._waiting.until(lambda: self._may_sample(batch_size), "sample", batch_size, timeout_s)
            draws = self._roster.sample(batch_size)
            assert self._storage is not None
            items = self._storage.gather(draws.slots)
            self._limiter.sampled += batch_size
            self._settle()
        return Sample(items, draws.keys, draws.probabilities, draws.times_sampled, draws.table_size)

    def update_priorities(self, keys: np.ndarray, priorities: np.ndarray) -> None:
        """See `Replay.update_priorities`."""
        priorities = checked(priorities, len(keys), self._config.priority_exponent)
        with self._changed:
            self._roster.update(keys, priorities)

    def delete(self, keys: np.ndarray) -> None:
        """See `Replay.delete`."""
        with self._changed:
            self._roster.remove(keys)
            self._settle()

    def reset(self) -> None:
        """See `Replay.reset`; sources begin anew, and the memory is kept."""
        with self._changed:
            self._roster.clear()
            self._settle()
            if self._storage is not None:
                self._storage.forget_sources()
            self._limiter = RateLimiter(self._limiter.limits)

    def info(self) -> dict[str, float]:
        """Flat metrics. Totals are since the start or the last `reset`."""
        with self._changed:
            size, inserted, sampled = self._roster.size, self._limiter.inserted, self._limiter.sampled
            nbytes = self._storage.nbytes(size) if self._storage is not None else 0
            return {
                "replay/items": size,
                "replay/bytes": nbytes,
                "replay/inserted": inserted,
                "replay/sampled": sampled,
                "replay/samples_per_insert": sampled / max(inserted, 1),
                "replay/mean_priority": self._roster.mean_priority,
            }

    def state(self) -> TableState | None:
        """All but the leaves at one moment; None if there never were any, or the table is closed.

        Others are held off only while it is copied.
        """
        with self._changed:
            if self._storage is None:
                return None
            items, rows, limiter = self._roster.books(), self._storage.books(), self._limiter
            counters = (limiter.inserted, limiter.deleted, limiter.sampled)
        roster = items.state()
        return TableState(roster, limiter.limits, *counters, *rows.state(roster.order))

    def shelves(self) -> dict[Kind, Shelf]:
        """What holds the leaves, of those kinds that have some; for their layouts. Empty where `state` is None."""
        with self._changed:
            if self._storage is None:
                return {}
            shelves: dict[Kind, Shelf] = {"rows": self._storage.rows, "items": self._storage.items}
            return {kind: shelf for kind, shelf in shelves.items() if shelf.record.itemsize}

    def read(self, kind: Kind, keys: np.ndarray, records: np.ndarray) -> np.ndarray:
        """Copies what has these keys `[N]`, as far as it is still there, into the first of so many records.

        Returns:
            Which those are, bool `[N]`.
        """
        with self._changed:
            if self._storage is None:
                return np.zeros(len(keys), bool)
            shelf, (lives, places) = self._find(self._storage, kind, keys)
            shelf.read_records(places, records[: len(places)])
        return lives

    def restore(self, state: TableState, example: Tree) -> Keys:
        """Brings an empty table to a state, before any other thread has it; the leaves are to be written by `write`.

        With the settings of then it goes on as it would have, but that sources begin anew. With another `max_size`
        (then under new keys) or fewer rows it takes the newest items; with other limits it settles its counters.

        Args:
            state: From `state`; `row_keys` are not looked at.
            example: An item like those in the table, leaves `[1, ...]`.

        Raises:
            ConfigError: the table would not fit into memory.
        """
        with self._changed:
            storage = self._storage_for(example)
            keys = self._roster.restore(state.roster)
            fitting = storage.fitting(state.chains.newest(len(keys)))
            self._roster.remove(keys[: len(keys) - fitting])
            self._roster.left()
            keys = keys[len(keys) - fitting :]
            rows = storage.restore(state.chains.newest(fitting), self._roster.find(keys)[1])
            gone = len(state.roster.order) - fitting
            self._limiter = RateLimiter(self._limiter.limits, state.inserted, state.deleted + gone, state.sampled)
            if state.limits != self._limiter.limits:
                self._limiter.settle()
        return Keys(keys, rows)

    def write(self, kind: Kind, keys: np.ndarray, records: np.ndarray) -> None:
        """Gives what was restored under these keys `[N]` the leaves that `read` once gave."""
        with self._changed:
            assert self._storage is not None
            shelf, (_, places) = self._find(self._storage, kind, keys)
            shelf.write_records(places, records)

    def close(self) -> None:
        """See `Replay.close`."""
        with self._changed:
            self._roster.clear()
            self._storage = None
            self._waiting.close()

    def needs(self, items: Tree) -> Needs:
        """What the table needs to be full of items like these."""
        return needs_of(items, self._config, self._overlap, self._max_sources)

    def _storage_for(self, items: Tree) -> Storage:
        if self._storage is None:
            needs = self.needs(items)
            check_needs(needs, self._config)
            rows = rows_within(needs, self._config)
            self._storage = Storage(items, self._config.max_size, rows, self._overlap, self._max_sources)
        return self._storage

    def _find(self, storage: Storage, kind: Kind, keys: np.ndarray) -> tuple[Shelf, tuple[np.ndarray, np.ndarray]]:
        if kind == "rows":
            return storage.rows, storage.find_rows(keys)
        return storage.items, self._roster.find(keys)

    def _make_room(self, storage: Storage, lengths: np.ndarray, sources: np.ndarray | None) -> np.ndarray:
        """Lets go what has to for new items with so many rows each; which of these stay, bool `[N]`."""
        stays = self._roster.make_room(len(lengths))
        self._settle()
        longest = max(storage.longest, int(lengths.max(initial=1)))
        while (lack := storage.lack(lengths, stays, sources)) > 0:
            if not self._short_of_rows:
                self._short_of_rows = True
                log.warning("the replay is full before table.max_size: %s. Raise --table.max-bytes.", self._describe())
            if not self._roster.size:
                storage.forget_sources()
            else:  # as many as it takes in any case, since each has at most the longest's rows
                self._roster.make_more_room(stays, -(-lack // longest))
                self._settle()
        return stays

    def _settle(self) -> None:
        """Lets go the rows of items that left, and has those look who wait."""
        left = self._roster.left()
        if len(left) and self._storage is not None:
            self._storage.release(left)
            self._limiter.deleted += len(left)
        self._changed.notify_all()

    def _may_sample(self, count: int) -> bool:
        return self._limiter.may_sample(count) and self._roster.uses_left(count) == count

    def _describe(self) -> str:
        size, limiter = self._roster.size, self._limiter
        inserts, samples = self._waiting.counts("insert"), self._waiting.counts("sample")
        sampling, why = max(samples, default=1), []
        if not limiter.may_insert(max(inserts, default=1)):
            why.append("inserts wait for samples")
        if size < limiter.limits.min_size:
            why.append(f"samples wait for inserts, until there are min_size ({limiter.limits.min_size}) items")
        elif (left := self._roster.uses_left(sampling)) < sampling:
            why.append(f"samples wait for inserts, as the items may be sampled only {left} times more")
        elif not limiter.may_sample(sampling):
            why.append("samples wait for inserts, by samples_per_insert")
        if inserts and samples and len(why) == 2:
            why.append("raise --table.max-size, --table.max-bytes or --table.error-buffer")
        held = "0 bytes" if self._storage is None else self._storage.describe(size)
        return (
            f"{size} of {self._config.max_size} items are held ({held}); "
            f"{limiter.describe()}; {self._waiting.describe()}" + "".join(f"; {reason}" for reason in why)
        )

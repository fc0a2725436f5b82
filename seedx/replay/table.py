"""The embedded replay: a table of items in the learner's process, with the semantics of Reverb's (2102.04736).

Threading: any thread may call; one lock guards all, and is held while items are copied in or out. Invariant: items,
priorities and the rate limiter's counters change together or not at all.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Literal, NamedTuple

import jax
import numpy as np

from seedx.config import TableConfig, require
from seedx.replay.rate_limiter import Limits, RateLimiter
from seedx.replay.replay import ReplayTimeoutError, Sample
from seedx.replay.roster import Roster, RosterState
from seedx.replay.storage import Storage, bytes_per_item
from seedx.types import Tree


class TableState(NamedTuple):
    """A table at one moment, but for its items' leaves."""

    roster: RosterState
    limits: Limits
    inserted: int  # the rate limiter's counters
    deleted: int
    sampled: int


class Table:
    """A table of at most `table.max_size` items. See `Replay`.

    Args:
        table: Its settings.
        limits: Its rate limiter's, from `limits_for`.
        seed: Of the random draws.

    Raises:
        ConfigError: the table has no size.
    """

    def __init__(self, table: TableConfig, limits: Limits, seed: int) -> None:
        require(table.max_size > 0, "table.max_size (0) must be positive; give --table.max-size.")
        self.capacity = table.max_size
        self._config = table
        self._limiter = RateLimiter(limits)
        self._roster = Roster(table, seed)
        self._storage: Storage | None = None  # made when the first items show their shapes
        self._item_bytes = 0
        self._closed = False
        self._waiting: dict[str, list[int]] = {"insert": [], "sample": []}  # how many items each waiting call is for
        self._changed = threading.Condition()

    def insert(
        self, items: Tree, priorities: np.ndarray, timeout_s: float, sources: np.ndarray | None = None
    ) -> np.ndarray:
        """Copies N items in, whatever their sources. They are let in whole; see `RateLimiter.may_insert`.

        Raises:
            ReplayTimeoutError: they were not let in within the timeout; nothing was added.
            ValueError: a priority is wrong, items differ from the first ones, or there are more than the table holds;
                nothing was added.
            ConfigError: the first items show that the table would not fit into memory.
        """
        del sources  # rows that items share are stored with each
        priorities = self._roster.checked(priorities)
        count = len(priorities)
        if count > self._config.max_size:
            raise ValueError(
                f"an insert of {count} items does not fit into a table of {self._config.max_size}; "
                "raise --table.max-size."
            )
        with self._changed:
            self._wait("insert", count, lambda: self._may_insert(count), timeout_s)
            storage = self._storage_for(items, count)
            size = self._roster.size
            stays, slots, keys = self._roster.add(priorities)
            storage.write(slots, items if stays.all() else jax.tree.map(lambda leaf: leaf[stays], items))
            self._limiter.inserted += count
            self._limiter.deleted += size + count - self._roster.size
            self._changed.notify_all()
        return keys

    def sample(self, batch_size: int, timeout_s: float) -> Sample:
        """Samples items with replacement, as if one by one; waits until that is possible for all of them.

        Raises:
            ReplayTimeoutError: it was not within the timeout; nothing was sampled.
        """
        with self._changed:
            self._wait("sample", batch_size, lambda: self._may_sample(batch_size), timeout_s)
            size = self._roster.size
            draws = self._roster.sample(batch_size)
            assert self._storage is not None
            items = self._storage.gather(draws.slots)
            self._limiter.sampled += batch_size
            self._limiter.deleted += size - self._roster.size
            self._changed.notify_all()
        return Sample(items, draws.keys, draws.probabilities, draws.times_sampled, draws.table_size)

    def update_priorities(self, keys: np.ndarray, priorities: np.ndarray) -> None:
        """See `Replay.update_priorities`."""
        priorities = self._roster.checked(priorities)
        with self._changed:
            self._roster.update(keys, priorities)

    def delete(self, keys: np.ndarray) -> None:
        """See `Replay.delete`."""
        with self._changed:
            size = self._roster.size
            self._roster.remove(keys)
            self._limiter.deleted += size - self._roster.size
            self._changed.notify_all()

    def reset(self) -> None:
        """See `Replay.reset`; the memory is kept."""
        with self._changed:
            self._roster.clear()
            self._limiter = RateLimiter(self._limiter.limits)
            self._changed.notify_all()

    def info(self) -> dict[str, float]:
        """Flat metrics. Totals are since the start or the last `reset`."""
        with self._changed:
            size, inserted, sampled = self._roster.size, self._limiter.inserted, self._limiter.sampled
            return {
                "replay/items": size,
                "replay/bytes": size * self._item_bytes,
                "replay/inserted": inserted,
                "replay/sampled": sampled,
                "replay/samples_per_insert": sampled / max(inserted, 1),
                "replay/mean_priority": self._roster.mean_priority,
            }

    def pause(self) -> AbstractContextManager:
        """Holds off all other threads, for what must be of one moment."""
        return self._changed

    def state(self) -> TableState | None:
        """All but the items' leaves; None if there never were any, or the table is closed."""
        with self._changed:
            limiter = self._limiter
            if self._storage is None:
                return None
            counters = (limiter.inserted, limiter.deleted, limiter.sampled)
            return TableState(self._roster.state(), limiter.limits, *counters)

    def record(self) -> np.dtype | None:
        """An item as `read` gives it, its leaves one after the other; None where `state` is."""
        with self._changed:
            return None if self._storage is None else self._storage.record

    def read(self, keys: np.ndarray, records: np.ndarray) -> np.ndarray:
        """Copies the items with these keys `[N]`, those that are still there, into the first of so many records.

        Returns:
            Which those are, bool `[N]`.
        """
        with self._changed:
            lives, slots = self._roster.find(keys)
            if self._storage is not None:
                self._storage.read_records(slots, records[: len(slots)])
            return lives

    def restore(self, state: TableState, example: Tree) -> np.ndarray:
        """Brings an empty table to a state, before any other thread has it; the leaves are to be written by `write`.

        With the settings of then it goes on as it would have. With another `max_size` it takes the newest items, under
        new keys; with other limits its counters are brought into their bounds.

        Args:
            state: From `state`.
            example: An item like those in the table, leaves `[1, ...]`.

        Returns:
            Keys of the items, uint64 `[n]`: the last n of the state, in its order.

        Raises:
            ConfigError: the table would not fit into memory.
        """
        with self._changed:
            self._storage_for(example, 1)
            keys = self._roster.restore(state.roster)
            gone = len(state.roster.order) - len(keys)
            self._limiter = RateLimiter(self._limiter.limits, state.inserted, state.deleted + gone, state.sampled)
            if state.limits != self._limiter.limits:
                self._limiter.settle()
        return keys

    def write(self, keys: np.ndarray, records: np.ndarray) -> None:
        """Gives restored items `[N]` the leaves that `read` once gave."""
        with self._changed:
            assert self._storage is not None
            self._storage.write_records(self._roster.find(keys)[1], records)

    def close(self) -> None:
        """See `Replay.close`."""
        with self._changed:
            self._roster.clear()
            self._storage = None
            self._closed = True
            self._changed.notify_all()

    def size_estimate(self, items: Tree) -> int:
        """Bytes of the table when it is full of items like these `[N, ...]`."""
        return self._config.max_size * bytes_per_item(items) + self._roster.nbytes

    def _storage_for(self, items: Tree, count: int) -> Storage:
        if self._storage is None:
            item_bytes, size = bytes_per_item(items), self.size_estimate(items)
            bounds = {"table.max_bytes": self._config.max_bytes, "half of this machine's memory": memory_bytes() // 2}
            for name, bound in bounds.items():
                require(
                    size <= bound,
                    f"a table of {self._config.max_size:,} items of {item_bytes:,} bytes takes {size:,} bytes, more "
                    f"than {name} ({bound:,}). Lower --table.max-size, or raise --table.max-bytes if it is that.",
                )
            self._storage, self._item_bytes = Storage(self._config.max_size, items), item_bytes
        self._storage.check(items, count)
        return self._storage

    def _wait(self, what: Literal["insert", "sample"], count: int, ready: Callable[[], bool], timeout_s: float) -> None:
        self._waiting[what].append(count)
        try:
            let_in = self._changed.wait_for(lambda: self._closed or ready(), timeout_s)
            if self._closed:
                raise ReplayTimeoutError(f"no {what} of {count} items: the table is closed.")
            if not let_in:
                raise ReplayTimeoutError(f"no {what} of {count} items within {timeout_s} s: {self._describe()}.")
        finally:
            self._waiting[what].remove(count)

    def _may_insert(self, count: int) -> bool:
        # Items of a queue never make room for others.
        fits = not self._config.is_queue or self._roster.size + count <= self._config.max_size
        return fits and self._limiter.may_insert(count)

    def _may_sample(self, count: int) -> bool:
        return self._limiter.may_sample(count) and self._roster.uses_left(count) == count

    def _describe(self) -> str:
        size, limiter = self._roster.size, self._limiter
        inserts, samples = self._waiting["insert"], self._waiting["sample"]
        inserting, sampling = max(inserts, default=1), max(samples, default=1)
        why = []
        if not self._may_insert(inserting):
            why.append("inserts wait for samples")
        if size < limiter.limits.min_size:
            why.append(f"samples wait for inserts, until there are min_size ({limiter.limits.min_size}) items")
        elif (left := self._roster.uses_left(sampling)) < sampling:
            why.append(f"samples wait for inserts, as the items may be sampled only {left} times more")
        elif not limiter.may_sample(sampling):
            why.append("samples wait for inserts, by samples_per_insert")
        if inserts and samples and len(why) == 2:
            why.append("raise --table.max-size or --table.error-buffer")
        return (
            f"{size} of {self._config.max_size} items are held ({size * self._item_bytes:,} bytes); "
            f"{limiter.describe()}; inserts of {inserts} and samples of {samples} items are under way"
            + "".join(f"; {reason}" for reason in why)
        )


def memory_bytes() -> int:
    """Bytes of memory that this process may take: the machine's, or its control group's if that is less."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    group = Path("/sys/fs/cgroup/memory.max")
    limit = group.read_text().strip() if group.exists() else "max"
    return machine if limit == "max" else min(machine, int(limit))

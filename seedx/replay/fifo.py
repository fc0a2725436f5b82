"""The embedded first-in first-out queue of items, bounded in items and bytes.

Threading: any thread may call. Invariant: items leave in the order in which they came, each exactly once.
"""

from __future__ import annotations

import threading
from collections import deque

import jax
import numpy as np

from seedx.replay.items import check_kind, choose, join, kind_of, number_of
from seedx.replay.priorities import checked
from seedx.replay.replay import Sample
from seedx.replay.waiting import Waiting
from seedx.types import Tree


class Fifo:
    """A queue of items; inserts of many items are kept whole and split only where a batch ends. See `Replay`.

    Args:
        max_items: An insert waits while so many items are held (one insert may overshoot it).
        max_bytes: An insert waits while so many bytes are held.
    """

    def __init__(self, max_items: int, max_bytes: int = 2**30) -> None:
        self._max_items = max_items
        self._max_bytes = max_bytes
        self._chunks: deque[tuple[np.ndarray, Tree]] = deque()  # keys and items
        self._kind: Tree = None  # of the items, once there were some
        self._items = 0
        self._bytes = 0
        self._next_key = 0
        self._inserted = 0
        self._sampled = 0
        self._changed = threading.Condition()
        self._waiting = Waiting(self._changed, self._describe)

    def insert(
        self, items: Tree, priorities: np.ndarray, timeout_s: float, sources: np.ndarray | None = None
    ) -> np.ndarray:
        """Adds N items, not copied; a queue has no use for priorities, which are only checked, and sources.

        Raises:
            ReplayTimeoutError: there was no room within the timeout; nothing was added.
            ValueError: a priority is wrong, or items differ from the first ones; nothing was added.
        """
        del sources
        count = number_of(items)
        checked(priorities, count)
        with self._changed:
            self._kind = kind_of(items) if self._kind is None else self._kind
            check_kind(items, self._kind, count)
            self._waiting.until(self._has_room, "insert", count, timeout_s)
            keys = np.arange(self._next_key, self._next_key + count, dtype=np.uint64)
            self._next_key += count
            self._chunks.append((keys, items))
            self._inserted += count
            self._measure()
        return keys

    def sample(self, batch_size: int, timeout_s: float) -> Sample:
        """Takes the `batch_size` oldest items.

        Raises:
            ReplayTimeoutError: there were not so many within the timeout; nothing was taken.
            ValueError: the queue is full with less than a batch, so that inserts and samples would wait for ever.
        """
        with self._changed:
            ready = lambda: self._items >= batch_size or not self._has_room()  # noqa: E731
            self._waiting.until(ready, "sample", batch_size, timeout_s)
            if self._items < batch_size:
                raise ValueError(
                    f"a batch of {batch_size} items does not fit into the queue: {self._describe()}. Raise "
                    "--table.max-size or --table.max-bytes, or lower --learner.batch-size or --learner.unroll-length."
                )
            size = self._items
            parts = self._take(batch_size)
            self._sampled += batch_size
            self._measure()
        keys, items = np.concatenate([keys for keys, _ in parts]), join([items for _, items in parts])
        once = np.ones(batch_size, np.int32)
        return Sample(items, keys, np.ones(batch_size), once, size - np.arange(batch_size))

    def update_priorities(self, keys: np.ndarray, priorities: np.ndarray) -> None:
        """Nothing, but that they are checked: a queue has no use for them."""
        checked(priorities, len(keys))

    def delete(self, keys: np.ndarray) -> None:
        """See `Replay.delete`."""
        with self._changed:
            kept = [(~np.isin(chunk[0], keys), chunk) for chunk in self._chunks]
            self._chunks = deque(chunk if keep.all() else _choose(chunk, keep) for keep, chunk in kept if keep.any())
            self._measure()

    def reset(self) -> None:
        """See `Replay.reset`."""
        with self._changed:
            self._chunks.clear()
            self._inserted = self._sampled = 0
            self._measure()

    def info(self) -> dict[str, float]:
        """Flat metrics. Totals are since the start or the last `reset`."""
        with self._changed:
            return {
                "replay/items": self._items,
                "replay/bytes": self._bytes,
                "replay/inserted": self._inserted,
                "replay/sampled": self._sampled,
                "replay/samples_per_insert": self._sampled / max(self._inserted, 1),
            }

    def close(self) -> None:
        """See `Replay.close`."""
        with self._changed:
            self._chunks.clear()
            self._waiting.close()
            self._measure()

    def _take(self, count: int) -> list[tuple[np.ndarray, Tree]]:
        parts = []
        while count:
            chunk = self._chunks.popleft()
            if len(chunk[0]) > count:
                self._chunks.appendleft(_choose(chunk, slice(count, None)))
                chunk = _choose(chunk, slice(count))
            parts.append(chunk)
            count -= len(chunk[0])
        return parts

    def _measure(self) -> None:
        """Counts what is held, and has those look who wait."""
        self._items = sum(len(keys) for keys, _ in self._chunks)
        self._bytes = sum(leaf.nbytes for _, items in self._chunks for leaf in jax.tree.leaves(items))
        self._changed.notify_all()

    def _has_room(self) -> bool:
        return self._items < self._max_items and self._bytes < self._max_bytes

    def _describe(self) -> str:
        reason = "samples wait for inserts" if self._has_room() else "inserts wait for samples"
        return (
            f"{self._items} of {self._max_items} items, {self._bytes:,} of {self._max_bytes:,} bytes are held; "
            f"{self._inserted} inserted, {self._sampled} sampled; {self._waiting.describe()}; {reason}"
        )


def _choose(chunk: tuple[np.ndarray, Tree], places: slice | np.ndarray) -> tuple[np.ndarray, Tree]:
    keys, items = chunk
    return keys[places], choose(items, places)

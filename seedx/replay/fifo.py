"""The embedded first-in first-out queue of items, bounded in items and bytes.

Threading: any thread may call. Invariant: items leave in the order in which they came, each exactly once.
"""

from __future__ import annotations

import threading
from collections import deque

import jax
import numpy as np

from seedx.replay.replay import ReplayTimeoutError, Sample
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
        self._items = 0
        self._bytes = 0
        self._inserted = 0
        self._closed = False
        self._changed = threading.Condition()

    def insert(
        self, items: Tree, priorities: np.ndarray, timeout_s: float, sources: np.ndarray | None = None
    ) -> np.ndarray:
        """Adds N items (leaves `[N, ...]`, not copied); a queue has no use for priorities and sources."""
        del priorities, sources
        count = _length(items)
        with self._changed:
            if not self._changed.wait_for(lambda: self._closed or self._has_room(), timeout_s) or self._closed:
                raise ReplayTimeoutError(f"no room for {count} items within {timeout_s} s: {self._describe()}.")
            keys = np.arange(self._inserted, self._inserted + count, dtype=np.uint64)
            self._chunks.append((keys, items))
            self._inserted += count
            self._measure()
            self._changed.notify_all()
        return keys

    def sample(self, batch_size: int, timeout_s: float) -> Sample:
        """Takes the `batch_size` oldest items.

        Raises:
            ValueError: the queue is full with less than a batch, so that inserts and samples would wait for ever.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._items >= batch_size or not self._has_room(), timeout_s)
            if self._items < batch_size and not self._has_room():
                raise ValueError(
                    f"a batch of {batch_size} items does not fit into the queue: {self._describe()}. Raise "
                    "--table.max-size or --table.max-bytes, or lower --learner.batch-size or --learner.unroll-length."
                )
            if self._items < batch_size:
                raise ReplayTimeoutError(f"no batch of {batch_size} items within {timeout_s} s: {self._describe()}.")
            size = self._items
            parts = self._take(batch_size)
            self._measure()
            self._changed.notify_all()
        # np.concatenate keeps the memory order of its inputs: time-major unrolls stay time-major.
        keys, items = parts[0] if len(parts) == 1 else jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts)
        once = np.ones(batch_size, np.int32)
        return Sample(items, keys, np.ones(batch_size), once, np.full(batch_size, size, np.int64))

    def update_priorities(self, keys: np.ndarray, priorities: np.ndarray) -> None:
        """Nothing: sampled items are gone."""

    def delete(self, keys: np.ndarray) -> None:
        """Removes items; keys that are not there are passed over."""
        with self._changed:
            kept = [(~np.isin(chunk[0], keys), chunk) for chunk in self._chunks]
            self._chunks = deque(
                chunk if keep.all() else jax.tree.map(lambda leaf, keep=keep: leaf[keep], chunk)
                for keep, chunk in kept
                if keep.any()
            )
            self._measure()
            self._changed.notify_all()

    def reset(self) -> None:
        """Removes every item."""
        with self._changed:
            self._chunks.clear()
            self._measure()
            self._changed.notify_all()

    def info(self) -> dict[str, float]:
        """Items and bytes held, and items inserted in all."""
        with self._changed:
            return {"queue/unrolls": self._items, "queue/bytes": self._bytes, "queue/inserted": self._inserted}

    def close(self) -> None:
        """Calls that wait end with ReplayTimeoutError."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _take(self, count: int) -> list[tuple[np.ndarray, Tree]]:
        parts = []
        while count:
            chunk = self._chunks.popleft()
            if len(chunk[0]) > count:
                self._chunks.appendleft(_slice(chunk, count, None))
                chunk = _slice(chunk, 0, count)
            parts.append(chunk)
            count -= len(chunk[0])
        return parts

    def _measure(self) -> None:
        self._items = sum(len(keys) for keys, _ in self._chunks)
        self._bytes = sum(leaf.nbytes for _, items in self._chunks for leaf in jax.tree.leaves(items))

    def _has_room(self) -> bool:
        return self._items < self._max_items and self._bytes < self._max_bytes

    def _describe(self) -> str:
        held = f"{self._items} of {self._max_items} items, {self._bytes:,} of {self._max_bytes:,} bytes are held"
        return f"the queue is closed; {held}" if self._closed else held


def _length(items: Tree) -> int:
    return jax.tree.leaves(items)[0].shape[0]


def _slice(chunk: tuple[np.ndarray, Tree], start: int, stop: int | None) -> tuple[np.ndarray, Tree]:
    return jax.tree.map(lambda leaf: leaf[start:stop], chunk)

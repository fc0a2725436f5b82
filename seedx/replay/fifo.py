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
    """A queue of items; inserts of many items are kept whole and split only where a batch ends.

    Args:
        max_items: An insert waits while so many items are held (one insert may overshoot it).
        max_bytes: An insert waits while so many bytes are held.
    """

    def __init__(self, max_items: int, max_bytes: int = 2**30) -> None:
        self._max_items = max_items
        self._max_bytes = max_bytes
        self._chunks: deque[Tree] = deque()
        self._items = 0
        self._bytes = 0
        self._inserted = 0
        self._changed = threading.Condition()

    def insert(self, items: Tree, timeout_s: float) -> None:
        """Adds N items (leaves `[N, ...]`, not copied); see `Replay.insert`."""
        with self._changed:
            if not self._changed.wait_for(self._has_room, timeout_s):
                raise ReplayTimeoutError(
                    f"no room for {_length(items)} items within {timeout_s} s: {self._describe()}."
                )
            self._chunks.append(items)
            self._items += _length(items)
            self._bytes += _num_bytes(items)
            self._inserted += _length(items)
            self._changed.notify_all()

    def sample(self, batch_size: int, timeout_s: float) -> Sample:
        """Takes the `batch_size` oldest items; see `Replay.sample`.

        Raises:
            ValueError: the queue is full with less than a batch, so that inserts and samples would wait for ever.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._items >= batch_size or not self._has_room(), timeout_s)
            if self._items < batch_size and not self._has_room():
                raise ValueError(
                    f"a batch of {batch_size} items does not fit into the queue: {self._describe()}. Raise "
                    "--learner.queue-unrolls, or lower --learner.batch-size or --learner.unroll-length."
                )
            if self._items < batch_size:
                raise ReplayTimeoutError(f"no batch of {batch_size} items within {timeout_s} s: {self._describe()}.")
            parts = self._take(batch_size)
            self._changed.notify_all()
        if len(parts) == 1:
            return Sample(parts[0])
        # np.concatenate keeps the memory order of its inputs: time-major unrolls stay time-major.
        return Sample(jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts))

    def info(self) -> dict[str, int]:
        """Items and bytes held, and items inserted in all."""
        with self._changed:
            return {"queue/unrolls": self._items, "queue/bytes": self._bytes, "queue/inserted": self._inserted}

    def _take(self, count: int) -> list[Tree]:
        parts = []
        while count:
            chunk = self._chunks.popleft()
            if _length(chunk) > count:
                self._chunks.appendleft(_slice(chunk, count, None))
                chunk = _slice(chunk, 0, count)
            parts.append(chunk)
            count -= _length(chunk)
            self._items -= _length(chunk)
            self._bytes -= _num_bytes(chunk)
        return parts

    def _has_room(self) -> bool:
        return self._items < self._max_items and self._bytes < self._max_bytes

    def _describe(self) -> str:
        return f"{self._items} of {self._max_items} items, {self._bytes:,} of {self._max_bytes:,} bytes are held"


def _length(items: Tree) -> int:
    return jax.tree.leaves(items)[0].shape[0]


def _slice(items: Tree, start: int, stop: int | None) -> Tree:
    return jax.tree.map(lambda leaf: leaf[start:stop], items)


def _num_bytes(items: Tree) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(items))

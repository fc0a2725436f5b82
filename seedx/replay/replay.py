"""What the learner and the policy server need of a replay or queue. Words and semantics are Reverb's (2102.04736)."""

from __future__ import annotations

from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np

from seedx.types import Tree


class ReplayTimeoutError(TimeoutError):
    """A deadline passed; the message says what was asked and the table's state."""


class ReplayGoneError(ReplayTimeoutError):
    """A deadline passed while what holds the table was gone; the message says since when, and how long it may be."""


class Sample(NamedTuple):
    """Items taken together."""

    items: Tree  # leaves [N, ...]; `items.Ragged` where such were inserted
    keys: np.ndarray  # uint64 [N]; an item may be there several times
    probabilities: np.ndarray  # float64 [N]; of each item when it was sampled
    times_sampled: np.ndarray  # int32 [N]; this time included
    table_size: np.ndarray  # int64 [N]; items in the table when it was sampled


@runtime_checkable
class Replay(Protocol):
    """A bounded store of items between acting and learning. A queue is one with `max_times_sampled=1`.

    Any thread may call any method.
    """

    def insert(
        self, items: Tree, priorities: np.ndarray, timeout_s: float, sources: np.ndarray | None = None
    ) -> np.ndarray:
        """Adds N items in one call and returns their keys, uint64 `[N]`; waits while the rate limiter is closed.

        Args:
            items: Leaves `[N, ...]`, or `items.Ragged`; the caller leaves them alone afterwards. All of a table are of
                one kind, but for the lengths of ragged ones.
            priorities: float `[N]`, finite and not negative.
            timeout_s: How long to wait.
            sources: int64 `[N]`; items of one source follow each other and overlap: the first rows of an item are the
                last `overlap` rows of the item before from the same source. A source is never used again after its
                sequence was broken. None: nothing is known of that.

        Raises:
            ReplayTimeoutError: they were not let in within the timeout; insert the very same arrays again to go on
                waiting. Nothing was added, but for what a Reverb server may still let in.
            ValueError: a priority is negative or not finite; nothing was added.
        """
        ...

    def sample(self, batch_size: int, timeout_s: float) -> Sample:
        """Samples `batch_size` items; waits until the rate limiter lets them out and they may be sampled so often.

        With replacement, but for a queue: one item may fill a batch.

        Raises:
            ReplayTimeoutError: that was not so within the timeout; nothing was sampled.
        """
        ...

    def update_priorities(self, keys: np.ndarray, priorities: np.ndarray) -> None:
        """Gives items new priorities; keys that are no longer there are passed over. Of equal keys the last counts.

        Raises:
            ValueError: a priority is negative or not finite; nothing was changed.
        """
        ...

    def delete(self, keys: np.ndarray) -> None:
        """Removes items; keys that are not there are passed over."""
        ...

    def reset(self) -> None:
        """Removes every item and sets the rate limiter's counters to 0."""
        ...

    def info(self) -> dict[str, float]:
        """Flat metrics: items, bytes and totals."""
        ...

    def close(self) -> None:
        """Frees what it holds; calls that wait end with ReplayTimeoutError."""
        ...

"""What the learner and the policy server need of a replay or queue."""

from __future__ import annotations

from typing import NamedTuple, Protocol, runtime_checkable

from seedx.types import Tree


class ReplayTimeoutError(TimeoutError):
    """A deadline passed; the message says what was asked and the table's state."""


class Sample(NamedTuple):
    """Items taken together; every leaf has a leading item axis N."""

    items: Tree


@runtime_checkable
class Replay(Protocol):
    """A bounded store of items between acting and learning. A queue is one with `max_times_sampled=1`."""

    def insert(self, items: Tree, timeout_s: float) -> None:
        """Adds N items in one call; waits while there is no room.

        Raises:
            ReplayTimeoutError: there was no room within the timeout; nothing was added.
        """
        ...

    def sample(self, batch_size: int, timeout_s: float) -> Sample:
        """Takes `batch_size` items; waits until there are so many.

        Raises:
            ReplayTimeoutError: there were too few within the timeout; nothing was taken.
        """
        ...

    def info(self) -> dict[str, int]:
        """Flat metrics: items, bytes and totals."""
        ...

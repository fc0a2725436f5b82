"""The calls that wait at a table: until they may go on, their deadline passes or the table is closed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Literal

from seedx.replay.replay import ReplayTimeoutError

Side = Literal["insert", "sample"]


class Waiting:
    """Calls at one table, each for a number of items. Whoever calls holds its lock.

    Args:
        changed: The table's lock; notified when something changes that calls wait for.
        describe: The table's state, for errors.
    """

    def __init__(self, changed: threading.Condition, describe: Callable[[], str]) -> None:
        self.changed = changed
        self._describe = describe
        self._closed = False
        self._counts: dict[Side, list[int]] = {"insert": [], "sample": []}

    def until(self, ready: Callable[[], bool], side: Side, count: int, timeout_s: float) -> None:
        """Waits until a call for so many items may go on.

        Raises:
            ReplayTimeoutError: it may not within the timeout, or the table is closed.
        """
        self._counts[side].append(count)
        try:
            let_in = self.changed.wait_for(lambda: self._closed or ready(), timeout_s)
            self.check_open(side, count)
            if not let_in:
                raise ReplayTimeoutError(f"no {side} of {count} items within {timeout_s} s: {self._describe()}.")
        finally:
            self._counts[side].remove(count)

    def check_open(self, side: Side, count: int) -> None:
        """Raises ReplayTimeoutError if the table is closed."""
        if self._closed:
            raise ReplayTimeoutError(f"no {side} of {count} items: the table is closed.")

    def close(self) -> None:
        """Ends all calls that wait, and those that come."""
        self._closed = True
        self.changed.notify_all()

    def counts(self, side: Side) -> list[int]:
        """Items of each call that is under way."""
        return self._counts[side]

    def describe(self) -> str:
        """Which calls are under way, for an error."""
        return f"inserts of {self._counts['insert']} and samples of {self._counts['sample']} items are under way"

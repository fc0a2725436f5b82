"""Decides which requests share a forward pass, and when it goes. Never waits on the dead.

Threading: `offer` and `set_live_rows` are called by the stream front-end (one thread), `take` by the policy server's
dispatch thread, `release` by its delivery thread. Invariant: at most `in_flight` batches are between `take` and
`release`, and a request is in at most one batch.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Generic, Protocol, TypeVar, runtime_checkable


@runtime_checkable
class Request(Protocol):
    """What the batcher needs to know of a request."""

    @property
    def rows(self) -> int:
        """Environments that it speaks for."""
        ...


R = TypeVar("R", bound=Request)


class Reason(Enum):
    """Why a batch went."""

    FULL = "full"  # no further request fits
    READY = "ready"  # requests cover the live slots' share
    TIMEOUT = "timeout"  # the oldest request waited max_wait_ms


@dataclass(frozen=True)
class Batch(Generic[R]):
    """Requests that share a forward pass."""

    requests: list[R]
    rows: int
    reason: Reason
    waited_s: float  # of the oldest request


class Batcher(Generic[R]):
    """Collects requests and hands them out as batches of whole requests, oldest first.

    Args:
        max_rows: Largest batch.
        groups: Actors alternate so many environment groups; requests of 1/groups of the live rows make a batch ready.
        max_wait_s: The longest that the oldest request waits while an in-flight place is free.
        in_flight: Batches between `take` and `release`.
        lock_step_rows: If positive, a batch goes only when it has exactly so many rows (deterministic mode).
    """

    def __init__(self, max_rows: int, groups: int, max_wait_s: float, in_flight: int, lock_step_rows: int = 0) -> None:
        self.max_rows = max_rows
        self._groups = groups
        self._max_wait_s = max_wait_s
        self._lock_step_rows = lock_step_rows
        self._pending: deque[tuple[R, float]] = deque()
        self._rows = 0
        self._live_rows = 0
        self._places = in_flight
        self._changed = threading.Condition()

    def offer(self, request: R) -> None:
        """Adds a request; a caller has at most one outstanding for each of its streams, which bounds the queue."""
        with self._changed:
            self._pending.append((request, time.monotonic()))
            self._rows += request.rows
            if len(self._pending) == 1 or self._why() is not None:
                self._changed.notify()

    def withdraw(self, unwanted: Callable[[R], bool]) -> None:
        """Removes pending requests whose stream is gone."""
        with self._changed:
            kept = [entry for entry in self._pending if not unwanted(entry[0])]
            self._pending = deque(kept)
            self._rows = sum(request.rows for request, _ in kept)

    def set_live_rows(self, rows: int) -> None:
        """Tells how many rows can be expected to ask; withheld and silent streams do not count."""
        with self._changed:
            self._live_rows = rows
            self._changed.notify()

    def release(self) -> None:
        """Frees an in-flight place."""
        with self._changed:
            self._places += 1
            self._changed.notify()

    def take(self, timeout_s: float) -> Batch[R] | None:
        """The next batch, or None if none went within the timeout."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while (reason := self._why()) is None:
                now = time.monotonic()
                if now >= deadline:
                    return None
                self._changed.wait(min(deadline, self._oldest_deadline(now)) - now)
            return self._pop(reason)

    def _why(self) -> Reason | None:
        """Why a batch may go now, or None."""
        if not self._pending or self._places == 0:
            return None
        if self._lock_step_rows:
            return Reason.FULL if self._rows >= self._lock_step_rows else None
        if self._rows >= self.max_rows:
            return Reason.FULL
        if self._rows * self._groups >= self._live_rows:
            return Reason.READY
        return Reason.TIMEOUT if time.monotonic() >= self._pending[0][1] + self._max_wait_s else None

    def _oldest_deadline(self, now: float) -> float:
        """When waiting must end for the oldest request's sake; far off where only a release can let it go."""
        if not self._pending or self._places == 0 or self._lock_step_rows:
            return now + 3600.0
        return self._pending[0][1] + self._max_wait_s

    def _pop(self, reason: Reason) -> Batch[R]:
        requests, rows, oldest = [], 0, self._pending[0][1]
        while self._pending and rows + self._pending[0][0].rows <= self.max_rows:
            request, _ = self._pending.popleft()
            requests.append(request)
            rows += request.rows
        self._rows -= rows
        self._places -= 1
        return Batch(requests, rows, reason, time.monotonic() - oldest)

"""Keeps a replay on disk while a run goes on, so that a run that was killed goes on with what it had gathered."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from seedx.metrics import Metrics
from seedx.threads import Crew


class Keeper:
    """Takes a snapshot at an interval, on a thread of its own, and a last one at the end.

    Args:
        snapshot: Takes one; called by one thread at a time.
        interval_s: Seconds from the end of one to the start of the next; 0: only the last one.
        metrics: Times them.
        crew: Runs the thread.
    """

    def __init__(self, snapshot: Callable[[], object], interval_s: float, metrics: Metrics, crew: Crew) -> None:
        self._snapshot = snapshot
        self._interval_s = interval_s
        self._metrics = metrics
        self._crew = crew
        self._finishing = threading.Event()
        self._taking = threading.Lock()

    def start(self) -> None:
        """Begins, if there is an interval."""
        if self._interval_s:
            self._crew.spawn("replay-keeper", self._loop)

    def finish(self) -> None:
        """Takes the last snapshot, after the one that may be under way."""
        self._finishing.set()
        self._take()

    def _loop(self) -> None:
        while not self._finishing.wait(self._interval_s) and not self._crew.stop.is_set():
            self._take()

    def _take(self) -> None:
        with self._taking:
            started = time.monotonic()
            self._snapshot()
            self._metrics.time("replay/snapshot", time.monotonic() - started)

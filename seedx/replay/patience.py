"""Says what a long wait for a replay is for: where both sides wait for each other, no run hangs in silence."""

from __future__ import annotations

import time

from seedx.replay.replay import ReplayTimeoutError

SAY_AFTER_S = 10.0


class Patience:
    """The waits of one thread, each of several calls that timed out. Each is said once, and again if the server goes.

    Args:
        who: What waits, for the message.
    """

    def __init__(self, who: str) -> None:
        self._who = who
        self._since: float | None = None
        self._said: set[type[ReplayTimeoutError]] = set()

    def timed_out(self, error: ReplayTimeoutError) -> None:
        """A call timed out, and will be tried again."""
        self._since = self._since or time.monotonic()
        waited_s = time.monotonic() - self._since
        if waited_s >= SAY_AFTER_S and type(error) not in self._said:
            self._said.add(type(error))
            print(f"{self._who} has waited for {waited_s:.0f} s and goes on waiting: {error}", flush=True)

    def over(self) -> None:
        """A call succeeded."""
        self._since, self._said = None, set()

"""Items that were added to a table before any of those that it held were seen, and that can be taken out again.

A table whose rate limiter is closed shows none of its items (a run that was ended leaves it so), and opens only when
items are inserted.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence

from seedx.replay.replay import ReplayTimeoutError
from seedx.replay.reverb_client import ReverbClient

_MAX_KEYS = 100_000  # by then, what the table held has been sampled or removed
_LATE_S = 0.5  # what is on its way is in the table by then


class Probation:
    """The keys of such items. Any thread may call.

    Args:
        clients: The servers.
        table: The table's name.
        is_on: Whether a table holds items of which none was seen.
    """

    def __init__(self, clients: Sequence[ReverbClient], table: str, is_on: bool) -> None:
        self._clients = clients
        self._table = table
        self._keys: set[int] | None = set() if is_on else None
        self._undone = False
        self._lock = threading.Lock()

    def inserting(self, keys: Iterable[int]) -> None:
        """Notes keys before they are sent.

        Raises:
            ReplayTimeoutError: what was inserted before is being deleted; the caller learns the rest from its samples.
        """
        with self._lock:
            if self._undone:
                raise ReplayTimeoutError("the table holds items of another kind; nothing more is inserted.")
            if self._keys is not None:
                self._keys.update(keys)
                if len(self._keys) > _MAX_KEYS:
                    self._keys = None

    def sampled(self, keys: Iterable[int]) -> None:
        """Items with these keys are as they must be; if one was there before, that is the end of it."""
        with self._lock:
            if self._keys is not None and not self._keys.issuperset(keys):
                self._keys = None

    def undo(self) -> bool:
        """Deletes what was inserted; False if that is over, and nothing was deleted.

        Raises what `ReverbClient.mutate_priorities` raises.
        """
        with self._lock:
            if self._keys is None:
                return False
            self._undone, keys = True, list(self._keys)
        for pause_s in (0.0, _LATE_S):
            time.sleep(pause_s)
            for client in self._clients:
                client.mutate_priorities(self._table, {}, keys)
        return True

"""The slots of a publisher in shared memory, as its readers find them."""

from __future__ import annotations

import contextlib
from operator import itemgetter
from pathlib import Path

from seedx.transport.errors import WeightsLostError
from seedx.transport.shm_sink import is_published, path_of, slot_paths
from seedx.transport.slot import SlotReader


class ShmFiles:
    """Slots under a name; each stays open and mapped as long as the file has its name.

    Raises:
        ConfigError: it is no name.
    """

    look_s = 0.001

    def __init__(self, name: str) -> None:
        self._path = path_of(name)
        self._open: dict[Path, SlotReader] = {}

    def slots(self) -> list[SlotReader]:
        """Those with a version, or one that is being written; newest first."""
        for path in slot_paths(self._path):
            if path in self._open and not self._open[path].is_there():
                self._open.pop(path).close()
            if path not in self._open:
                with contextlib.suppress(FileNotFoundError, WeightsLostError):  # not yet, or no more
                    self._open[path] = SlotReader(path)
        versions = [(id_.version, slot) for slot in self._open.values() if (id_ := slot.id()) is not None]
        return [slot for _, slot in sorted(versions, key=itemgetter(0), reverse=True)]

    def gone(self) -> str | None:
        """Why nobody will publish here."""
        return None if is_published(self._path) else f"nobody publishes under shm:{self._path.name}."

    def close(self) -> None:
        """Closes the slots."""
        for slot in self._open.values():
            slot.close()
        self._open = {}

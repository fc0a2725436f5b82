"""Versions of the weights, from the learner to whoever acts on them.

The learner never donates its params, so the array that an update returned *is* the published version: publishing copies
nothing, and an old version is freed when its last reader drops it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import NamedTuple

from seedx.types import Tree


class Weights(NamedTuple):
    """One version of the weights."""

    version: int
    params: Tree


class WeightStore:
    """Holds the latest version. Any thread may read; one publishes.

    Args:
        reshard: Moves published params to the layout of their readers; None where both share devices and layout.
    """

    def __init__(self, reshard: Callable[[Tree], Tree] | None = None) -> None:
        self._reshard = reshard
        self._latest: Weights | None = None
        self._published = threading.Condition()

    def publish(self, version: int, params: Tree) -> None:
        """Makes a version the latest one; the caller must never donate or change `params` afterwards.

        Raises:
            ValueError: the version is not newer than the latest.
        """
        if self._reshard is not None:
            params = self._reshard(params)
        with self._published:
            if self._latest is not None and version <= self._latest.version:
                raise ValueError(f"version ({version}) must be greater than the latest ({self._latest.version}).")
            self._latest = Weights(version, params)
            self._published.notify_all()

    def latest(self) -> Weights:
        """The latest version.

        Raises:
            LookupError: nothing was published yet.
        """
        latest = self._latest
        if latest is None:
            raise LookupError("no weights were published yet.")
        return latest

    def wait_for(self, version: int, timeout_s: float) -> Weights | None:
        """The latest weights once they are at least `version`; None if they are not within the timeout."""
        with self._published:
            ready = self._published.wait_for(
                lambda: self._latest is not None and self._latest.version >= version, timeout_s
            )
            return self._latest if ready else None

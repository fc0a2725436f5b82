"""Publishing: the learner hands over a version and goes on; a thread makes it ready and offers it to readers.

Of the versions that are handed over while the thread is busy, only the newest is kept. Nobody holds more than two
versions on this host: the newest one, and the one before while it is still being sent. As long as readers take that
one, those that come later wait as the learner's own arrays; how long a reader may take is bounded, see `Sink`.

Threading: `publish` belongs to one thread, the learner's. `_pending` and `_closing` are guarded by the condition; all
else is the publisher's thread's.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import numpy as np

from seedx.metrics import Metrics
from seedx.transport.encode import Version, encode
from seedx.transport.manifest import WRITER_BYTES, VersionId
from seedx.transport.tree import Path, flatten
from seedx.types import Tree

_CLOSE_S = 5.0
_LOOK_S = 0.2


@runtime_checkable
class Sink(Protocol):
    """Where versions go: a server, a file. For the publisher's thread alone."""

    def wait_for_room(self, timeout_s: float) -> bool:
        """Whether another version may be made; readers are waited for so long."""
        ...

    def offer(self, version: Version) -> None:
        """Makes a version the newest one."""
        ...

    def close(self) -> None:
        """Offers nothing any more."""
        ...


class Publisher:
    """Publishes the versions of one learner.

    Args:
        sink: Where they go.
        on_failure: Told of an exception on the publisher's thread, which ends with it: not of readers', the sink's own.
        delta: Whether readers that have the version before get what changed alone. Costs the thread a comparison and a
            compression of each version.
        checksums: Whether each tensor has one.
        metrics: Counts what is published.
    """

    def __init__(
        self,
        sink: Sink,
        on_failure: Callable[[BaseException], None],
        *,
        delta: bool,
        checksums: bool,
        metrics: Metrics,
    ) -> None:
        self._sink, self._on_failure = sink, on_failure
        self._delta, self._checksums, self._metrics = delta, checksums, metrics
        self._writer = secrets.token_bytes(WRITER_BYTES)
        self._changed = threading.Condition()
        self._pending: tuple[int, list[tuple[Path, Any]]] | None = None
        self._last = -1
        self._closing = False
        self._newest: Version | None = None
        self._thread = threading.Thread(target=self._run, name="publisher", daemon=True)
        self._thread.start()

    def publish(self, version: int, params: Tree) -> None:
        """Hands over a version, and returns at once; the caller must never donate or change `params` afterwards.

        Args:
            version: Greater than all before, from 0.
            params: Nested dicts of jax's or NumPy's arrays, all of them on this host.

        Raises:
            ValueError: the version is not newer, or the tree is no such thing.
        """
        if version <= self._last:
            raise ValueError(f"version ({version}) must be greater than the latest ({self._last}) and not negative.")
        leaves = flatten(params)
        self._last = version
        with self._changed:
            if self._pending is not None:
                self._metrics.count("weights/skipped")
            self._pending = version, leaves
            self._changed.notify_all()

    def close(self) -> None:
        """Offers what was handed over last, if that can be done in time, and ends what the sink began."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(_CLOSE_S)
        self._sink.close()

    # ---- the publisher's thread

    def _run(self) -> None:
        try:
            while self._wait():
                if self._sink.wait_for_room(_LOOK_S):
                    self._offer()
        except BaseException as error:
            self._on_failure(error)

    def _wait(self) -> bool:
        """Waits for a version; False if there comes none any more."""
        with self._changed:
            while self._pending is None and not self._closing:
                self._changed.wait(_LOOK_S)
            return self._pending is not None

    def _offer(self) -> None:
        with self._changed:
            assert self._pending is not None
            (number, leaves), self._pending = self._pending, None
        with self._metrics.timer("weights/encode"):
            arrays = _on_host(leaves)
            del leaves
            base = self._newest if self._delta else None
            version = encode(VersionId(self._writer, number), arrays, base, self._checksums)
        self._newest = version if self._delta else None
        self._metrics.count("weights/published")
        if base is not None:
            full = version.full.manifest.payload_bytes
            self._metrics.count("weights/full_bytes", full)
            self._metrics.count("weights/delta_bytes", version.delta.manifest.payload_bytes if version.delta else full)
        del base
        self._sink.offer(version)


def _on_host(leaves: list[tuple[Path, Any]]) -> list[tuple[Path, np.ndarray]]:
    """NumPy arrays in C order: views where that can be done, and copies from accelerators, all at once."""
    for _, leaf in leaves:
        if hasattr(leaf, "copy_to_host_async"):
            leaf.copy_to_host_async()
    return [(path, np.asarray(leaf, order="C")) for path, leaf in leaves]

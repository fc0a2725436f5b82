"""A reader of versions in shared memory. No jax."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

from seedx.metrics import Metrics
from seedx.transport.assembly import Held
from seedx.transport.buffers import Buffers
from seedx.transport.errors import CorruptedError, WeightsLostError
from seedx.transport.manifest import Manifest, check_tensors
from seedx.transport.shm_sink import is_published, path_of, slot_paths
from seedx.transport.slot import SlotReader, TornError
from seedx.types import Tree
from seedx.weights import Weights

_LOOK_S = 0.001


class ShmReader:
    """Receives versions; for one thread.

    Args:
        name: Of the memory, after "shm:".
        expected: Tree of arrays, or of what else has shape and dtype: others are refused; None: any are taken.
        metrics: Counts what is received.

    Raises:
        ConfigError: it is no name.
    """

    def __init__(self, name: str, expected: Tree | None, metrics: Metrics) -> None:
        self._path, self._expected, self._metrics = path_of(name), expected, metrics
        self._slots: dict[Path, SlotReader] = {}
        self._buffers = Buffers()

    def receive(self, newer_than: int, timeout_s: float) -> Weights | None:
        """The newest version; None if there is none above `newer_than` in time.

        A version that is being written is taken to its end. The arrays cannot be written to.

        Raises:
            WeightsLostError: nobody publishes at the end of the time, or they stopped in the middle of a version; call
                again.
            CorruptedError: what came last is not what was published; call again.
            TreeMismatchError: the publisher has other tensors than expected.
        """
        deadline, fault = time.monotonic() + timeout_s, None
        while True:
            try:
                found = self._newest(newer_than)
            except CorruptedError as error:
                self._metrics.count("weights/corrupted")
                found, fault = None, error
            if found is not None:
                return found.weights()
            if time.monotonic() >= deadline:
                if fault is not None:
                    raise fault
                if not is_published(self._path):
                    self._metrics.count("weights/lost")
                    raise WeightsLostError(f"nobody publishes under shm:{self._path.name}.")
                return None
            time.sleep(_LOOK_S)

    def close(self) -> None:
        """Closes the memory."""
        for slot in self._slots.values():
            slot.close()
        self._slots = {}

    def _newest(self, newer_than: int) -> Held | None:
        slots = sorted(self._open(), key=SlotReader.version, reverse=True)
        for slot in slots:
            if slot.version() > newer_than:
                try:
                    manifest, held = slot.read(None, self._buffers, self._check, lambda: is_published(self._path))
                except TornError:
                    self._metrics.count("weights/torn")
                    continue
                if held.id.version > newer_than:
                    self._buffers.trim()
                    self._metrics.count("weights/received")
                    self._metrics.count("weights/received_bytes", manifest.payload_bytes)
                    return held
        return None

    def _check(self, manifest: Manifest) -> None:
        if self._expected is not None:
            check_tensors(self._expected, manifest)

    def _open(self) -> list[SlotReader]:
        """The slots that are there."""
        for path in slot_paths(self._path):
            if path in self._slots and not self._slots[path].is_there():
                self._slots.pop(path).close()
            if path not in self._slots:
                with contextlib.suppress(FileNotFoundError, WeightsLostError):  # not yet, or no more
                    self._slots[path] = SlotReader(path)
        return list(self._slots.values())

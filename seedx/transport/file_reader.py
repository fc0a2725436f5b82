"""A reader of versions in files: in shared memory, or in a directory. No jax."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Protocol, runtime_checkable

from seedx.metrics import Metrics
from seedx.transport.buffers import Buffers
from seedx.transport.errors import CorruptedError, WeightsLostError
from seedx.transport.manifest import Manifest, VersionId, check_tensors
from seedx.transport.slot import SlotReader, TornError
from seedx.types import Tree
from seedx.weights import Weights


@runtime_checkable
class Files(Protocol):
    """Where the slots are. `look_s` is how often that is looked at."""

    look_s: float

    def slots(self) -> Iterable[SlotReader]:
        """Those with a version, or one that is being written; newest first."""
        ...

    def gone(self) -> str | None:
        """Why nobody will publish here; None: somebody may."""
        ...

    def close(self) -> None:
        """Closes the slots."""
        ...


class FileReader:
    """Receives versions; for one thread.

    Args:
        files: Where they are.
        expected: Tree of arrays, or of what else has shape and dtype: others are refused; None: any are taken.
        metrics: Counts what is received.
    """

    def __init__(self, files: Files, expected: Tree | None, metrics: Metrics) -> None:
        self._files, self._expected, self._metrics = files, expected, metrics
        self._buffers = Buffers()
        self._writer: bytes | None = None  # of what was received last

    def receive(self, newer_than: int, timeout_s: float) -> Weights | None:
        """The newest version; None if there is none above `newer_than`, or of another publisher than before, in time.

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
                return found
            if time.monotonic() >= deadline:
                if fault is not None:
                    raise fault
                if (why := self._files.gone()) is not None:
                    self._metrics.count("weights/lost")
                    raise WeightsLostError(why)
                return None
            time.sleep(self._files.look_s)

    def close(self) -> None:
        """Closes the files."""
        self._files.close()

    def _newest(self, newer_than: int) -> Weights | None:
        for slot in self._files.slots():
            if not self._is_newer(slot.id(), newer_than):
                continue
            try:
                manifest, held = slot.read(self._buffers, self._check, lambda: self._files.gone() is None)
            except TornError:
                self._metrics.count("weights/torn")
                continue
            if self._is_newer(held.id, newer_than):
                self._writer = held.id.writer
                self._buffers.trim()
                self._metrics.count("weights/received")
                self._metrics.count("weights/received_bytes", manifest.payload_bytes)
                return held.weights()
        return None

    def _is_newer(self, id_: VersionId | None, than: int) -> bool:
        return id_ is not None and (id_.version > than or self._writer not in (None, id_.writer))

    def _check(self, manifest: Manifest) -> None:
        if self._expected is not None:
            check_tensors(self._expected, manifest)

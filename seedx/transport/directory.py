"""Versions as files of a directory, which may lie on storage that hosts share: each takes its name once it is whole."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from seedx.checks import ConfigError
from seedx.metrics import Metrics
from seedx.transport.encode import Version
from seedx.transport.slot import SlotReader, SlotWriter

_SUFFIX = ".weights"
_KEPT = 2  # whoever reads one that goes reads it to its end


class DirectorySink:
    """Writes each version to a file VERSION.weights, and keeps the last two.

    Those that another publisher has left go with the first version.

    Args:
        directory: Made if it is not there.
        metrics: Counts what is written.

    Raises:
        ConfigError: the directory cannot be made.
    """

    def __init__(self, directory: Path, metrics: Metrics) -> None:
        self._directory, self._metrics = directory, metrics
        self._kept: list[Path] = []
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"dir:{directory} cannot be made ({error.strerror}); choose another.") from None

    def wait_for_room(self, timeout_s: float) -> bool:  # noqa: ARG002
        """There always is: readers take their time with files of their own."""
        return True

    def offer(self, version: Version) -> None:
        """Writes it."""
        path = self._directory / f"{version.id.version}{_SUFFIX}"
        unfinished = path.with_suffix(".part")
        unfinished.unlink(missing_ok=True)
        writer = SlotWriter(unfinished)
        writer.write(version.full)
        writer.close()
        os.replace(unfinished, path)
        self._kept = [*self._kept, path][-_KEPT:]
        for other in self._directory.glob(f"*{_SUFFIX}"):
            if other not in self._kept:
                other.unlink(missing_ok=True)
        self._metrics.count("weights/sent")
        self._metrics.count("weights/sent_bytes", version.full.manifest.payload_bytes)

    def close(self) -> None:
        """The files stay."""


class DirectoryFiles:
    """The same files, as readers find them."""

    look_s = 0.05

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def slots(self, newer_than: int) -> Iterator[SlotReader]:
        """Those with a newer version, newest first."""
        names = [path.stem for path in self._directory.glob(f"*{_SUFFIX}") if path.stem.isdecimal()]
        for version in sorted(map(int, names), reverse=True):
            if version > newer_than:
                with contextlib.suppress(FileNotFoundError):  # there is a newer one
                    slot = SlotReader(self._directory / f"{version}{_SUFFIX}")
                    try:
                        yield slot
                    finally:
                        slot.close()

    def gone(self) -> str | None:
        """Why nobody will publish here; a directory does not tell who is alive."""
        return None if self._directory.is_dir() else f"there is no directory {self._directory}."

    def close(self) -> None:
        """Nothing is open."""

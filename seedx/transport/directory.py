"""Versions as files of a directory, which may lie on storage that hosts share: each takes its name once it is whole."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from seedx.checks import ConfigError
from seedx.metrics import Metrics
from seedx.transport.encode import Version
from seedx.transport.slot import SlotReader, SlotWriter

_SUFFIX = ".weights"


class DirectorySink:
    """Writes each version to a file VERSION.weights, and keeps the last two.

    Those that another publisher has left go before the first version comes, whose number may be lower.

    Args:
        directory: Made if it is not there.
        metrics: Counts what is written.

    Raises:
        ConfigError: the directory cannot be made, or somebody else publishes there.
    """

    def __init__(self, directory: Path, metrics: Metrics) -> None:
        self._directory, self._metrics = directory, metrics
        self._last: Path | None = None
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise ConfigError(f"dir:{directory} cannot be made ({error.strerror}); choose another.") from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._lock)
            why = "somebody publishes there already" if isinstance(error, BlockingIOError) else error.strerror
            raise ConfigError(f"dir:{directory} cannot be locked ({why}); choose another.") from None

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
        os.fsync(writer.fd)  # so that a machine that dies leaves no file that has its name and not its bytes
        writer.close()
        for other in self._directory.glob(f"*{_SUFFIX}"):
            if other != self._last:
                other.unlink(missing_ok=True)  # whoever reads it reads it to its end
        os.replace(unfinished, path)
        self._last = path
        self._metrics.count("weights/sent")
        self._metrics.count("weights/sent_bytes", version.full.manifest.payload_bytes)

    def close(self) -> None:
        """The files stay."""
        os.close(self._lock)


class DirectoryFiles:
    """The same files, as readers find them."""

    look_s = 0.05

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def slots(self) -> Iterator[SlotReader]:
        """Those that are there, newest first."""
        names = [path.stem for path in self._directory.glob(f"*{_SUFFIX}") if path.stem.isdecimal()]
        for version in sorted(map(int, names), reverse=True):
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

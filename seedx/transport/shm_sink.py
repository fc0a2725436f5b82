"""Versions in shared memory, for readers on the same host.

Two slots take turns, so that the newest whole version is there while the next one is written, and whoever copies it has
until the one after that. A publisher also waits for readers that copy what it would write over, though not for long.

Who publishes holds a lock on the file NAME. The system takes it away from the dead: so readers see that a publisher is
gone, and another one may take over.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import time
from pathlib import Path

from seedx.checks import ConfigError, require
from seedx.metrics import Metrics
from seedx.transport import slot
from seedx.transport.encode import Version
from seedx.transport.slot import SlotWriter

DIRECTORY = Path("/dev/shm")
_LOOK_S = 0.002
_TAKE_OVER_S = 2.0  # a reader that looks whether somebody publishes holds the lock for a moment


def path_of(name: str) -> Path:
    """The file of a name, beside which the slots lie.

    Raises:
        ConfigError: it is no name, or the system has no shared memory.
    """
    require(
        re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", name) is not None,
        f"shm:{name} must be shm: and a name of letters, digits, dots, dashes and underscores.",
    )
    require(DIRECTORY.is_dir(), f"shm:{name} needs {DIRECTORY}, which is not there; use unix:/path.")
    return DIRECTORY / name


def slot_paths(path: Path) -> list[Path]:
    """Where the versions are."""
    return [path.with_name(f"{path.name}.{i}") for i in range(2)]


class ShmSink:
    """Writes versions to shared memory.

    Args:
        name: Of the memory, after "shm:".
        metrics: Counts what is written.

    Raises:
        ConfigError: somebody else publishes under the name, or it is none.
    """

    def __init__(self, name: str, metrics: Metrics) -> None:
        self._path, self._metrics = path_of(name), metrics
        self._lock = _lock(self._path)
        self._slots = []
        for path in slot_paths(self._path):
            path.unlink(missing_ok=True)  # of one that was killed; who still reads it goes on
            self._slots.append(SlotWriter(path))
        self._waiting_since: float | None = None

    def wait_for_room(self, timeout_s: float) -> bool:
        """Whether nobody copies what is written over, or has for long."""
        began = time.monotonic()
        since = self._waiting_since = self._waiting_since or began
        while self._slots[0].is_read():
            now = time.monotonic()
            if now - since > slot.STALL_S:
                self._metrics.count("weights/dropped_readers")
                break
            if now - began > timeout_s:
                return False
            time.sleep(_LOOK_S)
        self._waiting_since = None
        return True

    def offer(self, version: Version) -> None:
        """Writes it over the older one."""
        try:
            self._slots[0].write(version.full)
        except OSError as error:
            size = version.full.manifest.stream_bytes
            raise OSError(
                error.errno, f"{error.strerror}: shared memory needs room for twice {size} bytes", str(self._path)
            ) from None
        self._slots.reverse()
        self._metrics.count("weights/sent")
        self._metrics.count("weights/sent_bytes", version.full.manifest.payload_bytes)

    def close(self) -> None:
        """Removes the memory; who copies it can do so to the end."""
        for writer, path in zip(self._slots, slot_paths(self._path), strict=True):
            writer.close()
            path.unlink(missing_ok=True)
        self._path.unlink(missing_ok=True)
        os.close(self._lock)


def is_published(path: Path) -> bool:
    """Whether somebody publishes under a name."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def _lock(path: Path) -> int:
    """The file, locked, once it is the one that has the name: whoever had the lock before removes theirs."""
    deadline = time.monotonic() + _TAKE_OVER_S
    while True:
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(f"shm:{path.name} cannot be made ({error.strerror}); choose another name.") from None
        with contextlib.suppress(BlockingIOError, FileNotFoundError):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(fd), os.stat(path, follow_symlinks=False)):
                return fd
        os.close(fd)
        if time.monotonic() > deadline:
            raise ConfigError(f"somebody publishes under shm:{path.name} already; stop them or choose another name.")
        time.sleep(_LOOK_S)

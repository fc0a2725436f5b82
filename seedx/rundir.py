"""A run directory, as launchers and the learner share it: lock, config.json, checkpoints and their progress. No jax."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from pathlib import Path

from seedx.config import ConfigError


def claim(run_dir: str | Path) -> int:
    """Keeps other learners out of the run directory until the returned descriptor is closed or the process ends.

    Raises:
        ConfigError: another learner is at work there.
    """
    descriptor = os.open(run_dir, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise ConfigError(f"another learner is at work in {run_dir}; stop it, or name another --run-dir.") from error
    except OSError:  # Some network file systems have no locks.
        pass
    return descriptor


def write_config(run_dir: str | Path, text: str) -> None:
    """Replaces config.json as a whole: whoever reads it meanwhile gets the old one or the new one."""
    path = Path(run_dir) / "config.json"
    new = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    new.write_text(text)
    new.replace(path)


def finished_checkpoints(directory: Path) -> list[Path]:
    """Finished ones in RUN_DIR/checkpoints, oldest first. Orbax writes under another name and renames at the end."""
    paths = [path for path in directory.iterdir() if path.name.isdigit()] if directory.is_dir() else []
    return sorted(paths, key=lambda path: int(path.name))


def newest_update(run_dir: str | Path) -> int:
    """Updates of the newest finished checkpoint, good or not; 0 if there is none."""
    return max((int(path.name) for path in finished_checkpoints(Path(run_dir) / "checkpoints")), default=0)


def last_write(run_dir: str | Path) -> int:
    """When anything under RUN_DIR/checkpoints changed last, in its file system's nanoseconds; 0 if there is nothing."""
    newest = 0
    for directory, _, files in os.walk(Path(run_dir) / "checkpoints"):
        for name in ("", *files):
            with contextlib.suppress(OSError):  # Renamed or dropped meanwhile.
                newest = max(newest, os.stat(os.path.join(directory, name)).st_mtime_ns)
    return newest


class Patience:
    """Is over when `seconds` have passed since it began and since the last write of a checkpoint.

    However long a large checkpoint takes on a slow disk, it is waited for; who hangs is not.
    """

    def __init__(self, run_dir: str | Path, seconds: float) -> None:
        self._run_dir = run_dir
        self._seconds = seconds
        self._seen = last_write(run_dir)
        self._since = time.monotonic()

    def over(self) -> bool:
        """Whether it is; to be asked a few times a second."""
        if (seen := last_write(self._run_dir)) != self._seen:  # Compared with itself alone: clocks may differ.
            self._seen, self._since = seen, time.monotonic()
        return time.monotonic() - self._since > self._seconds

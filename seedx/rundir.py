"""A run directory, as launchers and the learner share it: lock, config.json, checkpoints and their progress. No jax."""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path

from seedx.checks import ConfigError


class BusyError(ConfigError):
    """A learner is at work in a run directory."""


def claim(run_dir: str | Path) -> int:
    """Keeps other learners out of the run directory until the returned descriptor is closed or the process ends.

    Raises:
        BusyError: another learner is at work there.
    """
    descriptor = os.open(run_dir, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise BusyError(f"another learner is at work in {run_dir}; stop it, or name another --run-dir.") from error
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


def show_progress(run_dir: str | Path) -> None:
    """Says that a checkpoint is being written, to whoever waits for this learner's end."""
    with contextlib.suppress(OSError):
        os.utime(Path(run_dir) / "checkpoints")


def progress(run_dir: str | Path) -> int:
    """A number that changes with every `show_progress`, and with every checkpoint that is begun or finished."""
    try:
        return (Path(run_dir) / "checkpoints").stat().st_mtime_ns
    except OSError:
        return 0

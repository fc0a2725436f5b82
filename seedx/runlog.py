"""Where a run's numbers land: metrics.jsonl, TensorBoard events, summary.json, and a history of bounded size."""

from __future__ import annotations

import json
import math
import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Generic, TypeVar

from seedx.rundir import newest_update

SUMMARY_KEYS = (
    *("agent", "env", "seed", "env_steps", "frames", "updates", "seconds", "env_steps_per_s"),
    *("return_mean", "return_episodes", "lag_updates_mean", "exit"),
)
_MAX_ITEMS = 2000  # even: full histories are halved

T = TypeVar("T")


class RunLog:
    """Writes rows to RUN_DIR/metrics.jsonl and, if wanted, to TensorBoard. Thread-safe."""

    def __init__(self, run_dir: str | Path, *, tensorboard: bool = True) -> None:
        """Opens the files; a resumed run appends, behind the last whole line."""
        self._run_dir = Path(run_dir)
        self._run_dir.mkdir(parents=True, exist_ok=True)
        self._lock = threading.Lock()
        self._file = (self._run_dir / "metrics.jsonl").open("ab+")
        self._drop_torn_line()
        self._tensorboard = tensorboard
        self._events: Any = None  # tensorboardX's EventsWriter

    def write(self, row: Mapping[str, Any]) -> None:
        """Appends one row. NaN and infinity become null: JSON has neither."""
        line = json.dumps({name: _plain(value) for name, value in row.items()}, allow_nan=False) + "\n"
        with self._lock:
            self._file.write(line.encode())
            self._file.flush()
            if self._tensorboard:
                self._write_events(row)

    def close(self) -> None:
        """Flushes and closes the files."""
        with self._lock:
            self._file.close()
            if self._events is not None:
                self._events.close()

    def _write_events(self, row: Mapping[str, Any]) -> None:
        # A quarter of a second: not before the first row. And not SummaryWriter: its thread dies of a full disk, and
        # its queue then blocks for ever.
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event  # type: ignore[missing-module-attribute]
        from tensorboardX.proto.summary_pb2 import Summary  # type: ignore[missing-module-attribute]

        if self._events is None:
            directory = self._run_dir / "tensorboard"
            directory.mkdir(exist_ok=True)
            self._events = EventsWriter(str(directory / "events"))
        plain = {name: _plain(value) for name, value in row.items()}
        values = [Summary.Value(tag=n, simple_value=v) for n, v in plain.items() if isinstance(v, int | float)]
        step = int(row.get("env_steps", 0))
        self._events.write_event(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))

    def _drop_torn_line(self) -> None:
        self._file.seek(0)
        whole = self._file.read().rfind(b"\n") + 1
        self._file.truncate(whole)


class History(Generic[T]):
    """At most 2,000 items, evenly spread over all that were added, the newest among them.

    Each item stands for a group of equal size, of which it is the last. When there are too many, pairs become one.

    Attributes:
        items: The oldest first.
    """

    def __init__(self) -> None:
        """Empty."""
        self.items: list[T] = []
        self._group_size = self._in_last_group = 1

    def add(self, item: T) -> None:
        """Adds the newest item."""
        if self._in_last_group < self._group_size:
            self._in_last_group += 1
            self.items[-1] = item
            return
        if len(self.items) == _MAX_ITEMS:
            self.items = self.items[1::2]
            self._group_size *= 2
        self.items.append(item)
        self._in_last_group = 1


def read_rows(path: str | Path) -> list[dict[str, Any]]:
    """The rows of a metrics.jsonl that may still be written to: a torn last line is left out, no file has no rows.

    Raises:
        ValueError: another line is not JSON.
    """
    path = Path(path)
    if not path.exists():
        return []
    rows = []
    *lines, _ = path.read_bytes().split(b"\n")  # What follows the last newline is torn, or nothing.
    for number, line in enumerate(lines, 1):
        try:
            rows.append(json.loads(line))
        except ValueError as error:
            raise ValueError(f"{path}:{number} is not JSON ({error}); remove that line.") from error
    return rows


def session_number(run_dir: str | Path) -> int:
    """Tells the next session of a run from those before: updates of its newest checkpoint, else of its last figures.

    Without a checkpoint it begins anew, or is part of a run whose checkpoints are another host's.
    """
    if newest := newest_update(run_dir):
        return newest
    rows = read_rows(Path(run_dir) / "metrics.jsonl")
    return int(rows[-1].get("updates", 0)) if rows else 0


def write_summary(run_dir: str | Path, summary: Mapping[str, Any]) -> Path:
    """Writes RUN_DIR/summary.json, whole or not at all, and returns its path.

    Raises:
        ValueError: one of `SUMMARY_KEYS` is missing.
    """
    missing = [key for key in SUMMARY_KEYS if key not in summary]
    if missing:
        raise ValueError(f"summary lacks {missing}; scripts rely on {SUMMARY_KEYS}.")
    path = Path(run_dir) / "summary.json"
    temporary = path.with_suffix(".tmp")
    values = {name: _plain(value) for name, value in summary.items()}
    temporary.write_text(json.dumps(values, indent=2, allow_nan=False) + "\n")
    os.replace(temporary, path)
    return path


def _plain(value: Any) -> Any:
    """The value as JSON knows it: NumPy and JAX scalars as Python ones, null for what is not finite."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value

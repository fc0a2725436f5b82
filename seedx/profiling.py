"""A jax.profiler trace of one window of a run, for xprof or TensorBoard."""

from __future__ import annotations

import time
from pathlib import Path

import jax

from seedx.config import MetricsConfig


class ProfileWindow:
    """Traces from `profile_start_s` after the first tick for `profile_seconds`; does nothing without a start."""

    def __init__(self, config: MetricsConfig, run_dir: Path) -> None:
        self._start_s = config.profile_start_s
        self._seconds = config.profile_seconds
        self._directory = run_dir / "profile"
        self._first: float | None = None
        self._tracing = False

    def tick(self) -> None:
        """Called after every update; starts and ends the trace when it is time."""
        if self._start_s is None:
            return
        now = time.monotonic()
        self._first = self._first or now
        if not self._tracing and now - self._first >= self._start_s:
            jax.profiler.start_trace(str(self._directory))
            self._tracing = True
        elif self._tracing and now - self._first >= self._start_s + self._seconds:
            self.close()

    def close(self) -> None:
        """Ends a trace that is still running, and says where it is."""
        if self._tracing:
            jax.profiler.stop_trace()
            self._tracing, self._start_s = False, None
            print(f"profile of {self._seconds:g} s: {self._directory}", flush=True)

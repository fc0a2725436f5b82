"""What a run measures: counters, timers, distributions, and the returns of episodes. NumPy only.

Names are `role/thing_unit`, for example `learner/update_ms`. A snapshot is a flat dict of one interval.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Generator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from seedx.types import StepType

Number = float | np.number


class _Distribution:
    """Exact mean and maximum, and the last 1000 values for percentiles."""

    def __init__(self) -> None:
        self.count, self.total, self.maximum = 0, 0.0, -np.inf
        self.recent: deque[float] = deque(maxlen=1000)

    def add(self, values: list) -> None:
        self.count += len(values)
        self.total += sum(values)
        self.maximum = max(self.maximum, *values)
        self.recent.extend(values)


class Metrics:
    """Counters, gauges, timers and distributions. Thread-safe; one call costs about a microsecond."""

    def __init__(
        self,
        *,
        rates: Collection[str] = (),
        totals: Mapping[str, Number] | None = None,
        clock: Callable[[], Number] = time.monotonic,
    ) -> None:
        """Starts the first interval.

        Args:
            rates: Counters that are also reported as `<name>_per_s` of the interval.
            totals: Where counters start, for a resumed run.
            clock: Seconds.
        """
        self._clock = clock
        self._rates = frozenset(rates)
        self._lock = threading.Lock()
        self._totals: dict[str, Number] = dict(totals or {})
        self._gauges: dict[str, Number] = {}
        self._averages: dict[str, list[float]] = defaultdict(lambda: [0.0, 0])
        self._times: dict[str, list[float]] = defaultdict(lambda: [0.0, 0])
        self._values: dict[str, _Distribution] = defaultdict(_Distribution)
        self._start = clock()
        self._before = dict(self._totals)

    def count(self, name: str, amount: Number = 1) -> None:
        """Adds to a counter; reported as its total `<name>`."""
        with self._lock:
            self._totals[name] = self._totals.get(name, 0) + amount

    def gauge(self, name: str, value: Number) -> None:
        """Sets a value; reported as `<name>` until it is set again."""
        with self._lock:
            self._gauges[name] = value

    def average(self, name: str, value: Number) -> None:
        """Adds a value; reported as `<name>`, the interval's mean."""
        with self._lock:
            entry = self._averages[name]
            entry[0] += value
            entry[1] += 1

    def time(self, name: str, seconds: Number, times: int = 1) -> None:
        """Adds a duration; reported as `<name>_ms`, the interval's mean, and `<name>_share` of its wall time."""
        with self._lock:
            entry = self._times[name]
            entry[0] += seconds
            entry[1] += times

    @contextmanager
    def timer(self, name: str) -> Generator[None]:
        """Times a block for `time`, also where it raises."""
        start = self._clock()
        try:
            yield
        finally:
            self.time(name, self._clock() - start)

    def observe(self, name: str, values: Number | np.ndarray) -> None:
        """Adds values; reported as `<name>_mean`, `<name>_max` and `<name>_p99` (of the last 1000) of the interval."""
        new = np.ravel(values).tolist() if isinstance(values, np.ndarray) else [float(values)]
        if new:
            with self._lock:
                self._values[name].add(new)

    def snapshot(self) -> dict[str, Number]:
        """What happened since the last snapshot; starts the next interval. Names without news are left out."""
        with self._lock:
            now = self._clock()
            seconds = max(now - self._start, 1e-9)
            row = {**self._totals, **self._gauges}
            for name in self._rates & self._totals.keys():
                row[f"{name}_per_s"] = (self._totals[name] - self._before.get(name, 0)) / seconds
            averages, self._averages = self._averages, defaultdict(lambda: [0.0, 0])
            times, self._times = self._times, defaultdict(lambda: [0.0, 0])
            values, self._values = self._values, defaultdict(_Distribution)
            self._start, self._before = now, dict(self._totals)
        row.update({name: total / count for name, (total, count) in averages.items()})
        for name, (spent, count) in times.items():
            row[f"{name}_ms"], row[f"{name}_share"] = 1e3 * spent / max(count, 1), spent / seconds
        for name, seen in values.items():
            row[f"{name}_mean"], row[f"{name}_max"] = seen.total / seen.count, seen.maximum
            row[f"{name}_p99"] = float(np.percentile(seen.recent, 99))
        return row


class EpisodeStats:
    """Returns and lengths of the episodes of S slots, from the rows that pass. Thread-safe, NumPy, no Python loop.

    An episode ends with LAST, terminated or truncated alike. The reward of a FIRST row is no part of any episode. An
    episode whose FIRST row was not seen is not counted.
    """

    def __init__(self, num_slots: int, *, window: int = 100, state: Mapping[str, Any] | None = None) -> None:
        """Statistics over the last `window` episodes, of which a resumed run passes the earlier ones as `state`."""
        self._lock = threading.Lock()
        self._return = np.zeros(num_slots, np.float64)
        self._length = np.full(num_slots, _UNSEEN, np.int64)
        state = state or {"returns": (), "lengths": (), "episodes": 0}
        self._returns: deque[float] = deque(state["returns"], maxlen=window)
        self._lengths: deque[int] = deque(state["lengths"], maxlen=window)
        self._episodes = int(state["episodes"])
        self._interval: list[float] = []

    def step(self, slots: slice | np.ndarray, step_type: np.ndarray, reward: np.ndarray) -> tuple[np.ndarray, ...]:
        """Takes one row of some slots.

        Args:
            slots: Slice, or int `[N]` without repetition.
            step_type: uint8 `[N]`.
            reward: float32 `[N]`, arrived with the row.

        Returns:
            Returns (float64) and lengths in steps (int64) of the episodes that ended here, both `[K]`.
        """
        with self._lock:
            going = step_type != StepType.FIRST
            # where, not a product: a NaN on a FIRST row must not stay.
            total = np.where(going, self._return[slots] + reward, 0.0)
            length = (self._length[slots] + 1) * going
            self._return[slots] = total
            self._length[slots] = length
            ended = step_type == StepType.LAST
            if not ended.any():
                return _NO_EPISODES
            ended &= length > 0
            returns, lengths = total[ended], length[ended]
            self._returns.extend(returns.tolist())
            self._lengths.extend(lengths.tolist())
            self._interval.extend(returns.tolist())
            self._episodes += len(returns)
            return returns, lengths

    def drop(self, slots: slice | np.ndarray) -> None:
        """Forgets the running episodes of some slots, whose actor was restarted."""
        with self._lock:
            self._length[slots] = _UNSEEN

    def mean_return(self) -> tuple[float, int]:
        """Mean return of the window (NaN if it is empty) and how many episodes it holds."""
        with self._lock:
            return float(np.mean(self._returns)) if self._returns else float("nan"), len(self._returns)

    def snapshot(self) -> dict[str, Number]:
        """`return_mean` over the window of `return_episodes`, `return_interval_mean` since the last snapshot, ..."""
        with self._lock:
            row: dict[str, Number] = {"episodes": self._episodes, "return_episodes": len(self._returns)}
            if self._returns:
                row["return_mean"] = float(np.mean(self._returns))
                row["episode_length_mean"] = float(np.mean(self._lengths))
            if self._interval:
                row["return_interval_mean"] = float(np.mean(self._interval))
                self._interval = []
            return row

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps, as plain JSON. Running episodes are not part of it: actors reset on resume."""
        with self._lock:
            return {"returns": list(self._returns), "lengths": list(self._lengths), "episodes": self._episodes}


_UNSEEN = -(2**62)  # So negative that no episode counts up from it to a positive length.
_NO_EPISODES = (np.empty(0, np.float64), np.empty(0, np.int64))

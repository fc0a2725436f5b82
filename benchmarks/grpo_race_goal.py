"""What `grpo.py race` times in another library: its reward function, which ends the training when the goal is reached.

Needs nothing but Python.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

GOAL = 0.9
_FIRST = 512  # completions that tell whether weights and tokenizer were loaded as they should be
_FIRST_MEAN = (0.2, 0.45)


class OverError(Exception):
    """The goal is reached, or there is no time left."""


class Goal:
    """The clock of one training, which begins with `time`.

    Args:
        window: Completions that the mean reward is taken over.
        limit_s: Seconds after which the training ends anyway.
    """

    def __init__(self, window: int, limit_s: float) -> None:
        self._rewards: deque[float] = deque(maxlen=window)
        self._limit_s = limit_s
        self._seen = 0
        self._times: list[float] = []  # when each batch was scored

    def score(self, completions: Iterable[str], answers: Iterable[str]) -> list[float]:
        """1 for each completion that is the answer, spaces around it aside; else 0.

        Raises:
            OverError: nothing more is to be learned.
            SystemExit: the first completions are not those of the warm start.
        """
        rewards = [float(text.strip() == answer) for text, answer in zip(completions, answers, strict=True)]
        self._rewards.extend(rewards)
        self._seen += len(rewards)
        self._times.append(time.perf_counter() - self._started)
        if self._seen - len(rewards) < _FIRST <= self._seen and not _FIRST_MEAN[0] <= self._mean <= _FIRST_MEAN[1]:
            raise SystemExit(
                f"the mean reward of the first {self._seen} completions is {self._mean:.3f}, which must lie in "
                f"{_FIRST_MEAN}: this is not the model after the warm start, or not its tokenizer."
            )
        if self._reached or self._times[-1] > self._limit_s:
            raise OverError
        return rewards

    def time(self, train: Callable[[], Any]) -> None:
        """Trains, and prints how long it took; what compiles in it counts."""
        self._started = time.perf_counter()
        with contextlib.suppress(OverError):
            train()
        figures = {
            "seconds": self._times[-1],
            "later_seconds": self._times[-1] - self._times[1],
            "updates": len(self._times) - 1,
            "mean": self._mean,
            "reached": self._reached,
        }
        print("RACE", json.dumps(figures), flush=True)

    @property
    def _mean(self) -> float:
        return sum(self._rewards) / len(self._rewards)

    @property
    def _reached(self) -> bool:
        return len(self._rewards) == self._rewards.maxlen and self._mean >= GOAL


def read_prompts(directory: str) -> list[dict[str, str]]:
    """The prompts with their answers, in the order of the task."""
    return [json.loads(line) for line in (Path(directory) / "prompts.jsonl").read_text().splitlines()]

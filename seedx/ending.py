"""When a run is over."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from seedx.checks import ConfigError
from seedx.config import Config
from seedx.console import closing_line
from seedx.llm_config import LlmConfig
from seedx.runlog import SUMMARY_KEYS, write_summary


class TimeOverError(Exception):
    """`--seconds` are over before there is anything to save."""


class StoppedError(Exception):
    """What is to be done before there is anything to save is to be done no more; others know why."""


class Ending:
    """What stops a run; its wall time counts from here.

    Args:
        config: Of the run.
        run_dir: The run directory.
        failed: Set when a thread has failed.
        signals: Numbers of the signals that came; others add to it.

    Attributes:
        solved: The figures that the goal was reached with; empty before.
    """

    def __init__(
        self, config: Config | LlmConfig, run_dir: Path, failed: threading.Event, signals: Sequence[int]
    ) -> None:
        self._config = config
        self._run_dir = run_dir
        self._failed = failed
        self._signals = signals
        self._started = time.monotonic()
        self.solved: dict[str, float] = {}

    @property
    def seconds(self) -> float:
        """Since the start of this session."""
        return time.monotonic() - self._started

    def reason(self, env_steps: int) -> str | None:
        """What stops the run after so many steps, as in summary.json; None: nothing does."""
        config = self._config
        if self._failed.is_set():
            return "failed"
        if self._signals:
            return signal.Signals(self._signals[0]).name
        if config.steps is not None and env_steps >= config.steps:
            return "steps"
        if config.seconds is not None and self.seconds >= config.seconds:
            return "seconds"
        return None

    def check(self) -> None:
        """Ends what comes before the first update, if the run is over.

        Raises:
            TimeOverError: its time is.
            StoppedError: a thread has failed, or a signal came.
        """
        reason = self.reason(0)
        if reason == "seconds":
            raise TimeOverError
        if reason is not None:
            raise StoppedError

    def is_solved(self, mean: float, count: int) -> bool:
        """Whether the mean return of so many episodes, or the mean reward of completions, has reached the goal."""
        goal = self._config.goal
        if goal is None or count < self._config.metrics.return_window or mean < goal:
            return False
        score, of = ("reward", "completions") if isinstance(self._config, LlmConfig) else ("return", "episodes")
        self.solved = {f"{score}_mean": mean, f"{score}_{of}": count}
        return True


def end_before_first_update(config: LlmConfig, run_dir: Path, seconds: float) -> None:
    """Writes the summary of a run whose time was over before there was anything to save, and says so."""
    summary = {
        **dict.fromkeys(SUMMARY_KEYS, 0),
        "agent": config.agent,
        "env": config.env,
        "seed": config.seed,
        "seconds": seconds,
        "return_mean": None,
        "reward_mean": None,
        **dict.fromkeys(("completions", "completion_tokens", "completion_tokens_per_s"), 0),
        "exit": "seconds",
    }
    write_summary(run_dir, summary)
    print(closing_line(summary, str(run_dir)), flush=True)


def check_actors(config: Config, run_dir: Path, heard_at: float) -> None:
    """Raises ConfigError when no training actor has asked for `hello_timeout_s`: perhaps none ever will.

    Args:
        config: Of the run.
        run_dir: The run directory.
        heard_at: When one last asked, on the monotonic clock.
    """
    timeout_s = config.inference.hello_timeout_s
    if time.monotonic() - heard_at > timeout_s:
        raise ConfigError(
            f"no training actor has asked for an action for {timeout_s:g} s: all are gone or hang. Continue with "
            f"--resume --run-dir {run_dir} and start the actors too; raise --inference.hello-timeout-s if "
            "they may stay away for longer."
        )

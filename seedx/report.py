"""What a run tells: metrics.jsonl, TensorBoard, console, the curve and the summary, from one row of figures.

Threading: `loop` runs on a thread of its own; `finish` is called when it has ended or is about to.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from seedx.config import Config
from seedx.console import ENVIRONMENT_VIEW, Console, View, closing_line
from seedx.curve import draw_curve, drawn_figures
from seedx.hosts import ONE_HOST, Hosts
from seedx.llm_config import LlmConfig
from seedx.metrics import Metrics
from seedx.runlog import History, RunLog, read_rows, write_summary

_CURVE_INTERVAL_S = 120.0


class Reporter:
    """Reports on one run.

    Args:
        config: Of the run.
        run_dir: Where files go.
        metrics: What the parts of the run measured.
        figures: Further figures of now, for example of the episodes and the queue.
        stop: Ends the loop.
        view: What the console and the curve show.
        summary: What summary.json has of the last row beside what all runs have; None: nothing.
        warnings: What a row warns of, by kind; None: of nothing.
        hosts: Whose learners learn together.

    Raises:
        ValueError: the metrics.jsonl of a resumed run is broken.
    """

    def __init__(
        self,
        config: Config | LlmConfig,
        run_dir: Path,
        metrics: Metrics,
        figures: Callable[[], dict[str, Any]],
        stop: threading.Event,
        view: View = ENVIRONMENT_VIEW,
        summary: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
        warnings: Callable[[dict[str, Any]], dict[str, str]] | None = None,
        hosts: Hosts = ONE_HOST,
    ) -> None:
        self._config = config
        self._run_dir = run_dir
        self._metrics = metrics
        self._figures = figures
        self._stop = stop
        self._score, self._own_summary, self._warnings = view.score, summary, warnings
        self._hosts = hosts
        self._finishing = threading.Event()
        self._ended = threading.Event()
        self._log = RunLog(run_dir, tensorboard=config.metrics.tensorboard)
        self._console = Console(view=view)
        self._row: dict[str, Any] = {}  # the newest
        self._curve: History[dict[str, Any]] = History()  # drawing all rows of a day would take seconds of the GIL
        for row in read_rows(run_dir / "metrics.jsonl"):
            self._curve.add(drawn_figures(row, self._score))

    def start(self, opening: str) -> None:
        """Prints the first line."""
        self._console.start(opening)

    def loop(self) -> None:
        """Reports once an interval until the run ends."""
        interval_s = self._config.metrics.interval_s
        since_curve_s = 0.0
        try:
            while not self._stop.is_set() and not self._finishing.wait(interval_s):
                row = self._write_row()
                self._console.update(row)
                if self._warnings is not None:
                    self._console.warn(self._warnings(row))
                since_curve_s += interval_s
                if since_curve_s >= _CURVE_INTERVAL_S:
                    since_curve_s = 0.0
                    self._draw_curve()
        finally:
            self._ended.set()

    def finish(self, reason: str) -> None:
        """Writes the last row, the curve and the summary, and prints the last line."""
        self._finishing.set()
        self._ended.wait(5.0)
        row = self._write_row()
        self._log.close()
        summary = self._summary(row, reason)
        write_summary(self._run_dir, summary)
        self._draw_curve()
        self._console.finish(closing_line(summary, str(self._run_dir), self._config.goal, self._hosts))

    def _write_row(self) -> dict[str, Any]:
        row = {**self._metrics.snapshot(), **self._figures()}
        row |= interval_ratio(self._row, row)
        self._row = row
        self._log.write(row)
        self._curve.add(drawn_figures(row, self._score))
        return row

    def _draw_curve(self) -> None:
        config = self._config
        title = f"{config.agent} on {config.env}, seed {config.seed}"
        draw_curve(self._run_dir, self._curve.items, title=title, score=self._score, goal=config.goal)

    def _summary(self, row: dict[str, Any], reason: str) -> dict[str, Any]:
        seconds = row["seconds"]
        return {
            "agent": self._config.agent,
            "env": self._config.env,
            "seed": self._config.seed,
            "env_steps": row["env_steps"],
            "frames": row["frames"],
            "updates": row["updates"],
            "seconds": seconds,
            "env_steps_per_s": row["env_steps"] / max(seconds, 1e-9),
            "return_mean": row.get(f"{self._score}_mean"),
            "return_episodes": row.get("return_episodes", row.get("reward_completions", 0)),
            "lag_updates_mean": row["lag_updates_mean"],
            "exit": reason,
            **(self._own_summary(row) if self._own_summary is not None else {}),
        }


def interval_ratio(before: Mapping[str, Any], row: Mapping[str, Any]) -> dict[str, float]:
    """Samples per insert between two rows: the ratio over the whole run hides for long that it drifts.

    Nothing without inserts, or where a Reverb server has gone back to a checkpoint's counts.
    """
    names = ("replay/sampled", "replay/inserted")
    if not all(name in before and name in row for name in names):
        return {}
    sampled, inserted = (row[name] - before[name] for name in names)
    return {"replay/interval_samples_per_insert": sampled / inserted} if sampled >= 0 and inserted > 0 else {}

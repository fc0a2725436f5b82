"""curve.png: the learning curve of a run, drawn from rows of its metrics.jsonl with Matplotlib."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Rows = Sequence[Mapping[str, Any]]


def drawn_figures(row: Mapping[str, Any], score: str = "return") -> dict[str, Any]:
    """What the curve needs of a row."""
    names = ("env_steps", f"{score}_mean", f"{score}_interval_mean", "env_steps_per_s", "learner/lag_updates_mean")
    return {name: row[name] for name in names if name in row}


def draw_curve(
    run_dir: str | Path, rows: Rows, *, title: str, score: str = "return", goal: float | None = None
) -> Path:
    """Draws RUN_DIR/curve.png, whole or not at all, and returns its path.

    Above, `<score>_mean` and faintly each interval's own mean against environment steps; below, steps per second and
    the lag of the learner's data.

    Args:
        run_dir: The run directory.
        rows: Of metrics.jsonl, or `drawn_figures` of them.
        title: For example "impala on CartPole-v1, seed 1".
        score: "return", or "reward" for LLM runs.
        goal: Drawn as a line: what `--stop-at-return` asked for.
    """
    # The object interface without pyplot: importing pyplot takes another second and picks a window system.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    run_dir = Path(run_dir)
    rows = _last_attempt(rows)
    figure = Figure(figsize=(8, 6), dpi=120, layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    figure.suptitle(title, fontsize=13, fontweight="bold")
    _draw_score(above, rows, score, goal)
    _draw_throughput(below, rows)
    below.set_xlim(left=0)
    below.set_xlabel("environment steps")
    below.xaxis.set_major_formatter(lambda steps, _: _short(steps))
    for axes in (above, below):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
    path = run_dir / "curve.png"
    temporary = run_dir / "curve.tmp"
    FigureCanvasAgg(figure).print_figure(temporary, format="png")
    os.replace(temporary, path)
    return path


def _draw_score(axes: Any, rows: Rows, score: str, goal: float | None) -> None:
    steps, single = _series(rows, f"{score}_interval_mean")
    axes.plot(steps, single, ".", color="tab:blue", alpha=0.35, markersize=6, mew=0, label="one interval")
    steps, mean = _series(rows, f"{score}_mean")
    axes.plot(steps, mean, color="tab:blue", linewidth=2, label="mean of the window", marker="o" * (len(steps) == 1))
    if mean:
        place = {"xytext": (0, -6), "textcoords": "offset points", "ha": "right", "va": "top"}
        axes.annotate(f"{mean[-1]:,.1f}", (steps[-1], mean[-1]), color="tab:blue", fontweight="bold", **place)
    if goal is not None:
        axes.axhline(goal, color="tab:green", linestyle="--", linewidth=1, label=f"goal {goal:g}")
    axes.set_ylabel(score)
    if mean:
        axes.legend(frameon=False, loc="best")
    else:
        axes.text(
            0.5, 0.5, "no finished episodes yet", transform=axes.transAxes, ha="center", va="center", color="grey"
        )


def _draw_throughput(axes: Any, rows: Rows) -> None:
    steps, rate = _series(rows, "env_steps_per_s")
    axes.plot(steps, rate, color="tab:grey", linewidth=1.2, marker="o" * (len(steps) == 1))
    axes.set_ylabel("steps / s", color="tab:grey")
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(lambda value, _: _short(value))
    steps, lag = _series(rows, "learner/lag_updates_mean")
    if lag:
        right = axes.twinx()
        right.plot(steps, lag, color="tab:orange", linewidth=1.2, marker="o" * (len(steps) == 1))
        right.set_ylabel("lag / updates", color="tab:orange")
        right.set_ylim(bottom=0)
        right.spines["top"].set_visible(False)


def _last_attempt(rows: Rows) -> list[Mapping[str, Any]]:
    """Without rows that a resume from an older checkpoint went back behind."""
    kept: list[Mapping[str, Any]] = []
    for row in rows:
        while kept and kept[-1].get("env_steps", 0) > row.get("env_steps", 0):
            kept.pop()
        kept.append(row)
    return kept


def _series(rows: Rows, name: str) -> tuple[list, list]:
    """Steps and values of the rows that have the figure."""
    pairs = [(row.get("env_steps"), row.get(name)) for row in rows]
    pairs = [(x, y) for x, y in pairs if x is not None and y is not None and math.isfinite(y)]
    return [x for x, _ in pairs], [y for _, y in pairs]


def _short(value: float) -> str:
    """For example 1.5M, 20k, 300."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:g}{unit}"
    return f"{value:g}"

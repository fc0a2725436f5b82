"""What a run looks like on a terminal: a live panel, or elsewhere a plain line now and then.

It takes flat dicts of figures, so both modes share it: what is shown is a table of (label, template).
"""

from __future__ import annotations

import itertools
import math
import shlex
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from seedx.hosts import ONE_HOST, Hosts
from seedx.runlog import History

Figures = Mapping[str, Any]
Cells = Sequence[tuple[str, str]]  # (label, template over figure names); a cell is left out if a figure is missing

# Title of a row -> its cells. The first row is what a plain line shows first.
ENVIRONMENT_ROWS: Mapping[str, Cells] = {
    "acting": (
        ("steps", "{env_steps:,.0f}"),
        ("steps/s", "{env_steps_per_s:,.0f}"),
        ("return", "{return_mean:,.1f}"),
        ("episodes", "{episodes:,.0f}"),
    ),
    "learning": (
        ("updates", "{updates:,.0f}"),
        ("updates/s", "{updates_per_s:,.1f}"),
        ("lag", "{learner/lag_updates_mean:.2f}"),
        ("version", "{version:,.0f}"),
    ),
    "update": (
        ("takes", "{learner/update_ms:.1f} ms"),
        ("loss", "{learner/loss:.3g}"),
        ("entropy", "{learner/entropy:.3f}"),
        ("clipped", "{learner/clip_fraction:.1%}"),
    ),
    "batches": (
        ("fill", "{batcher/fill:.0%}"),
        ("full", "{batcher/full:,.0f}"),
        ("ready", "{batcher/ready:,.0f}"),
        ("timeout", "{batcher/timeout:,.0f}"),
    ),
    "waits": (
        ("batch", "{batcher/wait_ms:.1f} ms"),
        ("learner", "{learner/wait_batch_ms:.1f} ms"),
        ("put", "{queue/put_wait_ms:.1f} ms"),
        ("paced", "{store/paced_s:.1f} s"),
    ),
    "held": (
        ("streams", "{server/streams:,.0f}"),
        ("slots", "{batcher/live_slots:,.0f}"),
        ("unrolls", "{replay/items:,.0f}"),
    ),
}
ENVIRONMENT_LINE = ("steps", "steps/s", "return", "updates", "updates/s", "lag", "fill")

_STALL_S = 10.0
_SPARK_WIDTH = 48


class View(NamedTuple):
    """How runs of one kind are shown.

    Attributes:
        rows: Of the panel.
        line: Labels of the cells that a plain line consists of.
        score: "return" or "reward", whose `<score>_mean` is drawn.
        stage: Says of two snapshots what is waited for, None if there was progress.
    """

    rows: Mapping[str, Cells]
    line: Sequence[str]
    score: str
    stage: Callable[[Figures, Figures], str | None]


class Console:
    """Shows one run on one stream. One thread calls it."""

    def __init__(
        self,
        *,
        view: View | None = None,
        stream: Any = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Shows nothing yet.

        Args:
            view: What is shown; None: an environment run.
            stream: Text stream, default stdout. A panel if it is a terminal that knows block characters.
            clock: Seconds.
        """
        self._stream = sys.stdout if stream is None else stream
        self._rows, self._line, score, self._stage = view or ENVIRONMENT_VIEW
        self._curve = f"{score}_mean"
        self._clock = clock
        self._started = self._next_line = clock()
        self._progressed: tuple[float, Figures] = (self._started, {})
        self._history: History[float] = History()
        self._live: Any = None  # rich.live.Live
        self._title = ""
        self._warned: Collection[str] = ()

    def start(self, opening: str) -> None:
        """Prints the line that says what runs and where, and opens the panel on a terminal."""
        self._title = opening
        self._print(opening)
        if self._stream.isatty() and "utf" in (self._stream.encoding or "").lower():
            self._live = _live(self._stream)

    def update(self, figures: Figures) -> None:
        """Shows the figures of one interval. Plain lines grow rarer: one a second, later one each 5 s, each 30 s."""
        now = self._clock()
        elapsed = float(figures.get("seconds", now - self._started))  # the run's own clock started earlier
        value = figures.get(self._curve)
        if isinstance(value, int | float) and math.isfinite(value):
            self._history.add(float(value))
        stall = self._stall(figures, now)
        if self._live is not None:
            self._live.update(_panel(self._cells(figures), self._history.items, stall, elapsed))
            self._live.refresh()
        elif now >= self._next_line:
            self._next_line = now + min(max(1.0, (now - self._started) / 10), 30.0)
            cells = {label: text for row in self._cells(figures).values() for label, text in row}
            shown = "  ".join(f"{label} {cells[label]}" for label in self._line if label in cells)
            self._print(f"{elapsed:7.1f} s  {stall or shown or 'starting'}")

    def warn(self, warnings: Mapping[str, str]) -> None:
        """Prints warnings by their kind; one of a kind that was there a moment ago is not said again."""
        for kind in warnings.keys() - self._warned:
            self._print(f"warning: {warnings[kind]}")
        self._warned = warnings.keys()

    def finish(self, closing: str) -> None:
        """Closes the panel and prints the last line."""
        if self._live is not None:
            self._live.stop()
            self._live = None
        self._print(closing)

    def _print(self, text: str) -> None:
        print(text, file=self._stream, flush=True)

    def _cells(self, figures: Figures) -> dict[str, list[tuple[str, str]]]:
        rows = {}
        for title, cells in self._rows.items():
            shown = [(label, text) for label, template in cells if (text := _filled(template, figures)) is not None]
            if shown:
                rows[title] = shown
        return rows

    def _stall(self, figures: Figures, now: float) -> str | None:
        """What is waited for if nothing has moved for `_STALL_S` seconds."""
        since, before = self._progressed
        stage = self._stage(before, figures)
        if stage is None:
            self._progressed = (now, dict(figures))
            return None
        return f"no progress for {now - since:.0f} s: {stage}" if now - since >= _STALL_S else None


def waiting_stage(before: Figures, now: Figures) -> str | None:
    """What an environment run waits for, None if steps or updates moved between the two snapshots."""

    def moved(name: str) -> bool:
        return now.get(name, 0) != before.get(name, 0)

    if moved("env_steps") or moved("updates"):
        return None
    if gone_s := now.get("replay/gone_s"):
        return f"a Reverb server has been gone for {gone_s:.0f} s; {now['replay/give_up_in_s']:.0f} s left to come back"
    if not now.get("server/streams", 1):
        return "no actor is connected; see logs/actor-*.log"
    if moved("store/paced_s"):
        return "acting waits for room in the replay; the learner is at work on a batch, or waits too"
    if now.get("server/messages_per_s"):
        return "the learner waits for whole unrolls; actors do send"
    return "actors are connected but send nothing: an environment or the policy's compilation takes its time"


ENVIRONMENT_VIEW = View(ENVIRONMENT_ROWS, ENVIRONMENT_LINE, "return", waiting_stage)


def opening_line(agent: str, env: str, seed: int, actors: str, devices: str, run_dir: str) -> str:
    """For example `impala on CartPole-v1, seed 1: 2 actors x 32 environments, learner on 1 cpu -> runs/impala`."""
    return f"{agent} on {env}, seed {seed}: {actors}, learner on {devices} -> {run_dir}"


def closing_line(summary: Figures, run_dir: str, stop_at: float | None = None, hosts: Hosts = ONE_HOST) -> str:
    """What happened and what to run next; after a failure its message says that.

    Args:
        summary: Of summary.json. Its `exit` is "solved", "steps", "seconds", "failed" or a signal's name.
        run_dir: The run directory.
        stop_at: The return (or reward) that the run was to stop at.
        hosts: Whose learners learned together; the first one has the checkpoints.
    """
    why, score = summary["exit"], "reward" if "reward_mean" in summary else "return"
    mean = summary.get(f"{score}_mean")
    where = shlex.quote(run_dir)
    how = "--episodes 20" if score == "return" else "--num-prompts 200"
    checkpoints = where if hosts.index == 0 else "RUN_DIR (host 0's)"
    evaluate = f"python launch/evaluate.py {checkpoints} {how}"
    resume = f"python launch/local.py --run-dir {where} --resume"
    if not hosts.alone:
        resume = f"the same line on all {hosts.count} hosts, with --resume"
    happened, follow = {
        "solved": ("solved", evaluate),
        "steps": ("done, --steps reached", evaluate),
        "seconds": ("done, --seconds are over", evaluate),
        "SIGINT": ("interrupted", resume),
        "SIGTERM": ("terminated", resume),
        "failed": (f"failed, see {where}/logs", None),
    }.get(why, (why, evaluate))
    if follow == evaluate and summary.get("updates") == 0:  # nothing was learned, so nothing was saved
        happened += " before the first update"
        follow = f"give it longer, {resume} --seconds {10 * math.ceil(summary['seconds'])}"
    result = f"no finished {'episode' if score == 'return' else 'completion'}"
    if mean is not None and math.isfinite(mean):
        goal = f" {'>=' if mean >= stop_at else '<'} {stop_at:g}" if stop_at is not None else ""
        result = f"{score} {mean:,.1f}{goal}" if abs(mean) >= 10 else f"{score} {mean:.3g}{goal}"
        if summary.get("return_episodes"):
            over, of = ("over", "episodes") if score == "return" else ("over the last", "completions")
            result += f" {over} {summary['return_episodes']:,.0f} {of}"
    if score == "reward" and summary.get("held_out_reward_after") is not None:
        before, after = summary["held_out_reward_before"], summary["held_out_reward_after"]
        result += f"; held out {f'{before:.3f} -> ' if before is not None else ''}{after:.3f}"
    what = "steps" if score == "return" else "learned from"
    steps = f" ({summary['env_steps']:,.0f} {what})" if summary.get("env_steps") is not None else ""
    advice = f" Next: {follow}" if follow else ""
    return f"{happened}: {result} in {summary['seconds']:,.1f} s{steps}.{advice}"


def sparkline(values: Sequence[float], width: int = _SPARK_WIDTH) -> str:
    """At most `width` block characters; each is the mean of its share of the values."""
    if not values:
        return ""
    width = min(width, len(values))
    edges = [round(i * len(values) / width) for i in range(width + 1)]
    means = [math.fsum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    low, high = min(means), max(means)
    return "".join("▁▂▃▄▅▆▇█"[round(7 * (mean - low) / (high - low)) if high > low else 0] for mean in means)


def _filled(template: str, figures: Figures) -> str | None:
    try:
        text = template.format_map(figures)
    except (KeyError, TypeError, ValueError):  # Missing, None, or no number.
        return None
    return None if "nan" in text else text


def _live(stream: Any) -> Any:
    from rich.console import Console as RichConsole
    from rich.live import Live

    console = RichConsole(file=stream)
    if console.is_dumb_terminal:
        return None
    live = Live(console=console, auto_refresh=False)
    live.start()
    return live


def _panel(rows: Mapping[str, Cells], history: Sequence[float], stall: str | None, elapsed: float) -> Any:
    from rich import box
    from rich.console import Group
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="bold cyan", no_wrap=True)
    for title, cells in rows.items():
        table.add_row(title, *(Text(f"{label} ", "dim").append(text, "not dim bold") for label, text in cells))
    parts: list[Any] = [table]
    if history:
        curve = Text(f"\n{sparkline(history)}", "green")
        parts.append(curve.append(f"  {min(history):,.1f} .. {max(history):,.1f}", "dim"))
    if stall:
        parts.append(Text(stall, "bold yellow"))
    minutes, seconds = divmod(int(elapsed), 60)
    return Panel(Group(*parts), box=box.ROUNDED, title=f"{minutes}:{seconds:02d}", title_align="right", expand=False)

"""The plain lines, the live panel, and the first and last line of a run."""

import io
import subprocess
import sys

import numpy as np
import pytest

from seedx.console import Console, View, closing_line, opening_line, sparkline, waiting_stage
from seedx.hosts import Hosts

FIGURES = {
    "env_steps": 412_160,
    "env_steps_per_s": 36_412.4,
    "return_mean": 231.44,
    "episodes": 2131,
    "updates": 644,
    "updates_per_s": 56.94,
    "version": 644,
    "learner/lag_updates_mean": 1.234,
    "learner/loss": float("nan"),
    "learner/entropy": None,
    "batcher/fill": 0.981,
    "batcher/full": 1230,
    "batcher/ready": 33,
    "batcher/timeout": 2,
    "server/streams": 4,
}


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_plain_line_shows_what_is_known():
    stream, clock = io.StringIO(), Clock()
    console = Console(stream=stream, clock=clock)
    console.start("opening")
    clock.now = 12
    console.update(FIGURES)
    console.finish("closing")
    assert stream.getvalue().splitlines() == [
        "opening",
        "   12.0 s  steps 412,160  steps/s 36,412  return 231.4  updates 644  updates/s 56.9  lag 1.23  fill 98%",
        "closing",
    ]


def test_plain_lines_grow_rarer():
    stream, clock = io.StringIO(), Clock()
    console = Console(stream=stream, clock=clock)
    at = []
    for now in np.concatenate([np.arange(0, 10, 0.5), np.arange(60, 120, 0.5), np.arange(3000, 3300, 0.5)]).tolist():
        clock.now, before = now, stream.tell()
        console.update({"env_steps": now, "updates": now})
        if stream.tell() > before:
            at.append(now)
    assert at[:10] == list(range(10))
    assert 6 <= len([t for t in at if 60 <= t < 120]) <= 10
    assert 10 <= len([t for t in at if t >= 3000]) <= 11


def test_nothing_known_yet_and_other_rows():
    stream = io.StringIO()
    Console(stream=stream).update({})
    rows = {"decoding": (("tokens/s", "{engine/tokens_per_s:,.0f}"), ("reward", "{reward_mean:.3f}"))}
    console = Console(view=View(rows, ("reward", "tokens/s"), "reward", waiting_stage), stream=stream)
    console.update({"engine/tokens_per_s": 13_500.0, "reward_mean": 0.25})
    assert stream.getvalue().splitlines() == ["    0.0 s  starting", "    0.0 s  reward 0.250  tokens/s 13,500"]


def test_stall_names_the_stage_and_ends_with_progress():
    stream, clock = io.StringIO(), Clock()
    console = Console(stream=stream, clock=clock)
    console.update(FIGURES)
    clock.now = 9.0
    console.update(FIGURES)
    clock.now = 15.0
    console.update(FIGURES | {"server/streams": 0})
    clock.now = 20.0
    console.update(FIGURES | {"env_steps": 412_224})
    lines = stream.getvalue().splitlines()
    assert "no progress" not in lines[1]
    assert lines[2] == "   15.0 s  no progress for 15 s: no actor is connected; see logs/actor-*.log"
    assert "steps 412,224" in lines[3]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"updates": 645}, None),
        ({"replay/gone_s": 0.0, "server/streams": 0}, "no actor is connected"),
        (
            {"replay/gone_s": 12.2, "replay/give_up_in_s": 107.8},
            "a Reverb server has been gone for 12 s; 108 s left to come back",
        ),
        (
            {"store/paced_s": 3.5, "replay/items": 64},
            "acting waits for room in the replay; the learner is at work on a batch, or waits too",
        ),
        ({"server/messages_per_s": 20.0}, "whole unrolls"),
        ({}, "send nothing"),
    ],
)
def test_waiting_stage(change, said):
    stage = waiting_stage(FIGURES, FIGURES | change)
    assert stage is None if said is None else said in stage


def test_panel_on_a_terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "80")
    stream = Terminal()
    console = Console(stream=stream)
    console.start("opening")
    for value in (1.0, 5.0, 9.0):
        console.update(FIGURES | {"return_mean": value})
    console.finish("closing")
    text = stream.getvalue()
    assert "▁▅█" in text
    for word in ("steps/s", "36,412", "timeout", "lag", "1.0 .. 9.0"):
        assert word in text
    assert "entropy" not in text  # None and NaN are left out.
    assert "loss" not in text
    assert text.endswith("closing\n")


def test_history_of_the_panel_is_bounded():
    console = Console(stream=io.StringIO(), clock=Clock())
    for value in range(5000):
        console.update({"return_mean": value})
    assert len(console._history.items) <= 2000
    assert console._history.items[-1] == 4999


def test_dumb_terminals_get_plain_lines(monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    stream = Terminal()
    console = Console(stream=stream)
    console.start("opening")
    console.update(FIGURES)
    console.finish("closing")
    assert len(stream.getvalue().splitlines()) == 3


def test_rich_stays_out_where_there_is_no_terminal():
    code = """if True:
        import sys
        from seedx.console import Console
        console = Console()
        console.start("a"), console.update({"env_steps": 1}), console.finish("b")
        assert "rich" not in sys.modules
    """
    run = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert run.returncode == 0
    assert run.stdout.splitlines()[0] == "a"


def test_sparkline():
    assert sparkline([]) == ""
    assert sparkline([3.0, 3.0]) == "▁▁"
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7]) == "▁▂▃▄▅▆▇█"
    assert sparkline(list(range(1000)), width=8) == "▁▂▃▄▅▆▇█"


def test_opening_and_closing_lines():
    assert opening_line("impala", "CartPole-v1", 1, "2 actors x 32 environments", "1 cpu", "runs/a") == (
        "impala on CartPole-v1, seed 1: 2 actors x 32 environments, learner on 1 cpu -> runs/a"
    )
    summary = {"exit": "solved", "return_mean": 487.24, "return_episodes": 100, "seconds": 11.31, "env_steps": 412_160}
    assert closing_line(summary, "runs/a", 475) == (
        "solved: return 487.2 >= 475 over 100 episodes in 11.3 s (412,160 steps). "
        "Next: python launch/evaluate.py runs/a --episodes 20"
    )
    assert closing_line(summary | {"exit": "SIGINT", "return_mean": None}, "my runs/a", 475) == (
        "interrupted: no finished episode in 11.3 s (412,160 steps). "
        "Next: python launch/local.py --run-dir 'my runs/a' --resume"
    )
    assert closing_line({"exit": "seconds", "updates": 0, "seconds": 10.02, "env_steps": 0}, "r") == (
        "done, --seconds are over before the first update: no finished episode in 10.0 s (0 steps). "
        "Next: give it longer, python launch/local.py --run-dir r --resume --seconds 110"
    )
    assert closing_line({"exit": "seconds", "reward_mean": 0.5, "seconds": 60}, "r", 0.9).startswith(
        "done, --seconds are over: reward 0.5 < 0.9 in 60.0 s. Next: "
    )
    stopped = closing_line(summary | {"exit": "SIGTERM"}, "r", 475, Hosts("h0:1", 2, 1))
    assert stopped.endswith("Next: the same line on all 2 hosts, with --resume")
    assert closing_line(summary, "r", 475, Hosts("h0:1", 2, 0)).endswith("launch/evaluate.py r --episodes 20")
    assert closing_line(summary, "r", 475, Hosts("h0:1", 2, 1)).endswith("RUN_DIR (host 0's) --episodes 20")


def test_the_mean_of_the_last_completions_is_not_taken_for_that_of_all():
    summary = {"exit": "solved", "reward_mean": 0.951, "return_episodes": 512, "seconds": 60, "env_steps": 3200}
    assert closing_line(summary, "r", 0.95).startswith(
        "solved: reward 0.951 >= 0.95 over the last 512 completions in 60.0 s (3,200 learned from). Next: "
    )


def test_a_failure_advises_nothing_that_may_not_mend_it():
    summary = {"exit": "failed", "updates": 3, "reward_mean": None, "seconds": 60, "env_steps": 24}
    assert closing_line(summary, "r") == ("failed, see r/logs: no finished completion in 60.0 s (24 learned from).")

"""Whole runs on replay: they learn, hold the ratio, and outlive a Reverb server that dies."""

import itertools
import json
import re
import signal
import sys
from pathlib import Path

import pytest
from processes import ROOT, Processes, last, until
from reverb_harness import find_uv

from seedx.checkpoint import load_params
from seedx.runlog import read_rows

# Starts fast: a small table and network.
TINY = (
    *("--num-actors", "1", "--envs-per-actor", "8", "--eval-actors", "0", "--stop-at-return", "None"),
    *("--learner.batch-size", "8", "--network.hidden", "8", "--network.lstm", "8", "--network.dueling-hidden", "8"),
    *("--table.min-size", "16", "--metrics.no-tensorboard", "--metrics.interval-s", "0.2"),
)
REVERB = [pytest.mark.external, pytest.mark.slow]
BOTH = pytest.mark.parametrize("replay", ["embedded", pytest.param("reverb", marks=REVERB)])


@pytest.fixture
def processes(tmp_path):
    with Processes(tmp_path) as started:
        yield started


def start(processes: Processes, run_dir: Path, *flags: str):
    if "reverb" in flags:
        find_uv()
    return processes.start(sys.executable, str(ROOT / "launch" / "local.py"), "--run-dir", str(run_dir), *flags)


@BOTH
def test_r2d2_runs_and_holds_the_ratio(processes, tmp_path, replay):
    run_dir = tmp_path / "run"
    run = start(processes, run_dir, "--agent", "r2d2", "--replay", replay, *TINY, "--steps", "20000")
    assert run.wait(150) == 0, run.said
    assert not processes.alive()
    rows = read_rows(run_dir / "metrics.jsonl")
    assert rows[-1]["batcher/compilations"] == 0
    assert abs(rows[-1]["replay/samples_per_insert"] / 4.0 - 1) < 0.05
    assert all(a["env_steps"] <= b["env_steps"] for a, b in itertools.pairwise(rows))
    assert load_params(run_dir).update == json.loads((run_dir / "summary.json").read_text())["updates"]


@pytest.mark.slow
@pytest.mark.timeout(900)
@BOTH
def test_r2d2_solves_memory(processes, tmp_path, replay):
    run_dir = tmp_path / "run"
    run = start(processes, run_dir, "--agent", "r2d2", "--replay", replay, "--metrics.no-tensorboard")
    assert run.wait(700) == 0, run.said
    assert json.loads((run_dir / "summary.json").read_text())["exit"] == "solved"
    evaluation = processes.launch("evaluate.py", str(run_dir), "--episodes", "100")
    assert evaluation.wait() == 0, evaluation.said
    assert float(evaluation.out.split()[1]) >= 0.9  # without memory: 0.25


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_apex_solves_cartpole_and_not_memory(processes, tmp_path):
    run = start(processes, tmp_path / "cartpole", "--agent", "apex", "--metrics.no-tensorboard")
    assert run.wait(500) == 0, run.said
    assert json.loads((tmp_path / "cartpole" / "summary.json").read_text())["exit"] == "solved"
    evaluation = processes.launch("evaluate.py", str(tmp_path / "cartpole"), "--episodes", "20")
    assert evaluation.wait() == 0, evaluation.said
    assert float(evaluation.out.split()[1]) >= 475
    flags = ("--env", "memory", "--steps", "60000", "--metrics.no-tensorboard")
    run = start(processes, tmp_path / "memory", "--agent", "apex", *flags)
    assert run.wait(300) == 0, run.said
    assert last(tmp_path / "memory", "return_mean") < 0.5  # R2D2 needs no more steps than that to pass it


@pytest.mark.slow
@pytest.mark.external
@pytest.mark.timeout(400)
def test_impala_learns_through_a_reverb_queue(processes, tmp_path):
    run_dir = tmp_path / "run"
    flags = ("--replay", "reverb", "--env", "catch", "--metrics.no-tensorboard")
    run = start(processes, run_dir, *flags)
    assert run.wait(300) == 0, run.said
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["exit"] == "solved"
    assert not processes.alive()
    last_row = read_rows(run_dir / "metrics.jsonl")[-1]
    assert last_row["replay/duplicates"] == last_row["replay/lost_upper_bound"] == 0


@pytest.mark.slow
@pytest.mark.external
@pytest.mark.timeout(400)
def test_training_outlives_a_reverb_server_that_is_killed(processes, tmp_path):
    run_dir = tmp_path / "run"
    flags = ("--checkpoint.replay-interval-s", "2")
    run = start(processes, run_dir, "--agent", "r2d2", "--replay", "reverb", *TINY, *flags)
    run.until(lambda: last(run_dir, "updates") > 50, "updates", 150)
    run.until(lambda: list(run_dir.glob("reverb/*/DONE")), "a checkpoint of the table", 60)
    updates = last(run_dir, "updates")
    for process in processes.alive("--allow-unauthenticated"):
        process.kill()
    run.until(lambda: "reverb died with signal 9 (SIGKILL); restart 1 of 5" in run.err, "the restart")
    run.until(lambda: last(run_dir, "updates") > updates + 100, "further updates", 120)
    assert last(run_dir, "replay/lost_upper_bound") > 0
    assert last(run_dir, "replay/duplicates") <= 25
    run.send(signal.SIGTERM)
    assert run.wait(60) == 143, run.said
    until(lambda: not processes.alive(), "the end of every process", 15)


@pytest.mark.slow
def test_a_learner_that_is_killed_goes_on_with_the_replay_of_its_last_snapshot(processes, tmp_path):
    run_dir = tmp_path / "run"
    flags = ("--checkpoint.replay-interval-s", "1", "--checkpoint.interval-s", "1", "--table.min-size", "400")
    run = start(processes, run_dir, "--agent", "r2d2", *TINY, *flags)
    run.until(lambda: last(run_dir, "updates") > 200, "updates", 90)
    run.until(lambda: list((run_dir / "replay").glob("index*")) and last(run_dir, "replay/items") > 600, "a snapshot")
    [learner] = processes.alive("learner")
    learner.kill()
    assert run.wait(60) == 137, run.said
    held, updates = last(run_dir, "replay/items"), load_params(run_dir).update
    resumed = start(processes, run_dir, "--resume", "--steps", str(int(last(run_dir, "env_steps")) + 3000))
    assert resumed.wait(120) == 0, resumed.said
    restored = int(re.search(r"([\d,]+) unrolls are back in the replay", resumed.out).group(1).replace(",", ""))
    assert 0.5 * held < restored <= 5000
    assert f"resumed at update {updates:,}" in resumed.out
    assert last(run_dir, "replay/items") > restored  # and goes on from there
    assert last(run_dir, "updates") > updates


@pytest.mark.external
def test_a_server_that_is_not_there_ends_the_run_with_its_address(processes, tmp_path):
    run_dir = tmp_path / "run"
    run = start(
        processes, run_dir, "--agent", "r2d2", "--replay", "reverb://localhost:9", *TINY, "--table.give-up-s", "3"
    )
    assert run.wait(60) == 2, run.said
    assert "localhost:9" in run.err
    assert "Traceback" not in run.err

"""Whole runs over real sockets and processes: they learn, repeat, resume, and can be read without seedx."""

import itertools
import json
import re
import subprocess
import sys
from pathlib import Path

import documented
import numpy as np
import pytest
from bits import assert_bit_equal
from processes import Processes

from seedx.checkpoint import load_params
from seedx.config_file import from_json
from seedx.runlog import SUMMARY_KEYS, read_rows


@pytest.fixture
def processes(tmp_path):
    with Processes(tmp_path) as started:
        yield started


def learn(processes: Processes, run_dir: Path, *flags: str, timeout_s: float = 110.0) -> dict:
    """Runs launch/local.py to its end; the summary."""
    run = processes.launch("local.py", "--run-dir", str(run_dir), "--metrics.no-tensorboard", *flags)
    assert run.wait(timeout_s) == 0, run.said
    processes.wait_until_gone()
    return json.loads((run_dir / "summary.json").read_text())


def evaluated(processes: Processes, run_dir: Path, episodes: int) -> float:
    """Mean greedy return that launch/evaluate.py prints."""
    run = processes.launch("evaluate.py", str(run_dir), "--episodes", str(episodes))
    assert run.wait() == 0, run.said
    found = re.fullmatch(rf"return (\S+) \+- (\S+) over {episodes} episodes\n", run.out)
    assert found, run.said
    return float(found.group(1))


def test_cartpole_is_solved_with_the_default_flags_and_the_checkpoint_evaluates(processes, tmp_path):
    run_dir = tmp_path / "run"
    summary = learn(processes, run_dir)
    assert summary["exit"] == "solved"
    assert summary["return_mean"] >= 475
    assert summary["return_episodes"] == 100
    assert set(SUMMARY_KEYS) <= set(summary)
    # Learned, and not by luck: a random policy has 22. The mode of a policy may fall short of its samples' 475.
    assert evaluated(processes, run_dir, 20) >= 150
    assert json.loads((run_dir / "evaluation.json").read_text())["episodes"] == 20
    for name in (
        "config.json",
        "metrics.jsonl",
        "curve.png",
        "logs/learner.log",
        "logs/actor-0.log",
        "logs/actor-1.log",
    ):
        assert (run_dir / name).exists(), name
    rows = read_rows(run_dir / "metrics.jsonl")
    assert {name for row in rows for name in row} <= documented.metrics()
    last = rows[-1]
    assert last["batcher/compilations"] == 0
    assert 0 <= last["lag_updates_mean"] < 10


@pytest.mark.slow
def test_plain_orbax_reads_the_params_as_nested_dicts(processes, tmp_path):
    run_dir = tmp_path / "run"
    learn(processes, run_dir, "--steps", "2000", "--num-actors", "1")
    checkpoint = load_params(run_dir)
    script = f"""
import sys, numpy as np, orbax.checkpoint as ocp
params = ocp.StandardCheckpointer().restore({str(run_dir / "checkpoints" / str(checkpoint.update) / "params")!r})
assert not any(name.startswith("seedx") for name in sys.modules)
print(sorted(params), params["policy"]["kernel"].shape, float(np.abs(params["policy"]["kernel"]).sum()))
"""
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True).stdout
    kernel = checkpoint.params["policy"]["kernel"]
    assert out.strip() == f"{sorted(checkpoint.params)} {kernel.shape} {float(np.abs(kernel).sum())}"


@pytest.mark.slow
def test_deterministic_runs_give_equal_parameters_bit_for_bit(processes, tmp_path):
    flags = ("--deterministic", "--steps", "6000", "--stop-at-return", "None", "--envs-per-actor", "8")
    for name in ("a", "b"):
        learn(processes, tmp_path / name, *flags)
    first, second = load_params(tmp_path / "a"), load_params(tmp_path / "b")
    assert first.update == second.update > 10
    assert first.metadata["env_steps"] == second.metadata["env_steps"]
    assert_bit_equal(first.params, second.params)
    learn(processes, tmp_path / "c", *flags, "--seed", "2")
    with pytest.raises(AssertionError):
        assert_bit_equal(first.params, load_params(tmp_path / "c").params)


def test_without_actor_processes_the_learner_steps_the_environments_itself(processes, tmp_path):
    summary = learn(processes, tmp_path / "run", "--num-actors", "0", "--steps", "3000", "--env", "catch")
    assert summary["exit"] == "steps"
    assert summary["env_steps"] >= 3000
    assert not (tmp_path / "run" / "logs" / "actor-0.log").exists()


@pytest.mark.slow
def test_an_evaluation_actor_plays_greedily_beside_training(processes, tmp_path):
    run_dir = tmp_path / "run"
    learn(processes, run_dir, "--eval-actors", "1", "--num-actors", "1", "--steps", "60000", "--stop-at-return", "None")
    last = read_rows(run_dir / "metrics.jsonl")[-1]
    assert last["eval_return_episodes"] > 0
    assert last["eval_return_mean"] > 0


@pytest.mark.slow
def test_a_resumed_run_goes_on_where_it_was(processes, tmp_path):
    run_dir = tmp_path / "run"
    # All episodes are equally long, so that the first hundred to end are any hundred; and the run is not stopped at a
    # lucky moment, as --stop-at-return does.
    flags = ("--env", "catch", "--learner.learning-rate-steps", "1000000", "--learner.learning-rate-end", "0.0001")
    flags = (*flags, "--stop-at-return", "None", "--steps", "150000", "--metrics.interval-s", "0.2")
    before = learn(processes, run_dir, *flags)
    saved, stopped = load_params(run_dir).update, len(read_rows(run_dir / "metrics.jsonl"))
    more = str(int(before["env_steps"] + 30_000))
    after = learn(processes, run_dir, "--resume", "--steps", more)
    rows = read_rows(run_dir / "metrics.jsonl")
    resumed = list(itertools.pairwise(rows[stopped - 1 :]))  # each with the row before
    assert resumed[0][1]["updates"] >= saved
    assert all(a["env_steps"] <= b["env_steps"] for a, b in itertools.pairwise(rows))
    assert after["updates"] > before["updates"] >= saved
    assert after["seconds"] > before["seconds"]

    # The next 100 episodes are as good as those before.
    episodes = np.array([row["episodes"] - former["episodes"] for former, row in resumed])
    returns = np.array([row.get("return_interval_mean", 0.0) for _, row in resumed])
    next_hundred = np.cumsum(episodes) - episodes < 100
    assert episodes.sum() > 100
    assert np.average(returns[next_hundred], weights=episodes[next_hundred]) >= 0.9 * before["return_mean"]

    # The learning rate goes on along its line: a row holds the mean over the updates since the row before.
    config = from_json((run_dir / "config.json").read_text()).learner
    steps, rates = [0.0, config.learning_rate_steps], [config.learning_rate, config.learning_rate_end]
    applied = [(former, row) for former, row in resumed if "learner/learning_rate" in row]
    assert applied
    for former, row in applied:
        latest = row["env_steps"] + config.batch_size * config.unroll_length  # counted just after
        lowest, highest = np.interp([latest, former["env_steps"]], steps, rates)
        assert lowest * 0.9999 <= row["learner/learning_rate"] <= highest * 1.0001


@pytest.mark.slow
def test_catch_is_learned_by_a_convolutional_network(processes, tmp_path):
    # Ends with small updates, not at a lucky moment of large ones, as --stop-at-return may.
    flags = ("--learner.learning-rate-steps", "150000", "--learner.learning-rate-end", "0.00001")
    flags = (*flags, "--stop-at-return", "None", "--steps", "150000")
    learn(processes, tmp_path / "run", "--env", "catch", "--network.torso", "shallow", *flags, timeout_s=400)
    assert evaluated(processes, tmp_path / "run", 50) >= 0.9


@pytest.mark.slow
def test_memory_is_learned_with_an_lstm_and_not_without(processes, tmp_path):
    summary = learn(processes, tmp_path / "lstm", "--env", "memory", timeout_s=600)
    assert summary["exit"] == "solved"
    steps = str(summary["env_steps"])
    blind = learn(
        processes, tmp_path / "mlp", "--env", "memory", "--network.lstm", "0", "--steps", steps, timeout_s=600
    )
    assert blind["exit"] == "steps"
    assert blind["return_mean"] < 0.5


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_pendulum_is_learned_with_continuous_actions(processes, tmp_path):
    summary = learn(processes, tmp_path / "run", "--env", "Pendulum-v1", timeout_s=720)
    assert summary["exit"] == "solved"
    assert evaluated(processes, tmp_path / "run", 100) >= -300  # a random policy: -1,250


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_minigrid_is_learned_from_a_dict_of_grid_direction_and_text(processes, tmp_path):
    summary = learn(processes, tmp_path / "run", "--env", "MiniGrid-DoorKey-5x5-v0", timeout_s=720)
    assert summary["exit"] == "solved"
    assert evaluated(processes, tmp_path / "run", 100) >= 0.9  # a random policy: 0.03

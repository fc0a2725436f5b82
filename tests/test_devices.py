"""Whole runs on several simulated devices: acting and learning share them, or each has its own."""

import json

import pytest
from processes import Processes

from seedx.runlog import read_rows

FLAGS = ("--env", "catch", "--metrics.no-tensorboard", "--steps", "600000", "--stop-at-return", "0.8")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_devices", "flags"),
    [
        (8, ("--learner.devices", "8")),  # launched on all of them by two threads
        (4, ("--learner.devices", "2", "--learner.inference-devices", "2")),
        (3, ("--learner.devices", "2", "--learner.inference-devices", "1", "--network.lstm", "32")),
    ],
)
def test_a_run_on_several_devices_learns_and_its_checkpoint_evaluates_on_one(tmp_path, num_devices, flags):
    run_dir = tmp_path / "run"
    with Processes(tmp_path) as processes:
        env = {"XLA_FLAGS": f"--xla_force_host_platform_device_count={num_devices}"}
        run = processes.launch("local.py", "--run-dir", str(run_dir), *FLAGS, *flags, env=env)
        assert run.wait(300) == 0, run.said
        summary = json.loads((run_dir / "summary.json").read_text())
        assert summary["exit"] == "solved"
        rows = read_rows(run_dir / "metrics.jsonl")
        assert rows[-1]["batcher/compilations"] == 0
        evaluation = processes.launch("evaluate.py", str(run_dir), "--episodes", "50")
        assert evaluation.wait() == 0, evaluation.said
        assert float(evaluation.out.split()[1]) >= 0.4

"""Faults of the learner's process and of whole runs: signals, failures, checkpoints, disks."""

import contextlib
import dataclasses
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from processes import ROOT, TINY, Processes, is_served, last, make_run

from seedx import learner_role, rundir
from seedx.checkpoint import load_params
from seedx.config import Config
from seedx.config_file import read_config
from seedx.envs.make import make_env
from seedx.hosts import Hosts
from seedx.inference.client import Connection
from seedx.inference.frontend import FrontEnd
from seedx.inference.streams import Streams
from seedx.lifeline import HostLostError
from seedx.session import Session
from seedx.threads import Crew


@pytest.fixture
def processes(tmp_path):
    with Processes(tmp_path) as processes:
        yield processes


def checkpoints(run_dir: Path) -> list[int]:
    return sorted(int(path.name) for path in (run_dir / "checkpoints").glob("*") if path.name.isdigit())


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run that nobody watched, with several checkpoints; copy it before you change it."""
    directory = tmp_path_factory.mktemp("finished")
    read, write = os.pipe()
    os.close(read)
    with Processes(directory) as processes:
        flags = ("--steps", "600", "--checkpoint.interval-s", "0.01", "--table.max-size", "4")
        run = processes.local(directory / "run", *flags, stdout=write)
        os.close(write)
        assert run.wait() == 0, run.said
        assert run.err == ""
        assert not processes.alive()
    return directory / "run"


def test_a_run_goes_on_when_nobody_reads_what_it_prints(finished):
    assert len(checkpoints(finished)) >= 2
    assert json.loads((finished / "summary.json").read_text())["exit"] == "steps"
    assert "Traceback" not in (finished / "logs/learner.log").read_text()


def damage(run_dir: Path, update: int) -> None:
    """Cuts off every large file of a checkpoint, as a full disk or a power failure does."""
    for path in (run_dir / "checkpoints" / str(update)).rglob("*"):
        if path.is_file() and path.stat().st_size > 100 and path.name != "checksums.json":
            os.truncate(path, path.stat().st_size // 2)


@pytest.mark.slow
def test_actors_wait_for_a_learner_that_was_killed_and_training_goes_on_from_the_checkpoint(tmp_path, processes):
    run_dir, address = tmp_path / "run", f"unix:{tmp_path}/socket"
    counting = ("--env", "faulty_envs:make_counting", "--agent", "faulty_agents:checking")
    flags = (*counting, "--checkpoint.interval-s", "0.2")
    make_run(run_dir, *flags)
    actor = processes.role("actor", run_dir, address, "--actor-id", "0")  # it may start before the learner
    learner = processes.role("learner", run_dir, address)
    learner.until(lambda: max(checkpoints(run_dir), default=0) > 30, "a checkpoint")
    learner.popen.kill()  # leaves a stale socket behind
    learner.wait()
    before = load_params(run_dir)
    rows_before = (run_dir / "metrics.jsonl").read_text().count("\n")
    steps = before.metadata["env_steps"] + 500
    make_run(run_dir, *flags, "--resume", "--steps", str(steps))

    again = processes.role("learner", run_dir, address, "--resume")
    assert again.wait() == 0, again.said
    assert f"resumed at update {before.update:,}" in again.out
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert rows[rows_before]["updates"] >= before.update
    # Unrolls of version 0 would lag by more than 30 updates.
    assert max(row.get("learner/lag_updates_max", 0) for row in rows[rows_before:]) < 20
    assert rows[-1]["env_steps"] >= steps
    assert {row["learner/broken"] for row in rows if "learner/broken" in row} == {0.0}
    assert json.loads((run_dir / "summary.json").read_text())["exit"] == "steps"
    assert actor.wait() == 0, actor.said  # it was told that training is finished
    assert "is lost" in actor.err
    assert "waiting for it" in actor.err
    assert "Traceback" not in actor.err


def test_the_first_actions_of_a_resumed_run_are_those_of_the_checkpoint(tmp_path, processes, finished):
    run_dir, address = tmp_path / "run", f"unix:{tmp_path}/socket"
    shutil.copytree(finished, run_dir)
    make_run(run_dir, "--resume", "--steps", "1000000")
    config = read_config(run_dir)
    learner = processes.role("learner", run_dir, address, "--resume")
    learner.until(lambda: is_served(address), "a server")
    env = make_env(config, 2, np.arange(2))
    spec = dataclasses.replace(env.spec, env=config.env)
    connection = Connection(
        address, config.inference, actor_id=0, spec=spec, groups=2, envs_per_group=2, evaluation=False, timeout_s=60.0
    )
    with contextlib.closing(connection):
        stream = connection.open_stream(0)
        stream.send(env.reset())
        stream.receive()
    assert stream.version == max(checkpoints(run_dir)) > 0


def test_a_damaged_checkpoint_is_passed_over_and_both_resume_and_evaluate_say_so(tmp_path, processes, finished):
    run_dir = tmp_path / "run"
    shutil.copytree(finished, run_dir)
    *_, good, newest = checkpoints(run_dir)
    damage(run_dir, newest)
    config = (run_dir / "config.json").read_text()
    (run_dir / "config.json").write_text("{}")  # evaluation goes by the checkpoint
    evaluate = processes.launch("evaluate.py", str(run_dir), "--episodes", "2")
    assert evaluate.wait() == 0, evaluate.said
    assert f"{newest} is damaged" in evaluate.err
    assert json.loads((run_dir / "evaluation.json").read_text())["update"] == good
    (run_dir / "config.json").write_text(config)
    resumed = processes.local(run_dir, "--resume", "--steps", "800")
    assert resumed.wait() == 0, resumed.said
    assert f"{newest} is damaged" in resumed.out
    assert f"resumed at update {good:,}" in resumed.out
    assert last(run_dir, "env_steps") >= 800
    assert list((run_dir / "checkpoints").glob(f"{newest}.damaged-*"))


@pytest.mark.slow
def test_without_a_good_checkpoint_resume_and_evaluate_end_with_the_reasons(tmp_path, processes, finished):
    run_dir = tmp_path / "run"
    shutil.copytree(finished, run_dir)
    for update in checkpoints(run_dir):
        damage(run_dir, update)
    for process in (
        processes.launch("evaluate.py", str(run_dir)),
        processes.local(run_dir, "--resume", "--steps", "800"),
    ):
        assert process.wait() == 2, process.said
        assert "every checkpoint in" in process.err
        assert "Start in another --run-dir" in process.err
        assert "Traceback" not in process.err
    assert not processes.alive()


@pytest.mark.slow
def test_resume_with_another_network_names_the_arrays(tmp_path, processes, finished):
    run_dir = tmp_path / "run"
    shutil.copytree(finished, run_dir)
    config = (run_dir / "config.json").read_text()
    run = processes.local(run_dir, "--resume", "--steps", "800", "--network.hidden", "16")
    assert run.wait() == 2, run.said
    assert "float32[50, 8]" in run.err
    assert "float32[50, 16]" in run.err
    assert (run_dir / "config.json").read_text() == config
    assert "Traceback" not in run.err


@pytest.mark.slow
def test_closed_streams_and_readers_that_go_away_change_nothing(tmp_path, processes, finished):
    local = (sys.executable, str(ROOT / "launch" / "local.py"), *TINY, "--run-dir", str(tmp_path / "run"))
    run = processes.start("bash", "-c", 'exec "$@" >&- 2>&-', "bash", *local, "--steps", "300")
    assert run.wait() == 0, (tmp_path / "run/logs/learner.log").read_text()
    assert load_params(tmp_path / "run").update > 0
    shutil.copytree(finished, tmp_path / "copy")
    evaluate = (sys.executable, str(ROOT / "launch" / "evaluate.py"), str(tmp_path / "copy"), "--episodes", "2")
    piped = processes.start("bash", "-c", 'set -o pipefail; "$@" | true', "bash", *evaluate)
    assert piped.wait() == 0, piped.said
    assert piped.err == ""
    assert (tmp_path / "copy/evaluation.json").exists()


def test_a_second_start_in_a_finished_run_is_refused(finished, processes):
    run = processes.local(finished)
    assert run.wait() == 2
    assert "already holds checkpoints" in run.err


@pytest.mark.parametrize("delay_s", [0.3, 1.5, None])
def test_ctrl_c_at_any_phase(tmp_path, processes, delay_s):
    code = end_by_signal(tmp_path / "run", processes, signal.SIGINT, delay_s)
    # Python's own start-up has no handlers.
    assert code in ([130] if delay_s is None else [130, -signal.SIGINT])


@pytest.mark.slow
def test_a_closed_terminal_ends_a_run_with_a_checkpoint(tmp_path, processes):
    assert end_by_signal(tmp_path / "run", processes, signal.SIGHUP, None) == 143
    assert (tmp_path / "run/summary.json").exists()


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_at_any_phase(tmp_path, processes, number):
    for i, delay_s in enumerate([0.1, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, None]):
        run_dir = tmp_path / f"run-{i}"
        code = end_by_signal(run_dir, processes, number, delay_s)
        assert code in ([128 + number] if delay_s is None else [128 + number, -number])
    updates = last(run_dir, "updates")
    resumed = processes.local(run_dir, "--resume", "--steps", str(int(last(run_dir, "env_steps")) + 200))
    assert resumed.wait() == 0, resumed.said
    assert last(run_dir, "updates") > updates


def end_by_signal(run_dir: Path, processes: Processes, number: int, delay_s: float | None) -> int:
    """Starts a run and sends everyone in its foreground process group a signal, `None`: while it saves checkpoints.

    Checks that all ended cleanly and nothing that was saved is lost; returns the exit code.
    """
    run = processes.local(run_dir, "--checkpoint.interval-s", "0.01")
    if delay_s is None:
        run.until(lambda: len(checkpoints(run_dir)) >= 2, "checkpoints")
    else:
        time.sleep(delay_s)
    updates = last(run_dir, "updates")
    run.interrupt(number)
    told = signal.SIGINT if number == signal.SIGINT else signal.SIGTERM
    code = run.wait()
    assert not processes.alive()
    assert run.err == "" or not run_dir.exists()
    assert "Traceback" not in "".join(path.read_text() for path in run_dir.glob("logs/*.log"))
    if updates:
        assert max(checkpoints(run_dir)) >= updates
        assert json.loads((run_dir / "summary.json").read_text())["exit"] == told.name
        assert load_params(run_dir).update == max(checkpoints(run_dir))
    return code


@pytest.mark.slow
def test_a_learner_that_hangs_is_ended_within_ten_seconds(tmp_path, processes):
    run_dir = tmp_path / "run"
    run = processes.local(run_dir, "--checkpoint.interval-s", "0.1")
    run.until(lambda: len(checkpoints(run_dir)) >= 2, "checkpoints")
    [learner] = processes.alive("learner")
    learner.suspend()
    started = time.monotonic()
    run.send(signal.SIGTERM)
    assert run.wait() == 143, run.said
    assert time.monotonic() - started > 9
    assert "learner is killed 10 s after signal 15" in run.err
    assert not processes.alive()
    assert load_params(run_dir).update == max(checkpoints(run_dir))


def test_a_learner_thread_that_hangs_does_not_keep_the_process(tmp_path, monkeypatch, capsys):
    """The learner's thread never finishes; while it wrote a checkpoint it had more time, and its launcher knew."""
    monkeypatch.setattr(learner_role, "_STOP_GRACE_S", 0.3)
    crew, config = Crew(), Config()
    front_end = FrontEnd(f"unix:{tmp_path}/learner.sock", config.inference, Streams(1, 1), crew.fail)
    front_end.start()
    session = Session(config, tmp_path, False, crew, front_end, [], Hosts())
    session.learning, session.saving_since = True, time.monotonic()
    (tmp_path / "checkpoints").mkdir()
    before = rundir.progress(tmp_path)
    started = time.monotonic()
    threading.Timer(0.6, lambda: setattr(session, "saving_since", -math.inf)).start()
    code = learner_role._wait(crew, session, threading.Event(), [signal.SIGTERM], tmp_path)
    front_end.stop(finished=True)
    assert code == 143
    assert time.monotonic() - started >= 0.6
    assert rundir.progress(tmp_path) > before
    assert "has hung for 0.3 s and is ended as it is" in capsys.readouterr().out


@pytest.mark.parametrize("lost", [False, True])
def test_an_update_that_waits_for_other_hosts_is_cut_short_only_if_one_is_lost(tmp_path, monkeypatch, capsys, lost):
    monkeypatch.setattr(learner_role, "_STOP_GRACE_S", 0.3)
    crew, done, signals = Crew(), threading.Event(), [signal.SIGTERM]
    front_end = FrontEnd(f"unix:{tmp_path}/learner.sock", Config().inference, Streams(1, 1), crew.fail)
    front_end.start()
    session = Session(Config(), tmp_path, False, crew, front_end, signals, Hosts())
    session.learning, session._updating_since = True, time.monotonic()
    (tmp_path / "checkpoints").mkdir()
    if lost:
        crew.fail(HostLostError("host 1 of 2 is lost."))
    else:
        threading.Timer(1.5, done.set).start()  # the update is over
    code = learner_role._wait(crew, session, done, signals, tmp_path)
    front_end.stop(finished=True)
    said = capsys.readouterr()
    assert code == (1 if lost else 143)
    assert ("has hung" in said.out) == lost
    assert ("host 1 of 2 is lost" in said.err) == lost


def test_nothing_survives_a_supervisor_that_is_killed(tmp_path, processes):
    run = processes.local(tmp_path / "run")
    run.until(lambda: last(tmp_path / "run", "updates"), "an update")
    assert len(processes.alive()) == 3
    run.popen.kill()
    processes.wait_until_gone()


@pytest.mark.slow
def test_a_mistake_in_the_loss_ends_the_run_with_its_traceback(tmp_path, processes):
    run = processes.local(tmp_path / "run", "--agent", "faulty_agents:raising")
    assert run.wait() == 1
    assert "TypeError: a mistake in the loss" in run.err
    assert 'raise TypeError("a mistake in the loss")' in run.err
    assert "the run stops. There is no checkpoint yet." in run.err
    assert not processes.alive()


@pytest.mark.slow
def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_the_weights_before(tmp_path, processes):
    run_dir = tmp_path / "run"
    flags = ("--env", "faulty_envs:make_counting", "--agent", "faulty_agents:diverging", "--checkpoint.interval-s", "0")
    run = processes.local(run_dir, *flags)
    assert run.wait() == 1
    assert "NonFiniteError: update" in run.err
    assert "--resume" in run.err
    [batch] = run_dir.glob("non_finite_batch_*.npz")
    assert batch.stem.endswith(f"_{checkpoints(run_dir)[-1]}")  # saved although `interval_s` is 0
    assert str(batch) in run.err
    assert json.loads((run_dir / "summary.json").read_text())["exit"] == "failed"
    assert "failed, see" in run.out
    assert not processes.alive()


@pytest.mark.slow
def test_a_file_that_cannot_be_written_any_more_ends_the_run_with_a_checkpoint(tmp_path, processes):
    """No file may grow beyond 32 KiB: the same error path as a full disk, and needs no privileges."""
    run_dir = tmp_path / "run"
    limited = ("bash", "-c", 'ulimit -f 32 && exec "$@"', "bash")
    local = (sys.executable, str(ROOT / "launch" / "local.py"), *TINY, "--run-dir", str(run_dir))
    for flags in (("--metrics.tensorboard",), ()):
        shutil.rmtree(run_dir, ignore_errors=True)
        run = processes.start(*limited, *local, "--metrics.interval-s", "0.01", *flags)
        assert run.wait() == 1, run.said
        assert "File too large" in run.err
        assert "--resume" in run.err
        assert load_params(run_dir).update > 0
        assert not processes.alive()


# A file system of 3 MB that only these processes see, and a copy of it when they have ended.
SMALL_DISK = ("unshare", "--user", "--map-root-user", "--mount", "bash", "-c")
MOUNT = 'mount -t tmpfs -o size=3m tmpfs "$0"'
RUN_AND_COPY = MOUNT + ' && { "$@"; code=$?; cp -r "$0" "$0-after"; exit $code; }'


@pytest.mark.slow
def test_a_full_disk_ends_the_run_and_the_last_checkpoint_is_good(tmp_path, processes):
    run_dir, after = tmp_path / "run", tmp_path / "run-after"
    run_dir.mkdir()
    if shutil.which("unshare") is None or subprocess.run((*SMALL_DISK, MOUNT, str(run_dir)), check=False).returncode:
        assert "tmpfs" not in os.environ.get("SEEDX_REQUIRE", "").split(), "a user namespace may not mount a tmpfs"
        pytest.skip("a user namespace may not mount a tmpfs")
    local = (sys.executable, str(ROOT / "launch" / "local.py"), *TINY, "--run-dir", str(run_dir))
    flags = ("--checkpoint.interval-s", "0.05", "--checkpoint.keep", "1000")
    run = processes.start(*SMALL_DISK, RUN_AND_COPY, str(run_dir), *local, *flags)
    assert run.wait() == 1, run.said
    assert "No space left on device" in run.said  # the log may be on the disk that is full
    assert f"the run stops. Continue it with --resume --run-dir {run_dir}" in run.err
    assert not processes.alive()
    newest = max(checkpoints(after))
    assert load_params(after).update == newest
    resumed = processes.local(after, "--resume", "--steps", str(int(last(after, "env_steps")) + 200))
    assert resumed.wait() == 0, resumed.said
    assert f"resumed at update {newest:,}" in resumed.out

"""launch/pod.py: which host this is, and whole runs of two "hosts" on this machine."""

import importlib.util
import json
import signal
import socket
import sys

import pytest
from processes import QUICK, ROOT, TINY, Processes, free_port, last

from seedx.checks import ConfigError
from seedx.config import Config
from seedx.hosts import Hosts
from seedx.lifeline import SILENT_S
from seedx.program import make_program
from seedx.rundir import newest_update

LOST_S = SILENT_S + 60  # within which the others have ended; the rest is for a busy machine


@pytest.fixture
def processes(tmp_path):
    with Processes(tmp_path) as started:
        yield started


def load_pod():
    spec = importlib.util.spec_from_file_location("launch_pod", ROOT / "launch" / "pod.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("names", "env", "index"),
    [
        (["203.0.113.1", socket.gethostname()], {"SLURM_PROCID": "0"}, 1),
        (["127.0.0.1:9000", "203.0.113.1"], {}, 0),
        (["203.0.113.1", "203.0.113.2", "203.0.113.3"], {"SLURM_PROCID": "2"}, 2),
        (["localhost:1", "127.0.0.1:2"], {"TPU_WORKER_ID": "1"}, 1),
        (["203.0.113.1", "203.0.113.2"], {"JOB_COMPLETION_INDEX": "1"}, 1),
    ],
)
def test_a_host_finds_itself_by_name_or_address_and_then_by_its_scheduler(names, env, index):
    assert load_pod().find_index(names, env) == index


def test_a_host_that_cannot_tell_which_it_is_says_so():
    pod = load_pod()
    with pytest.raises(ConfigError, match=r"is none of --hosts 203.0.113.1.*--host-index"):
        pod.find_index(["203.0.113.1"], {})
    with pytest.raises(ConfigError, match=r"is 2 of --hosts"):
        pod.find_index(["localhost:1", "localhost:2"], {})


@pytest.mark.parametrize(
    ("name", "pair"), [("h", ("h", 8476)), ("h:90", ("h", 90)), ("[::1]", ("[::1]", 8476)), ("[::1]:9", ("[::1]", 9))]
)
def test_ports(name, pair):
    assert load_pod().split_port(name) == pair


def test_actors_are_numbered_through_all_hosts_and_learners_are_told_of_each_other():
    config = Config(num_actors=2, eval_actors=1)
    programs = [make_program(config, "run", "unix:/s", hosts=Hosts("h0:1", 3, i)) for i in range(3)]
    names = [[role.name for role in program.roles[1:]] for program in programs]
    assert names == [
        ["actor-0", "actor-1", "eval-actor-6"],
        ["actor-2", "actor-3", "eval-actor-7"],
        ["actor-4", "actor-5", "eval-actor-8"],
    ]
    command = programs[2].roles[0].command
    assert command[-6:] == ("--coordinator", "h0:1", "--num-hosts", "3", "--host-index", "2")
    assert "--coordinator" not in make_program(config, "run", "unix:/s").roles[0].command


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ((), "--hosts must name all hosts"),
        (("--hosts", "a,b", "--host-index", "2"), "host index (2) must lie in 0 .. 1"),
        (("--hosts", "a,b", "--host-index", "0", "--agent", "grpo"), "an LLM run has one host"),
    ],
)
def test_wrong_flags_are_refused_with_code_2(capfd, tmp_path, monkeypatch, flags, message):
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    assert load_pod().main(list(flags)) == 2
    assert message in capfd.readouterr().err


# ---- whole runs


def start_pods(processes, run_dir, *flags, indices=(0, 1)):
    """`launch/pod.py` of two hosts that share a directory."""
    names = f"localhost:{free_port()},localhost"
    return [
        processes.launch(
            "pod.py", *flags, "--hosts", names, "--host-index", str(i), "--run-dir", str(run_dir), env=QUICK
        )
        for i in indices
    ]


def until_learning(pods, run_dir):
    pods[0].until(lambda: last(run_dir, "updates") > 5, "updates")


def learner_of(processes, index):
    [found] = processes.alive("learner", "--host-index", str(index))
    return found


def test_two_hosts_learn_catch(processes, tmp_path):
    run_dir = tmp_path / "run"
    flags = ("--env", "catch", "--num-actors", "1", "--stop-at-return", "0.5", "--metrics.no-tensorboard")
    pods = start_pods(processes, run_dir, *flags)
    assert [pod.wait() for pod in pods] == [0, 0], [pod.said for pod in pods]
    processes.wait_until_gone()
    ends = [json.loads((place / "summary.json").read_text()) for place in (run_dir, run_dir / "host-1")]
    assert [end["exit"] for end in ends] == ["solved", "solved"]
    assert ends[0]["return_mean"] == ends[1]["return_mean"] >= 0.5  # of both together; a random policy has -0.6
    assert ends[0]["updates"] == ends[1]["updates"]
    assert (run_dir / "checkpoints" / str(ends[0]["updates"])).exists()
    assert (run_dir / "host-1" / "logs" / "actor-1.log").exists()


def test_a_signal_to_one_host_ends_both_with_its_code(processes, tmp_path):
    pods = start_pods(processes, tmp_path / "run", *TINY)
    until_learning(pods, tmp_path / "run")
    pods[1].send(signal.SIGTERM)
    assert [pod.wait() for pod in pods] == [143, 143], [pod.said for pod in pods]
    assert list((tmp_path / "run" / "checkpoints").iterdir())
    processes.wait_until_gone()


@pytest.mark.slow
def test_the_same_line_begins_a_run_and_goes_on_after_a_preemption_and_after_a_lost_host(processes, tmp_path):
    run_dir = tmp_path / "run"
    flags = (*TINY, "--resume", "--steps", "3000", "--checkpoint.interval-s", "0.5")
    pods = start_pods(processes, run_dir, *flags)
    until_learning(pods, run_dir)
    assert all("found no run in" in pod.err for pod in pods)
    pods[1].send(signal.SIGTERM)  # the notice to one host
    assert [pod.wait() for pod in pods] == [143, 143], [pod.said for pod in pods]
    preempted = newest_update(run_dir)
    assert preempted == json.loads((run_dir / "summary.json").read_text())["updates"]  # nothing is lost

    pods = start_pods(processes, run_dir, *flags)
    pods[0].until(lambda: newest_update(run_dir) > preempted, "a further checkpoint")
    assert f"resumed at update {preempted:,}" in pods[0].out
    learner_of(processes, 1).kill()
    assert pods[0].wait(LOST_S) == 1, pods[0].said
    assert pods[1].wait() == 137
    lost = newest_update(run_dir)

    pods = start_pods(processes, run_dir, *flags)
    assert [pod.wait() for pod in pods] == [0, 0], [pod.said for pod in pods]
    assert f"resumed at update {lost:,}" in pods[0].out
    ends = [json.loads((place / "summary.json").read_text()) for place in (run_dir, run_dir / "host-1")]
    assert [end["exit"] for end in ends] == ["steps", "steps"]
    assert ends[0]["updates"] == ends[1]["updates"] > lost > preempted > 0
    assert ends[0]["env_steps"] >= 3000
    assert newest_update(run_dir) == ends[0]["updates"]
    processes.wait_until_gone()


@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_killed_learner_ends_the_other_host_and_is_named(processes, tmp_path, victim):
    pods = start_pods(processes, tmp_path / "run", *TINY)
    until_learning(pods, tmp_path / "run")
    learner_of(processes, victim).kill()
    left = pods[1 - victim]
    code = left.wait(LOST_S)
    if victim == 0 and code == 134:  # jax may hear of it first, and ends the process
        assert "jax ends a learner like that when host 0 is lost" in left.err
    else:
        assert code == 1, left.said
        assert f"learner: host {victim} of 2 is lost: its connection is closed." in left.err
    assert pods[victim].wait() == 137
    processes.wait_until_gone()


def test_a_host_that_never_comes_is_named(processes, tmp_path):
    (pod,) = start_pods(processes, tmp_path / "run", *TINY, "--learner.host-wait-s", "2", indices=(0,))
    assert pod.wait() == 1
    assert "host 1 of 2 did not come to localhost:" in pod.err
    processes.wait_until_gone()

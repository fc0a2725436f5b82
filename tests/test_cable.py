"""Runs on two hosts with a network of their own, which are network namespaces of this machine; the cable is cut."""

import json
import signal

import pytest
from namespaces import ADDRESSES
from processes import QUICK, TINY, Processes, last, make_run

from seedx.lifeline import SILENT_S
from seedx.runlog import read_rows

pytestmark = pytest.mark.external
LOST_S = SILENT_S + 60  # within which the others have ended; the rest is for a busy machine


@pytest.fixture
def processes(tmp_path):
    with Processes(tmp_path) as started:
        yield started


def start_pods(processes, cable, *flags):
    """`launch/pod.py` on both hosts, which share no directory: the same line, but for that."""
    flags = (*flags, "--hosts", ",".join(ADDRESSES), "--run-dir")
    places = [processes.directory / f"disk-{i}" for i in (0, 1)]
    return [
        processes.launch("pod.py", *flags, str(place), inside=cable.inside(i), env=QUICK)
        for i, place in enumerate(places)
    ], [places[0], places[1] / "host-1"]


def test_two_hosts_learn_catch(processes, cable):
    flags = ("--env", "catch", "--num-actors", "1", "--stop-at-return", "0.5", "--metrics.no-tensorboard")
    pods, run_dirs = start_pods(processes, cable, *flags)
    assert [pod.wait() for pod in pods] == [0, 0], [pod.said for pod in pods]
    ends = [json.loads((run_dir / "summary.json").read_text()) for run_dir in run_dirs]
    assert [end["exit"] for end in ends] == ["solved", "solved"]
    assert ends[0]["return_mean"] == ends[1]["return_mean"] >= 0.5  # of both together; a random policy has -0.6
    assert ends[0]["updates"] == ends[1]["updates"]
    assert [(run_dir / "checkpoints" / str(ends[0]["updates"])).exists() for run_dir in run_dirs] == [True, False]
    processes.wait_until_gone()


def test_hosts_whose_cable_is_cut_end_and_name_each_other(processes, cable):
    pods, run_dirs = start_pods(processes, cable, *TINY)
    for pod, run_dir in zip(pods, run_dirs, strict=True):
        pod.until(lambda run_dir=run_dir: last(run_dir, "updates") > 5, "updates")
    cable.cut()
    assert [pod.wait(LOST_S) for pod in pods] == [1, 1], [pod.said for pod in pods]
    for pod, other in zip(pods, (1, 0), strict=True):
        assert f"learner: host {other} of 2 is lost: it has been silent for {SILENT_S:g} s" in pod.err
        assert "Traceback" not in pod.err
    processes.wait_until_gone()


def test_an_actor_that_is_cut_off_comes_back_and_no_step_counts_twice(processes, cable):
    run_dir = processes.directory / "run"
    (processes.directory / "token").write_text("s3cret\n")
    played = ("--env", "faulty_envs:make_slow", "--agent", "faulty_agents:once", "--num-actors", "2")
    make_run(run_dir, *played, "--inference.token-file", str(processes.directory / "token"))
    address = f"{ADDRESSES[0]}:7778"
    learner, near, far = (
        processes.role(*role, inside=cable.inside(host))
        for host, role in [
            (0, ("learner", run_dir, address)),
            (0, ("actor", run_dir, address, "--actor-id", "0")),
            (1, ("actor", run_dir, address, "--actor-id", "1")),
        ]
    )

    def until_streams(count, more=5):
        """Waits until so many streams are connected, and then for further updates."""
        learner.until(lambda: last(run_dir, "server/streams") == count, f"{count} streams")
        goal = last(run_dir, "updates") + more
        learner.until(lambda: last(run_dir, "updates") >= goal, f"{goal} updates")

    until_streams(4)
    cable.cut()
    until_streams(2)  # the near actor goes on alone
    cable.mend()
    until_streams(4)
    assert "is lost: UNAVAILABLE" in far.err
    learner.send(signal.SIGTERM)
    assert learner.wait() == 143, learner.said
    rows = [row for row in read_rows(run_dir / "metrics.jsonl") if "learner/loss" in row]
    assert {(row["learner/broken"], row["learner/repeated"]) for row in rows} == {(0.0, 0.0)}
    for actor in (near, far):
        actor.send(signal.SIGTERM)
        assert actor.wait() == 143

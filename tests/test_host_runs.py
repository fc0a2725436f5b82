"""Faults and ends of a run on several hosts, on processes of one machine."""

import json
import signal
import time

import pytest
from processes import Processes, free_port, last, make_run, until

from seedx.lifeline import SILENT_S
from seedx.runlog import read_rows

LOST_S = SILENT_S + 60  # within which the others have ended; the rest is for a busy machine


@pytest.fixture
def processes(tmp_path):
    with Processes(tmp_path) as started:
        yield started


class Pair:
    """Two hosts with a learner and an actor each."""

    def __init__(self, processes, directory, *flags, resume=False):
        coordinator = f"localhost:{free_port()}"
        self.run_dirs = [directory / f"host-{i}" for i in (0, 1)]
        self._processes, self._resume = processes, ("--resume",) if resume else ()
        for run_dir in self.run_dirs:
            make_run(run_dir, *flags, *self._resume)
        together = ("--coordinator", coordinator, "--num-hosts", "2", "--host-index")
        self.learners = [
            processes.role("learner", run_dir, f"unix:{run_dir}/socket", *together, str(i), *self._resume)
            for i, run_dir in enumerate(self.run_dirs)
        ]
        self.actors = [self.start_actor(i) for i in (0, 1)]

    def start_actor(self, i):
        return self._processes.role("actor", self.run_dirs[i], f"unix:{self.run_dirs[i]}/socket", "--actor-id", str(i))

    def until_updates(self, more=5, host=0):
        """Waits for further updates."""
        goal = last(self.run_dirs[host], "updates") + more
        self.learners[host].until(lambda: last(self.run_dirs[host], "updates") >= goal, f"{goal} updates")

    def until_stuck(self):
        """Waits until host 0 waits for host 1: two rows of figures say the same."""
        rows = self.run_dirs[0] / "metrics.jsonl"
        until(lambda: len({row["updates"] for row in read_rows(rows)[-3:]}) == 1, "a standstill")

    def summaries(self):
        return [json.loads((run_dir / "summary.json").read_text()) for run_dir in self.run_dirs]


def checkpoints(run_dir):
    return [path.name for path in (run_dir / "checkpoints").iterdir()]


def test_two_hosts_end_with_the_same_update_and_go_on_from_the_first_ones_checkpoint(processes, tmp_path):
    pair = Pair(processes, tmp_path, "--steps", "400")
    assert [learner.wait() for learner in pair.learners] == [0, 0], [learner.said for learner in pair.learners]
    assert [actor.wait() for actor in pair.actors] == [0, 0]
    first, second = pair.summaries()
    assert first["exit"] == second["exit"] == "steps"
    assert first["updates"] == second["updates"] > 10
    assert first["env_steps"] == second["env_steps"] >= 400
    own = [last(run_dir, "host/env_steps") for run_dir in pair.run_dirs]
    assert sum(own) == first["env_steps"]
    assert min(own) > 0
    assert [checkpoints(run_dir) for run_dir in pair.run_dirs] == [[str(first["updates"])], []]

    for run_dir in pair.run_dirs:
        (run_dir / "summary.json").unlink()
    pair = Pair(processes, tmp_path, "--steps", "600", resume=True)
    assert [learner.wait() for learner in pair.learners] == [0, 0], [learner.said for learner in pair.learners]
    assert f"resumed at update {first['updates']:,}" in pair.learners[0].said
    ends = pair.summaries()
    assert ends[0]["updates"] == ends[1]["updates"] > first["updates"]
    assert ends[0]["env_steps"] == ends[1]["env_steps"] >= 600


def test_a_host_without_actors_lets_the_other_learn_and_a_signal_to_it_ends_both(processes, tmp_path):
    pair = Pair(processes, tmp_path, "--learner.batch-wait-s", "0.3")
    pair.until_updates()
    pair.actors[1].send(signal.SIGKILL)
    pair.learners[1].until(lambda: last(pair.run_dirs[1], "host/masked_batches") > 3, "masked batches")
    pair.until_updates()
    assert "the other hosts learn without this one" in pair.learners[1].said
    pair.start_actor(1)
    pair.learners[1].until(lambda: "this host learns again" in pair.learners[1].said, "batches again")
    assert last(pair.run_dirs[0], "host/masked_batches") < last(pair.run_dirs[1], "host/masked_batches")

    pair.learners[1].send(signal.SIGTERM)
    assert [learner.wait() for learner in pair.learners] == [143, 143], [learner.said for learner in pair.learners]
    first, second = pair.summaries()
    assert first["exit"] == second["exit"] == "SIGTERM"
    assert first["updates"] == second["updates"]
    assert str(first["updates"]) in checkpoints(pair.run_dirs[0])
    assert "host 1 of 2 ends the run: SIGTERM" in pair.learners[0].said
    assert all("Next: the same line on all 2 hosts" in learner.out for learner in pair.learners)


def test_a_host_that_is_killed_in_an_update_is_named(processes, tmp_path):
    pair = Pair(processes, tmp_path)
    pair.until_updates()
    pair.learners[1].send(signal.SIGSTOP)
    pair.until_stuck()  # in an update that waits for host 1
    pair.learners[1].send(signal.SIGKILL)
    assert pair.learners[0].wait(LOST_S) == 1, pair.learners[0].said
    assert "learner: host 1 of 2 is lost: its connection is closed." in pair.learners[0].err
    assert "Traceback" not in pair.learners[0].err
    assert read_rows(pair.run_dirs[0] / "metrics.jsonl")[-1]["updates"] > 0


@pytest.mark.slow
def test_a_host_that_stands_still_for_less_than_that_loses_nothing(processes, tmp_path):
    pair = Pair(processes, tmp_path, "--steps", "1500")
    pair.until_updates()
    pair.learners[1].send(signal.SIGSTOP)
    pair.until_stuck()
    time.sleep(SILENT_S / 6)
    pair.learners[1].send(signal.SIGCONT)
    assert [learner.wait() for learner in pair.learners] == [0, 0], [learner.said for learner in pair.learners]
    first, second = pair.summaries()
    assert first["exit"] == second["exit"] == "steps"
    assert first["updates"] == second["updates"]
    assert sum(last(run_dir, "host/env_steps") for run_dir in pair.run_dirs) == first["env_steps"]

"""Runs whose completions other processes generate: what they learn, and what happens when one of these is killed."""

import json
import os
import signal
from pathlib import Path

import documented
import pytest
from bits import assert_bit_equal
from processes import QUICK, Processes, free_port, last, until

from seedx import cli
from seedx.checkpoint import load_params
from seedx.inference import decode_pb2 as pb
from seedx.inference.decode_client import gather, generate
from seedx.rundir import newest_update
from seedx.runlog import read_rows
from seedx.security import Access

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

TINY = (
    *("--agent", "grpo", "--task", "text_tasks:bytes_", "--stop-at-reward", "None", "--warm-start.reward", "0"),
    *("--held-out.num-prompts", "0", "--learner.batch-size", "2", "--grpo.group-size", "2"),
    *("--grpo.no-dynamic-sampling", "--metrics.no-tensorboard", "--metrics.interval-s", "0.2"),
)
IN_STEP = ("--max-staleness", "0", "--steps", "40")  # ten updates
STEPPED = ("--task", "text_tasks:stepped", "--reward.timeout-s", "600")
REWARDS = 4  # of an update


@pytest.fixture
def processes(tmp_path):
    with Processes(tmp_path) as started:
        yield started


def start(processes, run_dir, *flags):
    tiny = () if "--resume" in flags else (*TINY, "--decode-hosts", "1")
    return processes.launch("local.py", *tiny, "--run-dir", str(run_dir), *flags, env=QUICK)


def learn(processes, run_dir, *flags, code=0):
    """A run to its end, which leaves no process."""
    run = start(processes, run_dir, *flags)
    assert run.wait(300) == code, run.said
    processes.wait_until_gone()
    return run


def allow(directory: Path, rewards: int) -> None:
    """Has `text_tasks:stepped` give so many rewards."""
    unfinished = directory / "allowed.new"
    unfinished.write_text(str(rewards))
    unfinished.rename(directory / "allowed")


def values(run_dir, name):
    return [row[name] for row in read_rows(run_dir / "metrics.jsonl") if name in row]


def decode_host(processes, run):
    """Its process, once there is one."""
    return run.until(lambda: processes.alive("seedx.run", "decode"), "a decode host")[0]


def host_log(run_dir):
    log = run_dir / "logs" / "decode-0.log"
    return log.read_text() if log.exists() else ""


# ---- what is learned


def test_the_default_task_is_learned_to_nine_tenths(processes, tmp_path):
    run = processes.launch(
        *("local.py", "--agent", "grpo", "--decode-hosts", "1", "--stop-at-reward", "0.9"),
        *("--run-dir", str(tmp_path / "run")),
    )
    assert run.wait(800) == 0, run.said
    processes.wait_until_gone()
    ends = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert ends["exit"] == "solved"
    assert ends["reward_mean"] >= 0.9
    assert ends["held_out_reward_after"] > ends["held_out_reward_before"] + 0.3
    assert max(values(tmp_path / "run", "learner/lag_updates_max")) == 1
    assert last(tmp_path / "run", "decode/lost_hosts") == 0


@pytest.mark.parametrize(
    "flags",
    [
        ("--decode-hosts", "1", "--held-out.num-prompts", "5", "--held-out.interval-updates", "2"),
        ("--decode-hosts", "2"),
        ("--decode-hosts", "1", "--task", "text_tasks:talking", "--learner.batch-size", "3"),
    ],
    ids=["held-out", "two", "talking"],
)
def test_without_staleness_a_run_equals_one_in_one_process_bit_for_bit(processes, tmp_path, flags):
    learn(processes, tmp_path / "alone", *IN_STEP, *flags, "--decode-hosts", "0")
    learn(processes, tmp_path / "hosts", *IN_STEP, *flags)
    alone, hosts = load_params(tmp_path / "alone"), load_params(tmp_path / "hosts")
    assert alone.update == hosts.update >= 7
    for name in ("position", "tokens", "env_steps"):
        assert alone.metadata[name] == hosts.metadata[name]
    assert_bit_equal(alone.params, hosts.params)
    first, second = ((tmp_path / name / "samples.jsonl").read_text() for name in ("alone", "hosts"))
    assert first == second
    assert set(values(tmp_path / "hosts", "learner/lag_updates_max")) == {0}


@pytest.mark.parametrize("max_staleness", [1, 2])
def test_tokens_are_no_staler_than_allowed(processes, tmp_path, max_staleness):
    run_dir = tmp_path / "run"
    run = learn(processes, run_dir, "--max-staleness", str(max_staleness), "--steps", "80")
    assert 0 < max(values(run_dir, "learner/lag_updates_max")) <= max_staleness
    assert set(values(run_dir, "decode/compilations")) == {0}
    assert last(run_dir, "decode/hosts") == 1
    assert max(values(run_dir, "decode/version")) > 0
    assert max(values(run_dir, "learner/engine_gap_max")) < 1e-4
    assert {name for row in read_rows(run_dir / "metrics.jsonl") for name in row} <= documented.llm_metrics()
    assert run.out.count("decode hosts: 1, each with ") == host_log(run_dir).count(" slots of ") == 1
    assert run.err == ""


def test_the_first_host_answers_others_too(processes, tmp_path):
    run_dir, port = tmp_path / "run", free_port()
    run = start(processes, run_dir, "--serve-port", str(port))
    run.until(lambda: "the engine answers at" in host_log(run_dir), "the server")
    run.until(lambda: last(run_dir, "updates") >= 1, "an update")
    request = pb.GenerateRequest(text="ab=", max_tokens=4, temperature=0.0)
    with generate(f"localhost:{port}", request, Access(), 60.0) as replies:
        [answer] = gather(replies, 1)
    assert len(answer.tokens) == len(answer.versions) > 0
    assert answer.versions[0] >= 1
    run.send(signal.SIGTERM)
    assert run.wait() == 143, run.said


# ---- faults


def test_a_host_that_is_killed_comes_back_with_the_newest_weights_and_gets_what_was_lost(processes, tmp_path):
    run_dir = tmp_path / "run"
    run = start(processes, run_dir)
    run.until(lambda: last(run_dir, "updates") >= 3, "updates")
    for kills in (1, 2):
        decode_host(processes, run).kill()
        said = f"decode-0 died with signal 9 (SIGKILL); restart {kills} of 5"
        run.until(lambda said=said: said in run.err, "its restart")
        run.until(lambda kills=kills: last(run_dir, "decode/lost_hosts") == kills, "its loss in the metrics")
        seen = last(run_dir, "updates")
        run.until(lambda seen=seen: last(run_dir, "updates") >= seen + 5, "updates after it")
        assert host_log(run_dir).count("ready with version ") == kills + 1
    run.send(signal.SIGTERM)
    assert run.wait() == 143, run.said
    processes.wait_until_gone()
    saved = load_params(run_dir)
    assert saved.metadata["position"] == 2 * saved.update  # none was left out
    assert max(values(run_dir, "learner/lag_updates_max")) <= 1
    assert max(values(run_dir, "learner/engine_gap_max")) < 1e-4  # or a version was not whole
    assert "rollout/lost_groups" not in read_rows(run_dir / "metrics.jsonl")[-1]
    assert 0 in values(run_dir, "decode/hosts")


def test_a_host_that_is_killed_while_weights_are_pushed_changes_nothing_that_is_learned(processes, tmp_path):
    run_dir = tmp_path / "run"
    allow(tmp_path, 0)
    run = start(processes, run_dir, *STEPPED, *IN_STEP)
    run.until(lambda: last(run_dir, "reward/open") == REWARDS, "the first completions")
    host = decode_host(processes, run)
    os.kill(host.pid, signal.SIGSTOP)
    allow(tmp_path, REWARDS)
    run.until(lambda: last(run_dir, "weights/published") == 2, "the second version")
    run.until(lambda: last(run_dir, "updates") == 1, "the first update")
    assert last(run_dir, "weights/sent") == 1  # the first version; sockets hold less than all of the second
    host.kill()
    allow(tmp_path, 10**6)
    assert run.wait(300) == 0, run.said
    processes.wait_until_gone()
    assert "ready with version 0 " in host_log(run_dir)
    assert "ready with version 1 " in host_log(run_dir)
    learn(processes, tmp_path / "whole", *STEPPED, *IN_STEP)
    killed, whole = load_params(run_dir), load_params(tmp_path / "whole")
    assert killed.update == whole.update == 10
    assert_bit_equal(killed.params, whole.params)


def test_nothing_survives_a_learner_or_a_launcher_that_is_killed(processes, tmp_path):
    for name in ("learner", "launcher"):
        run_dir = tmp_path / name
        run = start(processes, run_dir)
        run.until(lambda run_dir=run_dir: last(run_dir, "updates") >= 1, "an update")
        if name == "learner":
            [learner] = processes.alive("seedx.run", "learner")
            learner.kill()
            assert run.wait() == 137, run.said
        else:
            run.popen.kill()
        processes.wait_until_gone()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_run_with_a_checkpoint_to_go_on_from(processes, tmp_path, number):
    run_dir = tmp_path / "run"
    run = start(processes, run_dir)
    run.until(lambda: last(run_dir, "updates") >= 3, "updates")
    run.send(number) if number == signal.SIGTERM else run.interrupt()
    assert run.wait() == 128 + number, run.said
    processes.wait_until_gone()
    assert "Traceback" not in run.said + host_log(run_dir)
    saved = newest_update(run_dir)
    assert saved >= 3
    hosts = "1" if number == signal.SIGTERM else "0"
    resumed = learn(processes, run_dir, "--resume", "--steps", str(4 * (saved + 5)), "--decode-hosts", hosts)
    assert f"resumed at update {saved:,}" in resumed.out
    assert host_log(run_dir).count(f"ready with version {saved} ") == int(hosts)
    assert load_params(run_dir).metadata["position"] == 2 * (saved + 5)
    assert max(values(run_dir, "learner/lag_updates_max")) <= 1


def test_a_host_that_never_comes_up_ends_the_run_in_time_with_its_name(processes, tmp_path):
    run_dir = tmp_path / "run"
    cli.prepare_run_dir(cli.parse([*TINY, "--run-dir", str(run_dir), "--rollout.timeout-s", "3"]))
    where = f"unix:{tmp_path}/decode-0.sock"
    learner = processes.role("learner", run_dir, f"unix:{tmp_path}/learner.sock", "--decode-host", where)
    assert learner.wait() == 1, learner.said
    assert f"decode-0 at {where} has taken no requests for 3 s (--rollout.timeout-s)" in learner.err
    assert "Traceback" not in learner.err


def test_a_host_that_cannot_be_ends_the_run_with_its_words(processes, tmp_path):
    allow(tmp_path, 0)
    port = free_port()
    first = start(processes, tmp_path / "first", *STEPPED, "--serve-port", str(port))
    first.until(lambda: "the engine answers at" in host_log(tmp_path / "first"), "the server")
    second = start(processes, tmp_path / "second", "--serve-port", str(port))
    assert second.wait() == 2, second.said
    assert f"cannot listen on localhost:{port}" in second.err
    assert first.popen.poll() is None
    first.send(signal.SIGTERM)
    assert first.wait() == 143
    until(lambda: not processes.alive(), "the end of every process")

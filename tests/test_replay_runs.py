"""Whole runs on replay: they learn, hold the ratio, and outlive a Reverb server that dies."""

import itertools
import json
import re
import signal
import sys
import time
from pathlib import Path

import documented
import pytest
from processes import QUICK, ROOT, Processes, last
from processes import TINY as TINY_IMPALA
from reverb_harness import Launched, find_uv, table_info

from seedx import cli
from seedx.checkpoint import load_params
from seedx.program import tables_json
from seedx.replay.chunks import read_index
from seedx.replay.description import TABLE
from seedx.runlog import read_rows

# Starts fast: a small table and network.
TINY = (
    *("--num-actors", "1", "--envs-per-actor", "8", "--eval-actors", "0", "--stop-at-return", "None"),
    *("--learner.batch-size", "8", "--network.hidden", "8", "--network.lstm", "8", "--network.dueling-hidden", "8"),
    *("--table.min-size", "16", "--metrics.no-tensorboard", "--metrics.interval-s", "0.2"),
)
REVERB = [pytest.mark.external, pytest.mark.slow]
GONE = pytest.mark.parametrize("how", [Launched.kill, Launched.hang])
BOTH = pytest.mark.parametrize("replay", ["embedded", pytest.param("reverb", marks=REVERB)])


@pytest.fixture
def processes(tmp_path):
    with Processes(tmp_path) as started:
        yield started


def start(processes: Processes, run_dir: Path, *flags: str, env: dict[str, str] | None = None):
    if "reverb" in flags:
        find_uv()
    return processes.launch("local.py", "--run-dir", str(run_dir), *flags, env=env)


def table_of(*flags: str):
    """The table of a run, as `python -m seedx.program --format tables` prints it for its servers."""
    [table] = json.loads(tables_json(cli.parse([*flags])))
    return table


def served(address: str) -> tuple[int, int]:
    """How many items a server let in and out."""
    limiter = table_info(address, TABLE).rate_limiter_info
    return limiter.insert_stats.completed, limiter.sample_stats.completed


@BOTH
def test_r2d2_runs_and_holds_the_ratio(processes, tmp_path, replay):
    run_dir = tmp_path / "run"
    run = start(processes, run_dir, "--agent", "r2d2", "--replay", replay, *TINY, "--steps", "20000", env=QUICK)
    assert run.wait(150) == 0, run.said
    assert not processes.alive()
    said = re.search(r"replay: 5,000 unrolls of 26 rows, 6 of them .*; \d[\d.,]* MB when full", run.out)
    assert bool(said) is (replay == "embedded")
    rows = read_rows(run_dir / "metrics.jsonl")
    assert rows[-1]["batcher/compilations"] == 0
    assert abs(rows[-1]["replay/samples_per_insert"] / 4.0 - 1) < 0.05
    end = rows[-1]
    half = [row for row in rows if row.get("replay/inserted", 0) <= end["replay/inserted"] / 2][-1]
    came, went = (end[name] - half.get(name, 0) for name in ("replay/inserted", "replay/sampled"))
    assert abs(went / came / 4.0 - 1) < 0.05  # so that it does not drift
    for a, b in itertools.pairwise(rows):
        if "replay/interval_samples_per_insert" in b:
            came = b["replay/inserted"] - a["replay/inserted"]
            # From one end of the rate limiter's band, four batches on either side of the middle, to the other.
            assert abs(b["replay/interval_samples_per_insert"] - 4.0) * came <= 2 * 4 * 8 + 1e-6
    assert "replay/interval_samples_per_insert" in {name for row in rows for name in row}
    assert {name for row in rows for name in row} <= documented.metrics()
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
    assert float(evaluation.out.split()[1]) >= 150  # a random policy: 22
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
    run.until(lambda: list(run_dir.glob("reverb/*/DONE")), "a checkpoint of the table")
    updates = last(run_dir, "updates")
    for process in processes.alive("--allow-unauthenticated"):
        process.kill()
    run.until(lambda: "reverb died with signal 9 (SIGKILL); restart 1 of 5" in run.err, "the restart")
    run.until(lambda: last(run_dir, "updates") > updates + 100, "further updates", 120)
    assert last(run_dir, "replay/lost_upper_bound") > 0
    assert last(run_dir, "replay/duplicates") == 0  # none is passed over where items are sampled many times
    run.send(signal.SIGTERM)
    assert run.wait() == 143, run.said
    processes.wait_until_gone()


@pytest.mark.slow
@pytest.mark.external
@pytest.mark.timeout(400)
def test_a_queue_on_a_server_that_is_killed_is_not_trained_on_twice(processes, tmp_path):
    run_dir, keys_file = tmp_path / "run", tmp_path / "keys"
    agent = ("--agent", "faulty_agents:recording", "--env", "faulty_envs:make_counting", "--table.max-size", "64")
    flags = (*agent, "--replay", "reverb", "--checkpoint.replay-interval-s", "2")
    find_uv()
    run = processes.local(run_dir, *flags, env={"SAMPLED_KEYS": str(keys_file)})

    def learn(count, what):
        updates = last(run_dir, "updates") or 0
        run.until(lambda: (last(run_dir, "updates") or 0) > updates + count, what, 150)

    for _ in range(2):
        learn(10, "updates")
        known = set(run_dir.glob("reverb/*/DONE"))
        run.until(lambda known=known: set(run_dir.glob("reverb/*/DONE")) - known, "a checkpoint of the table")
        learn(5, "updates after it")
        for process in processes.alive("--allow-unauthenticated"):
            process.kill()
        learn(20, "updates after the restart")
    run.send(signal.SIGTERM)
    assert run.wait() == 143, run.said
    keys = keys_file.read_text().split()
    assert len(keys) >= 4 * load_params(run_dir).update
    assert len(keys) == len(set(keys))
    # Each restart gives again what the checkpoint held, at most a full table, and each break what was on its way.
    assert 0 < last(run_dir, "replay/restored") <= 2 * 64
    assert last(run_dir, "replay/duplicates") <= 2 * 25
    assert 0 < last(run_dir, "replay/lost_upper_bound") <= len(keys) + 2 * (64 + 25)


@pytest.mark.slow
@pytest.mark.external
@pytest.mark.timeout(400)
def test_training_on_two_servers_outlives_one_that_is_killed(processes, tmp_path):
    run_dir, table = tmp_path / "run", table_of("--agent", "r2d2", *TINY)
    servers = [Launched(processes, table) for _ in range(2)]
    for server in servers:
        server.serve()
    where = f"reverb://{servers[0].address},{servers[1].address}"
    flags = ("--agent", "r2d2", "--replay", where, *TINY, "--checkpoint.replay-interval-s", "2")
    run = start(processes, run_dir, *flags)
    run.until(lambda: last(run_dir, "updates") > 50, "updates", 150)
    run.until(lambda: all(min(served(server.address)) > 100 for server in servers), "a share of each server")
    run.until(lambda: list(servers[1].checkpoints.glob("*/DONE")), "a checkpoint of the table")
    servers[1].kill()
    assert "loading" in servers[1].serve().out
    before, updates = served(servers[1].address), last(run_dir, "updates")
    run.until(lambda: last(run_dir, "updates") > updates + 100, "further updates", 120)
    assert all(now > then + 50 for now, then in zip(served(servers[1].address), before, strict=True))
    assert "instead of" not in run.out  # the tables are as the run's
    run.send(signal.SIGTERM)
    assert run.wait() == 143, run.said


@pytest.mark.slow
@pytest.mark.external
def test_a_run_that_is_killed_leaves_no_server(processes, tmp_path):
    run = start(processes, tmp_path / "run", "--agent", "r2d2", "--replay", "reverb", *TINY)
    run.until(lambda: last(tmp_path / "run", "updates") > 5, "updates", 150)
    assert any("reverb_server.py" in word for process in processes.alive() for word in process.cmdline())
    run.popen.kill()
    processes.wait_until_gone()
    assert run.wait() == -signal.SIGKILL


@pytest.mark.slow
@pytest.mark.external
def test_a_table_with_items_of_another_environment_ends_the_run_with_the_column(processes, tmp_path):
    server = Launched(processes, {**table_of("--agent", "r2d2", *TINY), "max_size": 700, "sampler": "uniform"})
    server.serve()
    where = ("--agent", "r2d2", "--replay", f"reverb://{server.address}", *TINY)
    first = start(processes, tmp_path / "first", *where, "--env", "catch", "--steps", "2000")
    assert first.wait() == 0, first.said
    second = start(processes, tmp_path / "second", *where)
    assert second.wait() == 2, second.said
    assert f"table 'unrolls' at {server.address} has sampler uniform instead of prioritized" in second.out
    assert "max_size 700 instead of 5000" in second.out
    assert "Traceback" not in second.err
    assert re.search(
        r"column \.timestep\.observation, expected as (\S+\[[\d, ]+\]): its data are \w+\[[\d, ]+\]", second.err
    )
    assert f"table at {server.address} holds items of another run or settings" in second.err
    assert ("nothing was added" in second.err) ^ ("What this run had added was deleted" in second.err)
    assert "--checkpoint-dir" in second.err


@pytest.mark.slow
@pytest.mark.external
@GONE
def test_a_server_that_stays_away_ends_the_run_with_its_address(processes, tmp_path, how):
    run_dir, server = tmp_path / "run", Launched(processes, table_of("--agent", "r2d2", *TINY))
    server.serve()
    where = ("--agent", "r2d2", "--replay", f"reverb://{server.address}", "--table.give-up-s", "3")
    run = start(processes, run_dir, *where, *TINY)
    run.until(lambda: last(run_dir, "updates") > 20, "updates")
    how(server)
    assert run.wait() == 1, run.said
    assert run.err.count(f"the Reverb server at {server.address} has been gone for") == 1
    assert "Traceback" not in run.said
    assert "Continue it with --resume" in run.err
    assert load_params(run_dir).update > 20
    assert json.loads((run_dir / "summary.json").read_text())["exit"] == "failed"


@pytest.mark.slow
@pytest.mark.external
@GONE
def test_a_signal_ends_a_run_with_a_checkpoint_while_its_server_is_gone(processes, tmp_path, how):
    run_dir, server = tmp_path / "run", Launched(processes, table_of("--agent", "r2d2", *TINY))
    server.serve()
    run = start(processes, run_dir, "--agent", "r2d2", "--replay", f"reverb://{server.address}", *TINY)
    run.until(lambda: last(run_dir, "updates") > 20, "updates")
    how(server)
    run.until(lambda: last(run_dir, "replay/gone_s") > 0, "the absence")
    run.send(signal.SIGTERM)
    assert run.wait() == 143, run.said  # the server would be waited for for 120 s
    assert load_params(run_dir).update > 20
    assert json.loads((run_dir / "summary.json").read_text())["exit"] == "SIGTERM"
    assert last(run_dir, "replay/failed_checkpoints") == 1


@pytest.mark.slow
@pytest.mark.external
def test_a_full_queue_paces_the_actors_and_loses_nothing(processes, tmp_path):
    run_dir, agent = tmp_path / "run", ("--agent", "faulty_agents:slow", "--env", "faulty_envs:make_counting")
    server = Launched(processes, table_of(*TINY_IMPALA, *agent))
    server.serve()
    run = processes.local(run_dir, *agent, "--replay", f"reverb://{server.address}", "--steps", "1500")
    sizes = []
    while run.popen.poll() is None:
        sizes.append(table_info(server.address, TABLE).current_size)
        time.sleep(0.05)
    assert run.wait() == 0, run.said
    assert max(sizes) == 8
    rows = read_rows(run_dir / "metrics.jsonl")
    learning_s = rows[-1]["seconds"] - next(row["seconds"] for row in rows if row["updates"])
    assert rows[-1]["store/paced_s"] > 0.5 * learning_s
    assert rows[-1]["replay/lost_upper_bound"] == rows[-1]["replay/duplicates"] == 0
    assert not any(row.get("learner/broken") for row in rows)
    inserted, sampled = served(server.address)
    assert inserted == sampled + table_info(server.address, TABLE).current_size


@pytest.mark.slow
@pytest.mark.external
def test_a_run_whose_servers_limits_make_both_sides_wait_says_so(processes, tmp_path):
    limits = {"samples_per_insert": 4.0, "min_size": 16, "min_diff": 64.0, "max_diff": 64.0}
    server = Launched(processes, {**table_of("--agent", "r2d2", *TINY), **limits})
    server.serve()
    run = start(processes, tmp_path / "run", "--agent", "r2d2", "--replay", f"reverb://{server.address}", *TINY)
    for words in (
        r"acting has waited for 1\d s .* items were not all let in",
        r"learning has waited for 1\d s .* no 8 items",
    ):
        found = run.until(lambda words=words: re.search(words + ".*", run.out), words)
        assert f"at {server.address}, table 'unrolls' holds 16 of 5000 items" in found.group()
        assert "samples_per_insert 4, min_size 16, difference 64 to 64" in found.group()
    assert "max_diff 64 instead of 96" in run.out
    run.send(signal.SIGTERM)
    assert run.wait() == 143, run.said


@pytest.mark.parametrize(
    ("replay", "missing", "words"),
    [
        ("reverb", "uv", "pip install -e '.[reverb]'"),
        pytest.param("reverb://localhost:9", "cramjam", "needs cramjam: pip install", marks=pytest.mark.slow),
    ],
)
def test_what_reverb_needs_is_named_where_it_is_not_installed(processes, tmp_path, replay, missing, words):
    (tmp_path / "sitecustomize.py").write_text(f"import sys; sys.modules[{missing!r}] = None")
    env = {"PYTHONPATH": f"{tmp_path}:{ROOT}", "PATH": "/usr/bin:/bin"}
    flags = ("--agent", "r2d2", "--replay", replay, *TINY)
    run = processes.launch("local.py", "--run-dir", str(tmp_path / "run"), *flags, env=env)
    assert run.wait() == 2, run.said
    assert words in run.err
    assert "Traceback" not in run.err


@pytest.mark.parametrize(
    ("flag", "value", "words"),
    [
        ("--table.max-size", 10**15, "a table of 1,000,000,000,000,000 items"),
        pytest.param("--table.max-bytes", 100, "more than table.max_bytes (100)", marks=pytest.mark.slow),
    ],
)
def test_a_table_that_does_not_fit_ends_the_run(processes, tmp_path, flag, value, words):
    run = start(processes, tmp_path / "run", "--agent", "r2d2", *TINY, flag, str(value), env=QUICK)
    assert run.wait() == 2, run.said
    assert words in run.err
    assert "Traceback" not in run.err


@pytest.mark.parametrize(("required", "outcome"), [("", pytest.skip), ("tls reverb", pytest.fail)])
def test_tests_that_need_reverb_fail_without_it_only_where_it_is_required(monkeypatch, required, outcome):
    monkeypatch.setitem(sys.modules, "uv", None)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("SEEDX_REQUIRE", required)
    with pytest.raises(outcome.Exception, match="there is no uv"):
        find_uv()


@pytest.mark.slow
def test_a_learner_that_is_killed_goes_on_with_the_replay_of_its_last_snapshot(processes, tmp_path):
    run_dir = tmp_path / "run"
    flags = ("--checkpoint.replay-interval-s", "1", "--checkpoint.interval-s", "1", "--table.min-size", "400")
    run = start(processes, run_dir, "--agent", "r2d2", *TINY, *flags)
    run.until(lambda: last(run_dir, "updates") > 200, "updates")
    run.until(lambda: list((run_dir / "replay").glob("index*")) and last(run_dir, "replay/items") > 600, "a snapshot")
    [learner] = processes.alive("learner")
    learner.kill()
    assert run.wait() == 137, run.said
    other = start(processes, run_dir, "--resume", "--learner.unroll-length", "10")
    assert other.wait() == 2, other.said
    assert "replay's snapshot" in other.err
    assert "resumed with --learner.unroll-length 10 instead of 20." in other.err
    _, arrays = read_index(run_dir / "replay")  # of the snapshot that the kill left
    held, updates = len(arrays["order"]), load_params(run_dir).update
    assert held > 400
    assert (arrays["items_chunk"] > 0).all()  # all of what it says was written
    resumed = start(processes, run_dir, "--resume", "--steps", str(int(last(run_dir, "env_steps")) + 3000))
    assert resumed.wait() == 0, resumed.said
    assert f"{held:,} unrolls are back in the replay" in resumed.out
    assert f"resumed at update {updates:,}" in resumed.out
    assert last(run_dir, "replay/items") > held  # and goes on from there
    assert last(run_dir, "updates") > updates


@pytest.mark.external
def test_a_server_that_is_not_there_ends_the_run_with_its_address(processes, tmp_path):
    run_dir = tmp_path / "run"
    run = start(
        processes, run_dir, "--agent", "r2d2", "--replay", "reverb://localhost:9", *TINY, "--table.give-up-s", "3"
    )
    assert run.wait() == 2, run.said
    assert "localhost:9" in run.err
    assert "Traceback" not in run.err

"""Whole GRPO runs in real processes: they repeat, end, resume, and outlive what tasks, signals and servers do."""

import itertools
import json
import re
import signal

import documented
import grpc
import orbax.checkpoint as ocp
import pytest
from bits import assert_bit_equal
from processes import QUICK, Processes, free_port, last, until
from reverb_harness import Launched, find_uv, table_info

from seedx import cli
from seedx.checkpoint import load_params
from seedx.inference import decode_pb2 as pb
from seedx.inference.decode_client import gather, generate
from seedx.program import tables_json
from seedx.replay.description import TABLE
from seedx.rundir import newest_update
from seedx.runlog import SUMMARY_KEYS, read_rows
from seedx.security import Access

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

# Starts fast, and any model has some success.
TINY = (
    *("--agent", "grpo", "--task", "text_tasks:bytes_", "--stop-at-reward", "None", "--warm-start.reward", "0"),
    *("--held-out.num-prompts", "0", "--learner.batch-size", "2", "--grpo.group-size", "2"),
    *("--grpo.no-dynamic-sampling", "--metrics.no-tensorboard", "--metrics.interval-s", "0.2"),
)
# Answers that are soon known, and a model that knows them a little.
WARM = ("--task", "reverse", "--warm-start.reward", "0.000001")
IN_STEP = ("--max-staleness", "0", "--steps", "40")  # ten updates
LORA = ("--lora.rank", "4", "--lora.alpha", "8", "--learner.learning-rate", "0.001")
PPO = ("--grpo.advantage", "gae", "--grpo.gae-lambda", "0.95")


@pytest.fixture
def processes(tmp_path):
    with Processes(tmp_path) as started:
        yield started


def start(processes, run_dir, *flags):
    tiny = () if "--resume" in flags else TINY
    return processes.launch("local.py", *tiny, "--run-dir", str(run_dir), *flags, env=QUICK)


def learn(processes, run_dir, *flags, code=0):
    """A run to its end, which leaves no process."""
    run = start(processes, run_dir, *flags)
    assert run.wait(300) == code, run.said
    processes.wait_until_gone()
    return run


def summary(run_dir):
    return json.loads((run_dir / "summary.json").read_text())


def kill_learner(processes, run):
    [learner] = processes.alive("seedx.run", "learner")
    learner.kill()
    assert run.wait() == 137, run.said
    processes.wait_until_gone()  # its reward workers and their guardians too


def values(run_dir, name):
    return [row[name] for row in read_rows(run_dir / "metrics.jsonl") if name in row]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run without staleness, of ten updates; only looked at."""
    directory = tmp_path_factory.mktemp("finished")
    with Processes(directory) as processes:
        learn(processes, directory / "run", *IN_STEP, "--checkpoint.keep", "100")
    return directory / "run"


# ---- runs without staleness


def test_runs_without_staleness_give_equal_parameters_bit_for_bit(processes, tmp_path, finished):
    for name, flags in (("same", ()), ("other", ("--seed", "2"))):
        learn(processes, tmp_path / name, *IN_STEP, *flags)
    whole, same = load_params(finished), load_params(tmp_path / "same")
    assert whole.update == same.update == 10
    for name in ("position", "tokens", "env_steps"):
        assert whole.metadata[name] == same.metadata[name]
    assert_bit_equal(whole.params, same.params)
    first, again = (
        json.loads((run_dir / "samples.jsonl").read_text().splitlines()[0]) for run_dir in (finished, tmp_path / "same")
    )
    assert first == again
    with pytest.raises(AssertionError):
        assert_bit_equal(whole.params, load_params(tmp_path / "other").params)
    assert set(values(finished, "learner/lag_updates_max")) == {0}


@pytest.mark.parametrize(
    "flags",
    [
        ("--held-out.num-prompts", "5", "--held-out.interval-updates", "2", "--grpo.dynamic-sampling"),
        ("--task", "text_tasks:talking", "--learner.batch-size", "3"),
        ("--grpo.old", "recomputed", "--grpo.kl-cost", "0.1", "--learner.microbatches", "2"),
        (*PPO, "--grpo.group-size", "1", "--learner.batch-size", "4", "--task", "text_tasks:talking"),
    ],
    ids=["held-out", "talking", "recomputed", "ppo"],
)
def test_so_do_runs_with_evaluations_conversations_and_other_losses(processes, tmp_path, flags):
    for name in ("a", "b"):
        learn(processes, tmp_path / name, *IN_STEP, *flags)
    first, second = load_params(tmp_path / "a"), load_params(tmp_path / "b")
    assert first.update >= 7
    assert first.metadata["position"] == second.metadata["position"]
    assert_bit_equal(first.params, second.params)


def test_a_run_that_is_killed_between_updates_and_resumed_equals_one_that_was_not(processes, tmp_path, finished):
    run_dir = tmp_path / "run"
    run = start(processes, run_dir, *IN_STEP, "--checkpoint.interval-s", "0.01", "--task", "text_tasks:slow")
    run.until(lambda: newest_update(run_dir) >= 3, "a checkpoint")
    kill_learner(processes, run)
    saved = newest_update(run_dir)
    assert saved < 10
    resumed = learn(processes, run_dir, "--resume", "--steps", "40")
    assert f"resumed at update {saved:,}" in resumed.out
    whole, mended = load_params(finished), load_params(run_dir)  # rewards that wait are the same rewards
    assert mended.update == whole.update
    assert mended.metadata["position"] == whole.metadata["position"]
    assert_bit_equal(mended.params, whole.params)
    ends = summary(run_dir)
    assert (ends["updates"], ends["completions"], ends["exit"]) == (10, 40, "steps")
    updates = [row["updates"] for row in read_rows(run_dir / "metrics.jsonl")]
    assert updates[-1] == 10


def other_arrays(run_dir):
    """What the newest checkpoint holds beside the parameters."""
    with ocp.StandardCheckpointer() as reader:
        return reader.restore(run_dir / "checkpoints" / str(newest_update(run_dir)) / "state")


@pytest.mark.parametrize(
    ("flags", "held"),
    [
        ((*PPO, "--grpo.value-clip", "0.2", "--grpo.kl-cost", "0.1"), {"opt_state", "value_head", "reference"}),
        ((*PPO, *LORA, "--grpo.kl-cost", "0.1"), {"opt_state", "value_head", "adapters", "base"}),
    ],
    ids=["ppo", "lora"],
)
def test_all_that_is_trained_is_resumed_bit_for_bit(processes, tmp_path, flags, held):
    whole_dir, run_dir = tmp_path / "whole", tmp_path / "run"
    learn(processes, whole_dir, *IN_STEP, *flags)
    flags = (*IN_STEP, *flags, "--checkpoint.interval-s", "0.01", "--task", "text_tasks:slow")
    run = start(processes, run_dir, *flags)
    run.until(lambda: newest_update(run_dir) >= 3, "a checkpoint")
    kill_learner(processes, run)
    assert newest_update(run_dir) < 10
    learn(processes, run_dir, "--resume", "--steps", "40")
    assert load_params(run_dir).update == load_params(whole_dir).update == 10
    assert_bit_equal(load_params(run_dir).params, load_params(whole_dir).params)
    arrays = other_arrays(run_dir)
    assert set(arrays) == held
    assert_bit_equal(arrays, other_arrays(whole_dir))
    names = {name for row in read_rows(run_dir / "metrics.jsonl") for name in row}
    assert names <= documented.llm_metrics()
    scored = evaluate(processes, run_dir, "--num-prompts", "2")
    assert "over 2 prompts x 1" in scored.out


def test_a_run_with_a_curriculum_repeats_and_goes_on_after_a_kill_as_if_nothing_had_been(processes, tmp_path):
    flags = (*IN_STEP, "--curriculum.floor", "0.1")
    for name in ("a", "b"):
        learn(processes, tmp_path / name, *flags, "--task", "text_tasks:known")
    run_dir = tmp_path / "run"
    run = start(processes, run_dir, *flags, "--checkpoint.interval-s", "0.01", "--task", "text_tasks:slow_known")
    run.until(lambda: newest_update(run_dir) >= 7, "a checkpoint")  # some were passed over
    kill_learner(processes, run)
    assert newest_update(run_dir) < 10
    learn(processes, run_dir, "--resume", "--steps", "40")
    whole = load_params(tmp_path / "a")
    assert whole.metadata["position"] > 22  # of 20 groups
    assert last(tmp_path / "a", "rollout/skipped_prompts") >= whole.metadata["position"] - 20
    assert {rate for uid, rate in whole.metadata["curriculum"]["rates"] if uid % 2} == {1.0}
    for other in (load_params(tmp_path / "b"), load_params(run_dir)):
        for name in ("position", "tokens", "curriculum"):
            assert other.metadata[name] == whole.metadata[name]
        assert_bit_equal(other.params, whole.params)


def test_a_run_that_is_killed_while_it_warms_up_begins_anew_and_after_its_first_checkpoint_does_not(
    processes, tmp_path
):
    whole_dir, run_dir = tmp_path / "whole", tmp_path / "run"
    whole = learn(processes, whole_dir, *WARM, *IN_STEP)
    assert "warm start: done" in whole.out
    run = start(processes, run_dir, *WARM, *IN_STEP)
    run.until(lambda: "warm start: supervised" in run.out, "the warm start")
    kill_learner(processes, run)
    assert not list(run_dir.glob("checkpoints/*"))
    again = start(processes, run_dir, "--resume")
    again.until(lambda: (run_dir / "checkpoints" / "0").exists(), "the first checkpoint")
    kill_learner(processes, again)
    assert "warm start: done" in again.out
    resumed = learn(processes, run_dir, "--resume", "--steps", "40")
    assert "warm start" not in resumed.out
    assert_bit_equal(load_params(run_dir).params, load_params(whole_dir).params)
    assert load_params(run_dir).metadata["position"] == load_params(whole_dir).metadata["position"] == 20


# ---- staleness, ends and what is left


@pytest.mark.parametrize("max_staleness", [1, 2])
def test_tokens_are_no_staler_than_allowed_and_the_run_directory_has_all(processes, tmp_path, max_staleness):
    run_dir = tmp_path / "run"
    flags = ("--max-staleness", str(max_staleness), "--steps", "80", "--held-out.num-prompts", "4")
    run = learn(processes, run_dir, *flags)
    lags = values(run_dir, "learner/lag_updates_max")
    assert 0 < max(lags) <= max_staleness
    assert set(values(run_dir, "decode/compilations")) == {0}
    ends = summary(run_dir)
    assert set(SUMMARY_KEYS) <= set(ends)
    assert (ends["exit"], ends["updates"], ends["env_steps"], ends["completions"]) == ("steps", 20, 80, 80)
    assert 0 < ends["lag_updates_mean"] <= max_staleness
    assert 80 <= ends["completion_tokens"] <= 80 * 8
    assert ends["completion_tokens_per_s"] > 0
    for name in ("reward_mean", "held_out_reward_before", "held_out_reward_after"):
        assert 0 <= ends[name] <= 1
    assert ends["held_out_gain"] == pytest.approx(ends["held_out_reward_after"] - ends["held_out_reward_before"])
    assert run.out.count("held-out reward") == 2
    assert load_params(run_dir).metadata["position"] == 40
    for name in ("config.json", "curve.png", "samples.html"):
        assert (run_dir / name).stat().st_size > 0
    rows = [json.loads(line) for line in (run_dir / "samples.jsonl").read_text().splitlines()]
    assert rows[0]["prompt"].startswith("tr")
    assert [completion["tokens"] <= 8 for completion in rows[0]["completions"]] == [True, True]
    names = {name for row in read_rows(run_dir / "metrics.jsonl") for name in row}
    for name in (
        "reward_mean",
        "rollout/zero_spread",
        "rollout/truncated",
        "learner/engine_gap_max",
        "decode/occupancy",
    ):
        assert name in names
    assert names <= documented.llm_metrics()
    assert max(values(run_dir, "learner/engine_gap_max")) < 1e-4
    assert not {name for name in names if name in ("replay/repeated_groups", "rollout/lost_groups")}


@pytest.mark.parametrize(
    ("flags", "exit_"),
    [
        (("--seconds", "1"), "seconds"),  # over before the first update
        (("--seconds", "20"), "seconds"),
        (("--stop-at-reward", "0.01", "--metrics.return-window", "16"), "solved"),
        (("--steps", "8", "--task", "text_tasks:slow"), "steps"),  # while rewards are being computed
    ],
)
def test_a_run_ends_well_when_its_limit_is_reached(processes, tmp_path, flags, exit_):
    run = learn(processes, tmp_path / "run", *flags)
    assert summary(tmp_path / "run")["exit"] == exit_
    assert re.match(r"done, |solved: ", run.out.splitlines()[-1])
    assert run.err == ""
    assert load_params(tmp_path / "run").update == summary(tmp_path / "run")["updates"]


def test_a_signal_ends_a_warm_start_without_a_word_of_failure(processes, tmp_path):
    for number in (signal.SIGINT, signal.SIGTERM):
        run_dir = tmp_path / number.name
        run = start(processes, run_dir, "--task", "reverse", "--warm-start.reward", "0.9")
        run.until(lambda run=run: "warm start: supervised" in run.out, "updates of the warm start")
        run.interrupt(number)
        assert run.wait() == 128 + number, run.said
        assert "stopped before the first update; there is nothing to save" in run.said
        assert "Traceback" not in run.said
        processes.wait_until_gone()


def test_a_learner_that_was_started_singly_and_warms_up_tells_clients_to_come_again_and_ends_at_a_signal(
    processes, tmp_path
):
    run_dir, port = tmp_path / "run", free_port()
    flags = (*TINY, "--task", "reverse", "--warm-start.reward", "0.9", "--serve-port", str(port))
    cli.prepare_run_dir(cli.parse([*flags, "--run-dir", str(run_dir)]))
    learner = processes.role("learner", run_dir, f"unix:{tmp_path}/learner.sock")
    learner.until(lambda: "warm start: supervised" in learner.out, "the warm start")
    request = pb.GenerateRequest(text="ab=", max_tokens=2)
    with generate(f"localhost:{port}", request, Access(), 60.0) as replies, pytest.raises(grpc.RpcError) as refused:
        gather(replies, 1)
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
    assert "still being loaded, warmed up or compiled; come again" in refused.value.details()
    learner.send(signal.SIGTERM)
    assert learner.wait() == 143, learner.said
    assert "stopped before the first update; there is nothing to save" in learner.out
    assert learner.err == ""
    processes.wait_until_gone()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_run_with_a_checkpoint_to_go_on_from(processes, tmp_path, number):
    run_dir = tmp_path / "run"
    run = start(processes, run_dir, "--max-staleness", "1")
    run.until(lambda: last(run_dir, "updates") >= 3, "updates")
    run.send(number) if number == signal.SIGTERM else run.interrupt()
    assert run.wait() == 128 + number, run.said
    processes.wait_until_gone()
    saved = load_params(run_dir)
    assert saved.update >= 3
    assert saved.metadata["position"] == 2 * saved.update
    assert summary(run_dir)["exit"] == signal.Signals(number).name
    resumed = learn(processes, run_dir, "--resume", "--steps", str(4 * (saved.update + 5)))
    assert f"resumed at update {saved.update:,}" in resumed.out
    assert load_params(run_dir).metadata["position"] == 2 * (saved.update + 5)
    assert max(values(run_dir, "learner/lag_updates_max")) <= 1  # after the resume too
    for a, b in itertools.pairwise(read_rows(run_dir / "metrics.jsonl")):
        assert a["env_steps"] <= b["env_steps"]


def test_a_warm_start_ends_with_the_runs_time_and_begins_anew_at_a_resume(processes, tmp_path):
    run_dir = tmp_path / "run"
    never = ("--warm-start.reward", "0.9", "--warm-start.max-updates", "1000000")
    run = learn(processes, run_dir, *WARM, *never, "--seconds", "5")
    assert "warm start: supervised" in run.out
    assert "done, --seconds are over before the first update" in run.out.splitlines()[-1]
    assert (summary(run_dir)["exit"], summary(run_dir)["updates"]) == ("seconds", 0)
    assert not list(run_dir.glob("checkpoints/*"))
    assert run.err == ""
    resumed = learn(
        processes, run_dir, "--resume", "--warm-start.reward", "0.000001", "--seconds", "600", "--steps", "4"
    )
    assert "warm start: done" in resumed.out
    assert summary(run_dir)["exit"] == "steps"


def test_the_first_evaluation_ends_with_the_runs_time(processes, tmp_path):
    run_dir = tmp_path / "run"
    flags = ("--task", "text_tasks:stepped", "--held-out.num-prompts", "12", "--reward.timeout-s", "600")
    (tmp_path / "allowed").write_text("0")  # it never comes to its end
    run = learn(processes, run_dir, *flags, "--seconds", "20")
    assert (summary(run_dir)["exit"], summary(run_dir)["updates"]) == ("seconds", 0)
    assert summary(run_dir)["held_out_reward_before"] is summary(run_dir)["held_out_reward_after"] is None
    assert run.err == ""


def test_redundant_completions_stand_in_for_those_without_a_reward(processes, tmp_path):
    run_dir = tmp_path / "run"
    flags = ("--task", "text_tasks:flaky", "--rollout.redundant", "2", "--reward.retries", "0", "--steps", "40")
    learn(processes, run_dir, *flags, "--max-staleness", "1")
    unscored, used = last(run_dir, "reward/unscored"), last(run_dir, "rollout/redundant_used")
    assert 0 < used <= unscored
    names = {name for row in read_rows(run_dir / "metrics.jsonl") for name in row}
    assert names <= documented.llm_metrics()
    assert max(values(run_dir, "learner/lag_updates_max")) <= 1
    rows = [json.loads(line) for line in (run_dir / "samples.jsonl").read_text().splitlines()]
    assert all(len(row["completions"]) == 2 for row in rows)


def test_a_signal_before_the_first_update_ends_a_run_at_once(processes, tmp_path):
    run = start(processes, tmp_path / "run", *WARM)
    run.until(lambda: "warm start: supervised" in run.out, "the warm start")
    run.send(signal.SIGTERM)
    assert run.wait() == 143, run.said
    assert "Traceback" not in run.said
    processes.wait_until_gone()


def test_nothing_survives_a_run_that_is_killed(processes, tmp_path):
    run = start(processes, tmp_path / "run", "--task", "text_tasks:slow")
    run.until(lambda: last(tmp_path / "run", "updates") >= 1, "an update")
    assert any("seedx.envs.text.reward_worker" in process.cmdline() for process in processes.alive())
    run.popen.kill()
    processes.wait_until_gone()


# ---- tasks that go wrong


@pytest.mark.parametrize(
    ("fault", "said", "figure"),
    [
        ("loops", "no reward within 1 s (--reward.timeout-s)", "reward/timeouts"),
        ("raises", "LookupError: no such", "reward/failed"),
        ("allocates", "MemoryError", "reward/failed"),
        ("dies", "the worker exited with 7", "reward/restarts"),
        ("nan", "reward returned nan; numbers must be finite", "reward/failed"),
    ],
)
def test_a_run_goes_on_without_the_rewards_that_cannot_be_computed(processes, tmp_path, fault, said, figure):
    """Every third prompt's."""
    run_dir = tmp_path / "run"
    flags = ("--reward.timeout-s", "1", "--reward.retries", "0", "--steps", "20")
    run = learn(processes, run_dir, "--task", f"text_tasks:{fault}", *flags)
    ends, bad = summary(run_dir), last(run_dir, "reward/unscored")
    assert ends["exit"] == "steps"
    assert bad >= 4
    assert last(run_dir, figure) >= bad
    assert said in run.out
    assert ends["reward_mean"] > 1  # lengths of what could be scored, no zeros among them
    assert last(run_dir, "rollout/discarded_groups") in (bad // 2, bad // 2 - 1)  # perhaps some are still under way
    rows = [json.loads(line) for line in (run_dir / "samples.jsonl").read_text().splitlines()]
    for row in rows:
        assert {completion["reward"] is None for completion in row["completions"]} == {row["prompt"] == fault}


def test_a_run_goes_on_without_the_replies_that_never_come(processes, tmp_path):
    run_dir = tmp_path / "run"
    flags = ("--reward.timeout-s", "1", "--reward.retries", "0", "--steps", "16", "--rollout.max-tokens", "400")
    run = learn(processes, run_dir, "--task", "text_tasks:silent", *flags)
    assert summary(run_dir)["exit"] == "steps"
    assert "a reply of task text_tasks:silent failed: no reply within 1 s (--reward.timeout-s)" in run.out
    assert last(run_dir, "reward/unscored") >= 1
    for line in (run_dir / "samples.jsonl").read_text().splitlines():
        row = json.loads(line)
        for completion in row["completions"]:
            silent = row["prompt"] == "silent=" and completion["finish_reason"] == "stop"
            assert (completion["reward"] is None) == silent


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--task", "text_tasks:only_nan", "--grpo.max-discarded", "2"), "no reward could be computed"),
        (("--task", "text_tasks:empty"), "text_tasks:empty has no prompts (0)"),
        (
            ("--task", "text_tasks:unmade"),
            "unmade: making it raised RuntimeError: the data set is gone (text_tasks.py:",
        ),
        (("--task", "text_tasks:nowhere"), "text_tasks has no function 'nowhere'"),
        (("--task", "nowhere:make"), "there is no module 'nowhere'"),
        (("--task", "revers"), "Did you mean 'reverse'?"),
        (("--model", "/nowhere/model"), "The model '/nowhere/model' is none of these"),
        (("--rollout.max-prompt-tokens", "2"), "all 12 prompts are longer than --rollout.max-prompt-tokens"),
        (("--grpo.overlong-tokens", "9"), "grpo.overlong_tokens (9) must not exceed the 8 tokens"),
        ((*WARM, "--decode.memory-budget", "1MB"), "holds no decode engine"),
        ((*WARM, "--decode.memory-budget", "900TB"), "is more than the memory there is"),
        (("--lora.rank", "1000"), "lora.rank (1000) must be at most"),
        (("--grpo.advantage", "gae", "--grpo.dynamic-sampling"), "give --grpo.no-dynamic-sampling"),
    ],
)
def test_what_no_restart_mends_ends_the_run_with_one_clear_line(processes, tmp_path, flags, words):
    run = learn(processes, tmp_path / "run", *flags, code=2)
    assert words in run.err
    assert "Traceback" not in run.said
    assert "warm start" not in run.out  # which takes long


def test_a_run_on_its_own_lines_of_a_file(processes, tmp_path):
    pytest.importorskip("seedx.envs.text.jsonl_task")
    good = [json.dumps({"prompt": f"{number}+1=", "answer": str(number + 1)}) for number in range(20)]
    (tmp_path / "good.jsonl").write_text("\n".join(good) + "\n")
    (tmp_path / "bad.jsonl").write_text("\n".join([*good[:3], '{"prompt": "4+1=', *good[3:]]) + "\n")
    flags = ("--steps", "8", "--rollout.max-tokens", "8")
    learn(processes, tmp_path / "run", "--task", f"jsonl:{tmp_path}/good.jsonl", *flags)
    run = learn(processes, tmp_path / "bad", "--task", f"jsonl:{tmp_path}/bad.jsonl", *flags, code=2)
    assert "4" in run.err
    assert "bad.jsonl" in run.err
    assert "Traceback" not in run.said


# ---- evaluation


def evaluate(processes, run_dir, *flags, code=0):
    run = processes.launch("evaluate.py", str(run_dir), *flags, env=QUICK)
    assert run.wait(200) == code, run.said
    return run


def test_a_run_is_scored_on_prompts_that_it_was_not_trained_on(processes, tmp_path, finished):
    run = evaluate(processes, finished, "--num-prompts", "6", "--num-samples", "4", "--seed", "3")
    found = re.search(r"^reward (\S+) \+- (\S+) over 6 prompts x 4, pass@1 (\S+)\n\Z", run.out, re.MULTILINE)
    assert found, run.said
    result = json.loads((finished / "evaluation.json").read_text())
    assert float(found.group(1)) == pytest.approx(result["mean"], abs=1e-3)
    assert result["interval"][0] <= result["mean"] <= result["interval"][1]
    assert (result["num_prompts"], result["num_samples"], result["update"]) == (6, 4, 10)
    assert len(result["by_prompt"]) == 6
    assert 0 <= result["pass@1"] <= 1
    rows = [json.loads(line) for line in (finished / "evaluation.jsonl").read_text().splitlines()]
    assert len(rows) == 24
    assert {row["prompt"][:2] for row in rows} == {"te"}
    assert sum(row["reward"] for row in rows) / 24 == pytest.approx(result["mean"])
    texts = [row["completion"] for row in rows]
    for flags, same in ((("--seed", "3"), True), (("--seed", "4"), False)):
        evaluate(processes, finished, "--num-prompts", "6", "--num-samples", "4", *flags)
        again = [json.loads(line)["completion"] for line in (finished / "evaluation.jsonl").read_text().splitlines()]
        assert (again == texts) is same
    greedy = evaluate(processes, finished, "--num-prompts", "2", "--num-samples", "3", "--temperature", "0")
    assert "over 2 prompts x 3" in greedy.out
    rows = [json.loads(line) for line in (finished / "evaluation.jsonl").read_text().splitlines()]
    assert len({row["completion"] for row in rows[:3]}) == 1
    all_ = evaluate(processes, finished, "--num-prompts", "13")
    assert "task text_tasks:bytes_ has 12 test prompts, of 13 asked for; all are used." in all_.out
    assert "over 12 prompts x 1" in all_.out
    other = evaluate(processes, finished, "--num-prompts", "4", "--task", "sums")
    assert "over 4 prompts x 1" in other.out
    assert json.loads((finished / "evaluation.json").read_text())["task"] == "sums"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--task", "text_tasks:untested"), "text_tasks:untested has no test prompts"),
        (("--task", "nowhere"), "task 'nowhere' is unknown"),
        (("--temperature", "-1"), "--temperature (-1.0) must be finite and not negative"),
        (("--task", "text_tasks:only_nan"), "no completion of task text_tasks:only_nan could be scored"),
        (("--num-prompts", "0"), "--num-prompts (0) must be positive"),
    ],
)
def test_an_evaluation_that_cannot_be_done_says_why(processes, finished, flags, words):
    run = evaluate(processes, finished, *flags, code=2)
    assert words in run.said
    assert "Traceback" not in run.said


def test_a_run_without_a_checkpoint_is_not_evaluated(processes, tmp_path):
    learn(processes, tmp_path / "run", "--task", "text_tasks:empty", code=2)
    run = evaluate(processes, tmp_path / "run", code=2)
    assert "there is no checkpoint in" in run.err
    assert "Traceback" not in run.err


# ---- beside a run


def test_the_learners_engine_answers_others_and_its_checkpoints_can_be_evaluated_meanwhile(processes, tmp_path):
    run_dir = tmp_path / "run"
    run = start(processes, run_dir, "--serve-port", "0", "--checkpoint.interval-s", "0.5")
    address = run.until(lambda: re.search(r"the engine answers at (\S+)", run.out), "the server").group(1)
    request = pb.GenerateRequest(tokens=pb.GenerateRequest.Tokens(ids=[97, 98]), max_tokens=6, num_samples=2)

    def version():
        with generate(address, request, Access(), 60.0) as replies:
            completions = gather(replies, 2)
        assert all(completion.finish_reason in ("length", "stop") for completion in completions)
        return max(max(completion.versions) for completion in completions)

    first = version()
    run.until(lambda: version() > first + 2, "newer weights")
    # priority = 5, max_tokens = 6, token_content { token_ids: 97, 98 }, by the field numbers of google-jetstream 0.2.2
    with grpc.insecure_channel(address) as channel:
        call = channel.unary_stream("/jetstream_proto.Orchestrator/Decode")
        replies = [
            pb.JetStreamReply.FromString(reply) for reply in call(b"\x18\x05\x20\x06\x32\x04\x0a\x02ab", timeout=60)
        ]
    tokens = [token for reply in replies for sample in reply.stream_content.samples for token in sample.token_ids]
    assert 1 <= len(tokens) <= 6
    run.until(lambda: newest_update(run_dir) >= 1, "a checkpoint")
    assert "over 3 prompts x 1" in evaluate(processes, run_dir, "--num-prompts", "3").out
    assert run.popen.poll() is None
    updates = last(run_dir, "updates")
    run.until(lambda: last(run_dir, "updates") > updates, "further updates")
    run.send(signal.SIGTERM)
    assert run.wait() == 143, run.said
    processes.wait_until_gone()
    assert set(values(run_dir, "decode/compilations")) == {0}


def test_a_port_that_is_taken_ends_the_run_with_one_clear_line(processes, tmp_path):
    first = start(processes, tmp_path / "first", "--serve-port", "0")
    address = first.until(lambda: re.search(r"the engine answers at (\S+)", first.out), "the server").group(1)
    port = address.rpartition(":")[2]
    second = start(processes, tmp_path / "second", "--serve-port", port)
    assert second.wait(200) == 2, second.said
    assert port in second.err
    assert "Traceback" not in second.said


# ---- a Reverb server between


@pytest.mark.external
def test_a_run_through_reverb_learns_from_the_same_groups_in_the_same_order(processes, tmp_path, finished):
    find_uv()
    run_dir = tmp_path / "run"
    learn(processes, run_dir, *IN_STEP, "--replay", "reverb")
    through, whole = load_params(run_dir), load_params(finished)
    assert through.metadata["position"] == whole.metadata["position"]
    assert_bit_equal(through.params, whole.params)
    assert not values(run_dir, "replay/repeated_groups")


@pytest.mark.external
def test_a_resumed_run_passes_over_the_groups_that_it_left_in_a_server(processes, tmp_path):
    run_dir, flags = tmp_path / "run", (*TINY, "--max-staleness", "2")
    server = Launched(processes, json.loads(tables_json(cli.parse([*flags])))[0])
    server.serve()
    run = start(processes, run_dir, *flags, "--checkpoint.interval-s", "0.01", "--replay", f"reverb://{server.address}")
    run.until(lambda: newest_update(run_dir) >= 3, "a checkpoint")
    [learner] = processes.alive("seedx.run", "learner")

    def stopped_with_groups():
        learner.suspend()
        if not (size := table_info(server.address, TABLE).current_size):
            learner.resume()
        return size

    left = run.until(stopped_with_groups, "groups in the server")
    learner.kill()
    assert run.wait() == 137, run.said
    saved = newest_update(run_dir)
    resumed = start(processes, run_dir, "--resume", "--steps", str(4 * (saved + 6)))
    assert resumed.wait(300) == 0, resumed.said
    assert load_params(run_dir).metadata["position"] == 2 * (saved + 6)
    assert last(run_dir, "replay/foreign_groups") == left
    assert f"begins with {left:,} items that are not its own, and passes over them" in resumed.out
    assert max(values(run_dir, "learner/lag_updates_max")) <= 2


@pytest.mark.external
def test_two_runs_at_one_server_do_not_take_each_others_groups_for_long(processes, tmp_path):
    server = Launched(processes, json.loads(tables_json(cli.parse([*TINY])))[0])
    server.serve()
    flags = ("--replay", f"reverb://{server.address}", "--max-staleness", "20")  # much is lost at a time
    runs = [start(processes, tmp_path / name, *flags) for name in ("a", "b")]
    until(lambda: any(run.popen.poll() is not None for run in runs), "the end of one", 400)
    [ended, *_] = [run for run in runs if run.popen.poll() is not None]
    assert ended.popen.poll() == 2, ended.said
    assert "another run inserts groups into this run's table" in ended.err
    assert "Traceback" not in ended.said


@pytest.mark.external
def test_a_reverb_server_that_is_killed_costs_a_run_no_group(processes, tmp_path, finished):
    find_uv()
    run_dir = tmp_path / "run"
    flags = (*IN_STEP, "--replay", "reverb", "--task", "text_tasks:slow")
    run = start(processes, run_dir, *flags)
    run.until(lambda: last(run_dir, "updates") >= 2, "updates", 200)
    for process in processes.alive("--allow-unauthenticated"):
        process.kill()
    assert run.wait(300) == 0, run.said
    processes.wait_until_gone()
    assert_bit_equal(load_params(run_dir).params, load_params(finished).params)

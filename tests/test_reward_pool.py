"""The pool of reward workers against tasks that do everything wrong."""

import json
import math
import os
import secrets
import signal
import sys
import threading
import time
from concurrent.futures import CancelledError
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from processes import Processes, until

from seedx.checks import ConfigError
from seedx.envs.text.reward_worker import as_scores
from seedx.envs.text.rewards import Reply, RewardPool, RewardQueueFullError
from seedx.envs.text.task import Prompt
from seedx.metrics import Metrics
from seedx.reward_config import RewardConfig
from seedx.threads import Crew

pytestmark = pytest.mark.slow  # they start processes, some of which run until their deadline

S = 100.0  # bounds hanging alone
PATIENT = RewardConfig(timeout_s=S, retries=0)


@pytest.fixture
def open_pool(tmp_path, monkeypatch):
    """Makes pools whose workers are counted by a mark in their environment."""
    with Processes(tmp_path) as processes:
        name, value = processes._mark.split("=")
        monkeypatch.setenv(name, value)
        monkeypatch.setenv(
            "PYTHONPATH", os.pathsep.join((str(Path(__file__).parent.parent), str(Path(__file__).parent)))
        )

        @contextmanager
        def opened(config=PATIENT, task="make", **kwargs):
            pool = RewardPool(f"faulty_tasks:{task}", config, metrics := Metrics(), crew := Crew(), **kwargs)
            pool.metrics, pool.crew, pool.processes = metrics, crew, processes
            try:
                yield pool
            finally:
                pool.close()
            # This process has the mark only in os.environ, not in /proc.
            assert not processes.alive(), "a process outlived the pool"
            assert not pool._thread.is_alive()

        yield opened


def ask(pool, text, completion="", answer=""):
    return pool.submit(Prompt(text, answer=answer), completion)


def figures(pool, *names):
    row = pool.metrics.snapshot()
    return [row.get(f"reward/{name}", 0) for name in names]


def requests_of(pool):
    return [request for worker in pool._workers for request in list(worker.requests.values())]


def running(pool):
    """The texts of prompts whose rewards are being computed."""
    return [json.loads(r.line)["prompt"]["text"] for r in requests_of(pool) if math.isfinite(r.deadline)]


def expire(pool, text):
    """Has the time of a reward be over as soon as it runs; others have all the time that they need."""
    until(lambda: text in running(pool), "the reward")
    for request in requests_of(pool):
        if json.loads(request.line)["prompt"]["text"] == text:
            request.deadline = 0.0


@pytest.mark.parametrize("task", ["make", "make_waiting"])
def test_rewards_arrive_with_their_completions(open_pool, task):
    with open_pool(RewardConfig(workers=2, timeout_s=S), task) as pool:
        futures = [ask(pool, "length", "x" * n) for n in range(200)]
        assert [future.result(S) for future in futures] == [{"reward": float(n)} for n in range(200)]
        scores = ask(pool, "components", "4", answer="4").result(S)
        assert scores == {"right": 1.0, "length": 1.0, "turns": 3.0}
        prompt = Prompt("extra", messages=({"role": "user", "content": "é\udcff"},), extra={"weight": 0.5})
        assert pool.submit(prompt, "\udc80").result(S) == {"weight": 0.5, "messages": 1.0}
        assert pool.crew.failure is None
        row = pool.metrics.snapshot()
        assert row["reward/latency_ms"] > 0
        assert not {"reward/failed", "reward/restarts", "reward/unscored"} & row.keys()


def test_a_line_longer_than_a_pipe_arrives(open_pool):
    with open_pool() as pool:
        futures = [ask(pool, "length", "x" * 2**20) for _ in range(3)]
        assert [future.result(S) for future in futures] == [{"reward": 2.0**20}] * 3


def test_workers_have_no_jax_and_the_current_directory(open_pool):
    with open_pool() as pool:
        assert ask(pool, "environment").result(S) == {"jax": 0.0, "here": 1.0}


NO_REWARDS = {
    "raises": r"LookupError: no such\udcffanswer (faulty_tasks.py:",
    "exits": "SystemExit: 3",
    "nan": "reward returned nan; numbers must be finite",
    "infinite": "{'right': 1.0, 'length': inf}; numbers must be finite",
    "none": "reward returned None (NoneType); a number",
    "word": "reward returned '1.0' (str); a number",
    "empty": "empty mapping",
    "array": "TypeError",
    "allocates": "MemoryError",
    "no_such": "AttributeError",
}


def test_what_is_no_reward_leaves_no_score_and_the_worker_alive(open_pool, capsys):
    with open_pool(RewardConfig(timeout_s=S, retries=2)) as pool:
        for text in NO_REWARDS:
            assert ask(pool, text).result(S) is None
            assert ask(pool, "length", "four").result(S) == {"reward": 4.0}
        assert figures(pool, "failed", "retried", "unscored", "restarts", "timeouts") == [30, 20, 10, 0, 0]
        assert ask(pool, "loops_no_more").result(S) is None
    lines = [line for line in capsys.readouterr().out.splitlines() if "faulty_tasks:make failed" in line]
    for line, said in zip(lines, NO_REWARDS.values(), strict=True):  # Each once, and an eleventh kind not at all.
        assert said in line
    assert "others are only counted" in lines[-1]


def test_replies_arrive_with_their_turns_and_beside_rewards(open_pool):
    with open_pool() as pool:
        prompt = Prompt("length", answer="\udc80a")
        with pytest.raises(TypeError, match="JSON"):
            pool.reply(Prompt("length", extra={"bad": b""}), ["count"])
        assert pool.reply(Prompt("length", answer="a"), ["\udc80", "count"]).result(S) == Reply("a2€")
        assert pool.reply(prompt, ["none"]).result(S) == Reply(None)
        assert pool.submit(prompt, "four").result(S) == {"reward": 4.0}
        row = pool.metrics.snapshot()
        assert row["reply/latency_ms"] > 0
        assert "reward/failed" not in row


NO_REPLIES = {
    "number": "a reply of task faulty_tasks:make failed: TypeError: reply returned 3 (int); text, or None",
    "surrogate": "UnicodeEncodeError",
    "raises": "LookupError",
    "dies": "exited with 7",
}


def test_what_is_no_reply_is_told_from_the_end_of_a_conversation(open_pool, capsys):
    with open_pool() as pool:
        for turn in NO_REPLIES:
            assert pool.reply(Prompt("length"), [turn]).result(S) is None
        endless = pool.reply(Prompt("length"), ["loops"])
        expire(pool, "length")
        assert endless.result(S) is None
        assert pool.reply(Prompt("length"), ["none"]).result(S) == Reply(None)
        assert figures(pool, "failed", "unscored", "restarts", "timeouts") == [5, 5, 2, 1]
    lines = [line for line in capsys.readouterr().out.splitlines() if "a reply of task" in line]
    for line, said in zip(lines, [*NO_REPLIES.values(), "no reply within 100 s (--reward.timeout-s)"], strict=True):
        assert said in line


def test_a_retry_that_works_scores(open_pool, tmp_path):
    with open_pool(RewardConfig(timeout_s=S, retries=1)) as pool:
        assert ask(pool, "flaky", str(tmp_path / "mark")).result(S) == {"reward": 1.0}
        assert figures(pool, "failed", "retried", "unscored") == [1, 1, 0]


def test_a_reward_is_ended_after_its_time(open_pool, capsys):
    with open_pool(RewardConfig(timeout_s=0.3, retries=1)) as pool:
        started = time.monotonic()
        assert ask(pool, "loops").result(S) is None
        assert time.monotonic() - started >= 2 * 0.3
        assert figures(pool, "failed", "retried", "unscored", "restarts", "timeouts") == [2, 1, 1, 2, 2]
    assert "no reward within 0.3 s (--reward.timeout-s)" in capsys.readouterr().out


def test_a_pool_that_never_scored_says_what_came_of_its_attempts(open_pool):
    with open_pool(RewardConfig(timeout_s=S, retries=1)) as pool:
        assert pool.why_nothing_scored() is None  # nothing was tried
        assert ask(pool, "raises").result(S) is None
        assert pool.why_nothing_scored().endswith(
            "All 2 attempts failed; see above why, and mend the task or its --reward settings."
        )
        future = ask(pool, "sleeps")
        assert pool._metrics.snapshot()["reward/open"] == 1
        expire(pool, "sleeps")
        until(lambda: pool._num_late == 1, "the deadline")
        expire(pool, "sleeps")
        assert future.result(S) is None
        assert (
            "All 4 attempts failed, 2 of them because they took longer than 100 s; raise --reward.timeout-s"
            in pool.why_nothing_scored()
        )
        assert ask(pool, "length", "x").result(S) == {"reward": 1.0}
        assert pool.why_nothing_scored() is None
        assert pool._metrics.snapshot()["reward/open"] == 0


@pytest.mark.parametrize("text", ["loops", "sleeps"])
def test_a_reward_that_never_ends_costs_its_worker_and_no_other_reward(open_pool, text):
    with open_pool() as pool:
        before = [ask(pool, "length", "x") for _ in range(30)]  # so quick that requests are sent ahead
        endless = ask(pool, text)
        after = [ask(pool, "length", "xx") for _ in range(30)]
        expire(pool, text)
        assert endless.result(S) is None
        assert [future.result(S) for future in (*before, *after)] == [{"reward": 1.0}] * 30 + [{"reward": 2.0}] * 30
        assert figures(pool, "failed", "retried", "unscored", "restarts", "timeouts") == [1, 0, 1, 1, 1]


def test_beside_a_reward_that_never_ends_others_are_computed_meanwhile(open_pool):
    with open_pool(RewardConfig(workers=2, timeout_s=S)) as pool:
        endless = ask(pool, "loops")
        for _ in range(20):
            assert ask(pool, "length", "x").result(S) == {"reward": 1.0}
        assert not endless.done()
    assert endless.cancelled()


@pytest.mark.parametrize(("text", "said"), [("dies", "exited with 7"), ("segfaults", "killed by signal 11")])
def test_a_worker_that_dies_is_replaced(open_pool, capsys, text, said):
    with open_pool(RewardConfig(timeout_s=S, retries=1)) as pool:
        futures = [ask(pool, "length", "x"), ask(pool, text), ask(pool, "length", "x")]
        assert [future.result(S) for future in futures] == [{"reward": 1.0}, None, {"reward": 1.0}]
        assert figures(pool, "failed", "retried", "unscored", "restarts") == [2, 1, 1, 2]
    assert said in capsys.readouterr().out


def test_what_a_reward_prints_is_no_reply(open_pool):
    with open_pool() as pool:
        assert [ask(pool, "prints").result(S) for _ in range(3)] == [{"reward": 1.0}] * 3
        assert figures(pool, "failed", "restarts") == [0, 0]


def test_a_child_that_comes_back_answers_nothing(open_pool):
    with open_pool() as pool:
        assert [ask(pool, "forks_and_returns").result(S) for _ in range(5)] == [{"reward": 1.0}] * 5
        assert ask(pool, "length", "x").result(S) == {"reward": 1.0}
        assert figures(pool, "failed", "restarts") == [0, 0]


def test_signals_work_in_a_reward_that_computes_and_fail_openly_in_one_that_waits(open_pool, capsys):
    with open_pool() as pool:
        assert ask(pool, "alarm").result(S) == {"reward": 1.0}
    with open_pool(task="make_waiting") as pool:
        assert ask(pool, "alarm").result(S) is None
    assert "signal only works in main thread" in capsys.readouterr().out


@pytest.mark.parametrize("how", ["late", "dies"])
def test_all_that_a_reward_started_dies_with_it(open_pool, tmp_path, how):
    def children():
        return [process for process in pool.processes.alive() if any("SIG_IGN" in word for word in process.cmdline())]

    with open_pool() as pool:
        future = ask(pool, "leaves_children", "dies" if how == "dies" else str(tmp_path / "there"))
        if how == "late":
            until((tmp_path / "there").exists, "the children")
            until(lambda: len(children()) == 2, "both children")
            expire(pool, "leaves_children")
        assert future.result(S) is None
        assert not children()


@pytest.mark.parametrize("mode", ["strict", "unsafe"])
def test_a_program_in_a_sandbox_dies_with_its_reward(open_pool, tmp_path, mode):
    mark = f"600.{secrets.randbelow(10**12)}"

    def sleepers():
        return [process for process in psutil.process_iter(["cmdline"]) if mark in (process.info["cmdline"] or ())]

    with open_pool(RewardConfig(timeout_s=S, retries=0, sandbox=mode)) as pool:
        scores = ask(pool, "runs", "print(1)", answer="1").result(S)
        assert scores == {"passed": 1.0, "strict": float(mode == "strict")}
        future = ask(pool, "runs", f"import subprocess; subprocess.run(['sleep', '{mark}'], start_new_session=True)")
        until(sleepers, "the program")
        expire(pool, "runs")
        assert future.result(S) is None
        until(lambda: not sleepers(), "its end")


def test_rewards_that_wait_are_computed_at_the_same_time(open_pool):
    with open_pool(RewardConfig(timeout_s=S, concurrency=3, retries=0), "make_waiting") as pool:
        futures = [ask(pool, "meets") for _ in range(6)]
        assert [future.result(S) for future in futures] == [{"reward": 1.0}] * 6


def test_of_rewards_at_the_same_time_only_the_late_one_suffers(open_pool):
    with open_pool(RewardConfig(timeout_s=S, concurrency=3, retries=0), "make_waiting") as pool:
        endless, other = ask(pool, "sleeps"), ask(pool, "sleeps_too")
        expire(pool, "sleeps")
        assert endless.result(S) is None
        until(lambda: "sleeps_too" in running(pool), "another try")
        assert [ask(pool, "length", "x").result(S) for _ in range(20)] == [{"reward": 1.0}] * 20
        assert not other.done()
        assert figures(pool, "failed", "timeouts", "unscored", "restarts") == [1, 1, 1, 1]


def test_of_rewards_at_the_same_time_only_the_one_that_crashes_suffers(open_pool, tmp_path):
    with open_pool(RewardConfig(timeout_s=S, concurrency=4, retries=0), "make_waiting") as pool:
        mark = str(tmp_path / "mark")
        crash, other = ask(pool, "dies_beside", mark), ask(pool, "stays", mark)
        more = [ask(pool, "length", "x") for _ in range(20)]
        assert [future.result(S) for future in (crash, other, *more)] == [None, *[{"reward": 1.0}] * 21]
        assert figures(pool, "failed", "unscored", "restarts") == [1, 1, 2]


def test_a_task_that_is_not_there_stops_the_crew_at_once(open_pool):
    with open_pool(task="make_typo") as pool:
        future = ask(pool, "length")
        with pytest.raises(CancelledError):
            future.result(S)
        assert pool.crew.stop.wait(S)
        assert isinstance(pool.crew.failure, ConfigError)
        assert "faulty_tasks has no function 'make_typo'" in str(pool.crew.failure)
        assert figures(pool, "restarts") == [0]
        with pytest.raises(RuntimeError, match="closed"):
            ask(pool, "length")


def test_a_task_prepares_itself_before_its_first_reward(open_pool):
    with open_pool(task="make_prepared") as pool:
        assert ask(pool, "prepared").result(S) == {"reward": 1.0}


def test_a_task_that_cannot_prepare_itself_stops_the_crew_at_once(open_pool):
    with open_pool(task="make_unprepared") as pool:
        assert pool.crew.stop.wait(S)
        assert isinstance(pool.crew.failure, ConfigError)
        assert "ConfigError: the model is gone" in str(pool.crew.failure)
        assert figures(pool, "restarts") == [0]


def test_a_task_without_its_sandbox_stops_the_crew_at_once(open_pool):
    with open_pool(task="make_sandboxed") as pool:
        assert pool.crew.stop.wait(S)
        assert isinstance(pool.crew.failure, ConfigError)
        assert "SandboxError: This system refuses a sandbox" in str(pool.crew.failure)
        assert figures(pool, "restarts") == [0]


@pytest.mark.parametrize(
    ("task", "said"), [("make_nothing", "RuntimeError: the data set is gone (faulty_tasks.py:"), ("make_end", "with 9")]
)
def test_a_task_that_cannot_be_made_stops_the_crew_after_some_tries(open_pool, task, said):
    with open_pool(task=task) as pool:
        assert pool.crew.stop.wait(S)
        assert isinstance(pool.crew.failure, ConfigError)
        assert f"faulty_tasks:{task}' failed 3 times in a row while it started" in str(pool.crew.failure)
        assert said in str(pool.crew.failure)


def test_a_task_that_can_be_made_the_second_time_is_used(open_pool, tmp_path, monkeypatch):
    monkeypatch.setenv("FLAKY_MARK", str(tmp_path / "mark"))
    with open_pool(task="make_flaky") as pool:
        assert ask(pool, "length", "x").result(S) == {"reward": 1.0}
        assert pool.crew.failure is None


def test_a_full_queue_is_refused_and_loses_nothing(open_pool):
    with open_pool(max_waiting=3) as pool:
        endless = ask(pool, "loops")
        until(lambda: running(pool), "the first reward")
        futures = [ask(pool, "length", "x") for _ in range(3)]
        with pytest.raises(RewardQueueFullError, match=r"3 completions wait .* faulty_tasks:make"):
            ask(pool, "length", "x")
        expire(pool, "loops")
        assert endless.result(S) is None
        assert [future.result(S) for future in futures] == [{"reward": 1.0}] * 3
        assert ask(pool, "length", "xx").result(S) == {"reward": 2.0}


def test_a_prompt_that_is_no_json_is_refused(open_pool):
    with open_pool() as pool:
        with pytest.raises(TypeError, match="set"):
            pool.submit(Prompt("length", extra={"ids": {1, 2}}), "x")
        assert ask(pool, "length", "x").result(S) == {"reward": 1.0}


def test_a_cancelled_completion_is_skipped(open_pool):
    with open_pool() as pool:
        endless, skipped, last = ask(pool, "loops"), ask(pool, "dies"), ask(pool, "length", "x")
        assert skipped.cancel()
        expire(pool, "loops")
        assert endless.result(S) is None
        assert last.result(S) == {"reward": 1.0}
        assert figures(pool, "failed") == [1]


def test_close_and_the_crews_end_cancel_what_is_open(open_pool):
    with open_pool(RewardConfig(workers=2, timeout_s=S)) as pool:
        futures = [ask(pool, "loops") for _ in range(5)]
        pool.close()
        assert all(future.cancelled() for future in futures)
        with pytest.raises(RuntimeError, match="closed"):
            ask(pool, "length")
    with open_pool() as pool:
        future = ask(pool, "sleeps")
        pool.crew.fail(RuntimeError("something else"))
        with pytest.raises(CancelledError):
            future.result(S)


OWNER = """
import sys, time
from seedx.envs.text.rewards import RewardPool
from seedx.envs.text.task import Prompt
from seedx.metrics import Metrics
from seedx.reward_config import RewardConfig
from seedx.threads import Crew
pool = RewardPool("faulty_tasks:make", RewardConfig(workers=2, timeout_s=600), Metrics(), Crew())
pool.submit(Prompt("leaves_children"), sys.argv[1])
pool.submit(Prompt("loops"), "")
time.sleep(600)
"""


def test_nothing_outlives_a_killed_owner(tmp_path):
    with Processes(tmp_path) as processes:
        owner = processes.start(sys.executable, "-c", OWNER, str(tmp_path / "there"))
        owner.until((tmp_path / "there").exists, "the children of a reward")
        assert len(processes.alive()) >= 6  # it, two guardians, their workers, two children, one of them elsewhere
        owner.send(signal.SIGKILL)
        owner.wait()
        processes.wait_until_gone()


def test_a_killed_worker_is_replaced_with_its_guardian(open_pool):
    with open_pool(RewardConfig(timeout_s=S, retries=1)) as pool:
        assert ask(pool, "length", "x").result(S) == {"reward": 1.0}
        for _ in range(2):
            for process in pool.processes.alive():
                process.kill()
            assert ask(pool, "length", "x").result(S) == {"reward": 1.0}


def test_submitting_from_many_threads_answers_all(open_pool):
    with open_pool(RewardConfig(workers=2, timeout_s=S)) as pool:
        sums = []

        def work(n):
            sums.append(sum(ask(pool, "length", "x" * n).result(S)["reward"] for _ in range(50)))

        threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(S)
        assert sorted(sums) == [50.0 * n for n in range(8)]


def test_thousands_of_rewards_a_second(open_pool):
    """Says the figure; what is asserted only catches a wait per reward."""
    with open_pool() as pool:
        ask(pool, "length").result(S)
        started = time.monotonic()
        futures = [ask(pool, "length", "x" * 400) for _ in range(5000)]
        assert all(future.result(S) == {"reward": 400.0} for future in futures)
        print(f"{5000 / (time.monotonic() - started):,.0f} rewards/s")


def test_an_unsafe_sandbox_is_said_loudly(open_pool, capsys):
    with open_pool(RewardConfig(sandbox="unsafe")):
        pass
    assert "WARNING: --reward.sandbox unsafe" in capsys.readouterr().out


@pytest.mark.parametrize("reward", [True, 1, 2.5])
def test_a_number_is_a_reward(reward):
    assert as_scores(reward) == {"reward": float(reward)}


@pytest.mark.parametrize("reward", [{1: 2.0}, {"a": None}, {"a": "b"}, [1.0], b"1", {"a": {"b": 1.0}}])
def test_what_is_no_number_is_refused(reward):
    with pytest.raises(TypeError, match="a number, or a mapping of names to numbers, is needed"):
        as_scores(reward)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"workers": 0}, r"RewardConfig.workers \(0\) must be positive"),
        ({"timeout_s": 0.0}, r"RewardConfig.timeout_s \(0.0\) must be positive"),
        ({"timeout_s": 601.0}, r"reward.timeout_s \(601.0\) must be at most 600"),
        ({"retries": -1}, r"RewardConfig.retries \(-1\) must not be negative"),
        ({"memory_bytes": 1000}, r"reward.memory_bytes \(1000\) must be at least"),
        ({"concurrency": 0}, r"RewardConfig.concurrency \(0\) must be positive"),
    ],
)
def test_settings_that_cannot_work_are_refused(values, message):
    with pytest.raises(ConfigError, match=message):
        RewardConfig(**values)

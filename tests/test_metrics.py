"""Counters, timers and distributions of an interval; returns of episodes; the files they land in."""

import ast
import json
import math
import re
import subprocess
import sys
import threading

import documented
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from processes import ROOT

from seedx.metrics import EpisodeStats, Metrics
from seedx.report import interval_ratio
from seedx.runlog import SUMMARY_KEYS, History, RunLog, read_rows, write_summary
from seedx.types import StepType

FIRST, MID, LAST = map(int, StepType)


def counts(inserted: int, sampled: int) -> dict[str, int]:
    return {"replay/inserted": inserted, "replay/sampled": sampled}


def test_the_replay_ratio_of_an_interval_is_that_of_what_came_and_went_in_it():
    name = "replay/interval_samples_per_insert"
    assert interval_ratio(counts(1000, 4000), counts(1010, 4020)) == {name: 2.0}  # 3.98 over the whole run
    assert interval_ratio({}, counts(10, 20)) == {}
    assert interval_ratio(counts(10, 20), counts(10, 28)) == {}
    assert interval_ratio(counts(10, 20), counts(4, 8)) == {}


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_every_metric_that_the_code_names_is_documented():
    """Whole runs look at the rest: names that are put together, and endings."""
    sources = (path.read_text() for path in (ROOT / "seedx").rglob("*.py"))
    words = (node.value for text in sources for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Constant))
    pattern = re.compile(r"(server|batcher|store|queue|replay|learner|rollout|reward|weights)/[a-z_]+")
    names = {word for word in words if isinstance(word, str) and pattern.fullmatch(word)}
    assert {"replay/lost_upper_bound", "queue/put_wait"} <= names
    known = documented.llm_metrics()
    assert not {name for name in names if not known & {name, f"{name}_ms", f"{name}_mean"}}


def test_counters_are_totals_with_rates_of_the_interval():
    clock = Clock()
    metrics = Metrics(rates=("env_steps", "frames"), totals={"env_steps": 1000}, clock=clock)
    metrics.count("env_steps", 50)
    metrics.count("batcher/full")
    clock.now += 2
    assert metrics.snapshot() == {"env_steps": 1050, "env_steps_per_s": 25, "batcher/full": 1}
    clock.now += 4
    assert metrics.snapshot() == {"env_steps": 1050, "env_steps_per_s": 0, "batcher/full": 1}


def test_gauges_stay_and_averages_are_of_the_interval():
    metrics = Metrics()
    metrics.gauge("queue/unrolls", 3)
    metrics.gauge("queue/unrolls", 5)
    metrics.average("learner/loss", 1.0)
    metrics.average("learner/loss", 4.0)
    assert metrics.snapshot() == {"queue/unrolls": 5, "learner/loss": 2.5}
    assert metrics.snapshot() == {"queue/unrolls": 5}


def test_timers_report_mean_and_share_also_of_a_block_that_raises():
    clock = Clock()
    metrics = Metrics(clock=clock)
    with metrics.timer("learner/update"):
        clock.now += 0.25

    def fail():
        with metrics.timer("learner/update"):
            clock.now += 0.75
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    metrics.time("queue/put_wait", 0.5, times=10)
    clock.now += 1
    row = metrics.snapshot()
    assert row["learner/update_ms"] == pytest.approx(500)
    assert row["learner/update_share"] == pytest.approx(0.5)
    assert row["queue/put_wait_ms"] == pytest.approx(50)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=1000), st.integers(1, 7))
def test_distribution_equals_numpy(values, parts):
    metrics = Metrics()
    metrics.observe("lag", np.empty(0))
    for part in np.array_split(values, parts):
        metrics.observe("lag", part)
    row = metrics.snapshot()
    assert row["lag_mean"] == pytest.approx(np.mean(values), abs=1e-6)
    assert row["lag_max"] == max(values)
    assert row["lag_p99"] == pytest.approx(np.percentile(values, 99))


def test_distribution_is_bounded_but_mean_and_maximum_are_exact():
    metrics = Metrics()
    for value in [9e9, *range(5000)]:
        metrics.observe("x", value)
    row = metrics.snapshot()
    assert row["x_max"] == 9e9
    assert row["x_mean"] == pytest.approx((9e9 + sum(range(5000))) / 5001)
    assert 4000 <= row["x_p99"] < 5000


def test_threads_lose_nothing_between_snapshots():
    metrics, seen = Metrics(), []

    def work():
        for _ in range(2000):
            metrics.count("n")
            metrics.observe("v", 1.0)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        seen.append(metrics.snapshot().get("n", 0))
    assert metrics.snapshot()["n"] == 8000
    assert seen == sorted(seen)


def play(stats: EpisodeStats, rows: list[tuple[list[int], list[float]]], slots=slice(None)) -> list[tuple]:
    ended = []
    for step_type, reward in rows:
        returns, lengths = stats.step(slots, np.array(step_type, np.uint8), np.array(reward, np.float32))
        ended += zip(returns.tolist(), lengths.tolist(), strict=True)
    return ended


def test_time_limit_of_five_with_reward_one_always_returns_five():
    stats = EpisodeStats(1)
    episode = [([FIRST], [77.0]), *[([MID], [1.0])] * 4, ([LAST], [1.0])]  # The reward of FIRST belongs to no episode.
    assert play(stats, episode * 4) == [(5.0, 5)] * 4


def reference(step_types: np.ndarray, rewards: np.ndarray) -> list[tuple[float, int]]:
    """One slot after another, in plain Python, from the definition."""
    ended = []
    for slot in range(step_types.shape[1]):
        for end in np.flatnonzero(step_types[:, slot] == LAST):
            starts = np.flatnonzero(step_types[:end, slot] == FIRST)
            if len(starts):
                ended.append((float(rewards[starts[-1] + 1 : end + 1, slot].sum()), int(end - starts[-1])))
    return sorted(ended)


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**32 - 1), st.integers(1, 6), st.booleans())
def test_episodes_equal_the_definition(seed, num_envs, as_slice):
    rng = np.random.default_rng(seed)
    rows = 40
    step_types = np.full((rows, num_envs), MID, np.uint8)
    for slot in range(num_envs):  # Begins in mid-episode; LAST is followed by FIRST.
        for end in np.flatnonzero(rng.random(rows - 1) < 0.2):
            if step_types[end, slot] == MID:
                step_types[end : end + 2, slot] = LAST, FIRST
    rewards = rng.integers(-9, 9, (rows, num_envs)).astype(np.float32)
    rewards[step_types == FIRST] = np.nan
    slots = slice(3, 3 + num_envs) if as_slice else rng.permutation(10)[:num_envs]
    stats = EpisodeStats(10)
    assert sorted(play(stats, zip(step_types, rewards, strict=True), slots)) == reference(step_types, rewards)


def test_dropped_slots_forget_their_running_episode():
    stats = EpisodeStats(2)
    play(stats, [([FIRST, FIRST], [0, 0]), ([MID, MID], [1, 1])])
    stats.drop(np.array([1]))
    assert play(stats, [([LAST, LAST], [1, 1]), ([FIRST, FIRST], [0, 0]), ([LAST, LAST], [4, 3])]) == [
        (2.0, 2),
        (4.0, 1),
        (3.0, 1),
    ]


def test_window_and_resume():
    stats = EpisodeStats(1, window=3)
    assert math.isnan(stats.mean_return()[0])
    assert stats.snapshot() == {"episodes": 0, "return_episodes": 0}
    for value in (1, 2, 3, 10):
        play(stats, [([FIRST], [0]), ([MID], [0]), ([LAST], [value])])
    assert stats.mean_return() == (5.0, 3)
    stats = EpisodeStats(1, window=3, state=json.loads(json.dumps(stats.state())))
    play(stats, [([FIRST], [0]), ([LAST], [5])])
    assert stats.snapshot() == {
        "episodes": 5,
        "return_episodes": 3,
        "return_mean": 6.0,
        "episode_length_mean": pytest.approx(5 / 3),
        "return_interval_mean": 5.0,
    }
    assert "return_interval_mean" not in stats.snapshot()


def test_rows_are_valid_json_whatever_the_values(tmp_path):
    log = RunLog(tmp_path, tensorboard=False)
    log.write({"nan": float("nan"), "inf": np.float32(-np.inf), "n": np.int64(3), "list": np.array([1.0, np.nan])})
    log.close()
    text = (tmp_path / "metrics.jsonl").read_text()
    row = json.loads(text, parse_constant=pytest.fail)
    assert row == {"nan": None, "inf": None, "n": 3, "list": [1.0, None]}


def test_resumed_log_continues_behind_the_last_whole_line(tmp_path):
    log = RunLog(tmp_path, tensorboard=False)
    log.write({"env_steps": 1})
    log.close()
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(path.read_bytes() + b'{"env_st')
    assert read_rows(path) == [{"env_steps": 1}]
    log = RunLog(tmp_path, tensorboard=False)
    log.write({"env_steps": 2})
    log.close()
    assert read_rows(path) == [{"env_steps": 1}, {"env_steps": 2}]
    path.write_bytes(b"broken\n" + path.read_bytes())
    with pytest.raises(ValueError, match=r"metrics.jsonl:1 is not JSON"):
        read_rows(path)
    assert read_rows(tmp_path / "none") == []


@pytest.mark.parametrize("count", [0, 1, 2000, 2001, 4001, 86_403])
def test_history_is_even_and_ends_with_the_newest(count):
    history = History()
    for item in range(1, count + 1):
        history.add(item)
    group = max(1, 2 ** int(np.ceil(np.log2(max(count, 1) / 2000))))
    assert history.items == [*range(group, count, group), *[count] * (count > 0)]
    assert len(history.items) <= 2000


def test_threads_write_whole_lines(tmp_path):
    log = RunLog(tmp_path, tensorboard=False)
    threads = [threading.Thread(target=lambda: [log.write({"x": "y" * 500}) for _ in range(100)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    log.close()
    assert read_rows(tmp_path / "metrics.jsonl") == [{"x": "y" * 500}] * 400


def test_tensorboard_events_hold_the_finite_numbers(tmp_path):
    from tensorboardX.proto.event_pb2 import Event

    log = RunLog(tmp_path)
    log.write({"env_steps": 640, "learner/loss": 0.5, "bad": float("nan"), "exit": "text"})
    log.close()
    (path,) = (tmp_path / "tensorboard").iterdir()
    data, events = path.read_bytes(), []
    while data:  # A record is length, crc, data, crc.
        length = int.from_bytes(data[:8], "little")
        events.append(Event.FromString(data[12 : 12 + length]))
        data = data[16 + length :]
    scalars = {value.tag: (event.step, value.simple_value) for event in events for value in event.summary.value}
    assert scalars == {"env_steps": (640, 640.0), "learner/loss": (640, 0.5)}


def test_summary_is_whole_and_complete(tmp_path):
    summary = dict.fromkeys(SUMMARY_KEYS, 1) | {"return_mean": float("nan"), "extra": np.float32(0.5)}
    write_summary(tmp_path, summary)
    path = write_summary(tmp_path, summary | {"exit": "solved"})
    assert json.loads(path.read_text()) == {**summary, "return_mean": None, "exit": "solved", "extra": 0.5}
    assert [p.name for p in tmp_path.iterdir()] == ["summary.json"]
    with pytest.raises(ValueError, match="lag_updates_mean"):
        write_summary(tmp_path, {k: v for k, v in summary.items() if k != "lag_updates_mean"})


def test_imports_are_cheap():
    code = "import sys, seedx.metrics, seedx.runlog, seedx.console, seedx.curve; print(*sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"jax", "orbax", "matplotlib", "tensorboardX", "rich"} & set(out)

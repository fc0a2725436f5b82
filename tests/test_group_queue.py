"""Groups come to the learner once and in order, whatever a replay does that repeats, loses and mixes up."""

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from seedx.checks import ConfigError
from seedx.envs.text import group_queue
from seedx.envs.text.group import Group, Sample
from seedx.envs.text.group_queue import GroupQueue, example
from seedx.metrics import Metrics
from seedx.replay.fifo import Fifo
from seedx.replay.items import leaves_of
from seedx.replay.replay import ReplayTimeoutError


def group_of(position):
    tokens = np.arange(position % 3 + 1, dtype=np.int32)
    samples = [
        Sample(tokens, tokens >= 0, tokens.astype(np.float32), tokens, "stop", "", None, float(i)) for i in range(2)
    ]
    return Group(position, tokens, samples)


def running():
    return False


def positions(items):
    return items.state["position"].tolist()


class Unreliable(Fifo):
    """Does with each item what its script says next: "keep", "lose", "twice", or "late": after the next one."""

    def __init__(self, script=(), max_items=1000):
        super().__init__(max_items)
        self._script, self._late = iter(script), []

    def insert(self, items, priorities, timeout_s, sources=None):
        what = next(self._script, "keep")
        if what == "late":
            self._late.append(items)
            return np.zeros(1, np.uint64)
        for _ in range({"lose": 0, "keep": 1, "twice": 2}[what]):
            keys = super().insert(items, priorities, timeout_s)
        while self._late:
            super().insert(self._late.pop(), priorities, timeout_s)
        return keys if what != "lose" else np.zeros(1, np.uint64)


@pytest.fixture
def metrics():
    return Metrics()


def test_groups_come_in_the_order_in_which_they_were_put(metrics):
    groups = GroupQueue(Fifo(100), 0, metrics)
    for position in (3, 5, 6, 9):
        groups.put(group_of(position), running)
    items = groups.take(3, 1.0)
    assert positions(items) == [3, 5, 6]
    assert items.lengths.tolist() == [3 * (position % 3 + 1) for position in (3, 5, 6)]
    with pytest.raises(ReplayTimeoutError):
        groups.take(2, 0.01)
    groups.put(group_of(12), running)
    assert positions(groups.take(2, 1.0)) == [9, 12]  # the one that had come was kept
    assert not {name for name in metrics.snapshot() if name.startswith("replay/")}


def test_the_example_is_like_what_is_put(metrics):
    replay = Fifo(1)
    GroupQueue(replay, 0, metrics).put(group_of(7), running)
    item = replay.sample(1, 1.0).items
    assert leaves_of(item) == leaves_of(example(2))
    assert jax.tree.structure(item) == jax.tree.structure(example(2))


def test_another_run_at_the_same_replay_is_told_from_what_one_has_left_there(metrics):
    replay = Fifo(1000)
    other = GroupQueue(replay, 0, metrics)
    left, strays = 40, 16
    for position in range(left):
        other.put(group_of(position), running)
    groups = GroupQueue(replay, 0, metrics, held=left)
    for position in range(strays):
        other.put(group_of(position), running)
    groups.put(group_of(7), running)
    assert positions(groups.take(1, 1.0)) == [7]
    other.put(group_of(0), running)  # so it is still at work
    with pytest.raises(ConfigError, match="another run inserts groups into this run's table"):
        groups.take(1, 1.0)


def test_what_others_left_may_come_back_often(metrics):
    """From a server that is started again and again."""
    replay = Fifo(1000)
    groups = GroupQueue(replay, 0, metrics, held=40)
    GroupQueue(kept := Fifo(100), 0, Metrics()).put(group_of(0), running)
    item = kept.sample(1, 1.0).items
    for number in [*range(40)] * 5:
        item.state["order"][0] = [1, number]
        replay.insert(jax.tree.map(np.copy, item), np.ones(1, np.float32), 1.0)
    groups.put(group_of(7), running)
    assert positions(groups.take(1, 1.0)) == [7]
    assert metrics.snapshot()["replay/foreign_groups"] == 200


def test_what_comes_twice_is_passed_over(metrics):
    groups = GroupQueue(Unreliable(["twice", "keep", "twice"]), 0, metrics)
    for position in range(4):
        groups.put(group_of(position), running)
    assert positions(groups.take(2, 1.0)) == [0, 1]
    assert positions(groups.take(2, 1.0)) == [2, 3]
    assert metrics.snapshot()["replay/repeated_groups"] == 2


def test_what_another_run_left_is_passed_over(metrics):
    """The run before its resume, too, whose groups have the same numbers."""
    replay = Fifo(100)
    before = GroupQueue(replay, 4, Metrics())
    for position in range(100, 103):
        before.put(group_of(position), running)
    groups = GroupQueue(replay, 4, metrics)
    for position in range(2):
        groups.put(group_of(position), running)
    assert positions(groups.take(2, 1.0)) == [0, 1]
    assert metrics.snapshot()["replay/foreign_groups"] == 3


def test_what_comes_out_of_order_waits_for_what_was_before_it(metrics):
    groups = GroupQueue(Unreliable(["late", "late", "keep"]), 0, metrics)
    for position in range(3):
        groups.put(group_of(position), running)
    assert positions(groups.take(1, 1.0)) == [0]
    assert positions(groups.take(2, 1.0)) == [1, 2]


def test_what_got_lost_is_inserted_again_once_the_learner_waits_in_vain(metrics, monkeypatch):
    groups = GroupQueue(Unreliable(["lose", "keep", "lose", "keep"]), 0, metrics)
    for position in range(3):
        groups.put(group_of(position), running)
    groups.put_lost(running)
    with pytest.raises(ReplayTimeoutError):
        groups.take(3, 0.01)
    groups.put_lost(running)  # it has not waited for long
    assert "replay/resent_groups" not in metrics.snapshot()
    monkeypatch.setattr(group_queue, "_SILENCE_S", 0.0)
    groups.put_lost(running)
    groups.put_lost(running)  # nobody has waited since
    assert positions(groups.take(3, 1.0)) == [0, 1, 2]
    assert metrics.snapshot()["replay/resent_groups"] == 2


@given(
    script=st.lists(st.sampled_from(["keep", "lose", "twice", "late"]), max_size=20),
    batch=st.integers(1, 3),
    first=st.integers(0, 50),
)
def test_each_group_is_taken_once_and_in_order(script, batch, first):
    groups, taken, monkeypatch = GroupQueue(Unreliable(script), first, Metrics()), [], pytest.MonkeyPatch()
    with monkeypatch.context() as patch:
        patch.setattr(group_queue, "_SILENCE_S", 0.0)
        for position in range(9):
            groups.put(group_of(position), running)
        while len(taken) + batch <= 9:
            try:
                taken += positions(groups.take(batch, 0.0))
            except ReplayTimeoutError:
                groups.put_lost(running)
    assert taken == list(range(len(taken)))
    assert not groups._here or min(groups._here) >= first + len(taken)


def test_a_put_that_waits_for_room_ends_with_the_run(metrics):
    groups, stops = GroupQueue(Fifo(1), 0, metrics), iter([False, False, True])
    groups.put(group_of(0), running)
    groups.put(group_of(1), lambda: next(stops))
    assert next(stops, None) is None

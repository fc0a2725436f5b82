"""Who holds which slots: newer runs replace older ones, slots come back, and no two live streams share one."""

import math
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seedx.inference.streams import Refused, Status, Streams
from seedx.types import ArraySpec, EnvSpec

SPEC = EnvSpec("env", ArraySpec((2,), "float32"), ArraySpec((), "int32", 2))
OLD, NEW = (100, 5), (101, 4)


def make(num_slots=8, max_streams=100):
    return Streams(num_slots, max_streams)


def connect(streams, actor_id, run_id=OLD, groups=2, envs=2, evaluation=False):
    replaced = streams.hello(actor_id, run_id, groups, envs, evaluation)
    return replaced, [streams.attach(actor_id, run_id, group, SPEC) for group in range(groups)]


def slots_of(*streams):
    return np.concatenate([stream.slots for stream in streams]).tolist()


def test_an_actor_gets_its_own_place_so_that_runs_repeat():
    streams = make()
    _, second = connect(streams, 1)
    _, first = connect(streams, 0)
    assert slots_of(*first, *second) == list(range(8))
    assert [stream.first_env for stream in second] == [0, 2]
    assert streams.num_streams == 4


def test_training_is_heard_of_when_it_asks_or_was_answered():
    streams = make()
    assert streams.heard_at(50.0) == -math.inf
    _, training = connect(streams, 0)
    _, evaluation = connect(streams, 1, evaluation=True)
    for stream, seen in zip((*training, *evaluation), (10.0, 20.0, 30.0, 40.0), strict=True):
        stream.last_seen = seen
    assert streams.heard_at(50.0) == 20.0
    evaluation[0].asking = True
    assert streams.heard_at(50.0) == 20.0
    training[0].asking = True  # it waits for us
    assert streams.heard_at(50.0) == 50.0


def test_an_older_run_that_says_hello_after_a_newer_one_stays_out():
    streams = make()
    streams.hello(0, OLD, 2, 2, False)
    assert streams.hello(0, NEW, 2, 2, False) == []  # neither has a stream yet
    with pytest.raises(Refused) as refusal:
        streams.hello(0, OLD, 2, 2, False)
    assert refusal.value.status is Status.ALREADY_EXISTS
    with pytest.raises(Refused, match="replaced by a newer run of actor 0") as refusal:
        streams.attach(0, OLD, 0, SPEC)
    assert refusal.value.status is Status.ABORTED
    streams.attach(0, NEW, 0, SPEC)
    assert streams.hello(1, OLD, 2, 2, False) == streams.hello(1, OLD, 2, 2, False) == []  # a hello that is repeated


@pytest.mark.parametrize("run_id", [OLD, (99, 9), (100, 4)])
def test_an_older_or_equal_run_is_turned_away(run_id):
    streams = make()
    _, old = connect(streams, 0, OLD)
    with pytest.raises(Refused, match=r"actor 0 is connected already.*another id") as refusal:
        streams.hello(0, run_id, 2, 2, False)
    assert refusal.value.status is Status.ALREADY_EXISTS
    assert streams.all() == old


@pytest.mark.parametrize("run_id", [NEW, (100, 6)])
def test_a_newer_run_replaces_an_older_one(run_id):
    streams = make()
    _, old = connect(streams, 0, OLD)
    replaced, new = connect(streams, 0, run_id)
    assert replaced == old
    assert streams.all() == new
    assert slots_of(*new) == slots_of(*old)
    assert [stream.session for stream in (*old, *new)] == [0, 0, 1, 1]  # fresh keys
    for stream in old:
        streams.detach(stream)  # its handler ends later
    assert streams.all() == new
    with pytest.raises(Refused, match="replaced by a newer run of actor 0"):
        streams.attach(0, OLD, 0, SPEC)


def test_a_newer_run_that_does_not_fit_leaves_the_older_one_in_place():
    streams = make()
    _, first = connect(streams, 0)
    _, second = connect(streams, 1)
    with pytest.raises(Refused) as refusal:
        streams.hello(0, NEW, 2, 3, False)
    assert refusal.value.status is Status.RESOURCE_EXHAUSTED
    assert streams.all() == first + second
    with pytest.raises(Refused):  # and its slots are not given away
        streams.hello(2, OLD, 1, 1, False)


def test_slots_come_back_when_all_streams_of_an_actor_are_gone():
    streams = make(num_slots=4)
    _, (a, b) = connect(streams, 0)
    streams.detach(a)
    with pytest.raises(Refused, match=r"asks for 4 slots; 0 of 4 are free") as refusal:
        streams.hello(7, OLD, 2, 2, False)
    assert refusal.value.status is Status.RESOURCE_EXHAUSTED
    streams.detach(b)
    _, other = connect(streams, 7)
    assert slots_of(*other) == [0, 1, 2, 3]


def test_slots_must_be_free_in_one_piece():
    streams = make(num_slots=6)
    connect(streams, 1, groups=1, envs=2)  # slots 2 and 3
    with pytest.raises(Refused, match=r"4 of 6 are free, not enough in one piece"):
        streams.hello(0, OLD, 1, 3, False)


def test_an_actor_without_streams_gives_its_slots_back_after_a_while(monkeypatch):
    streams = make(num_slots=4)
    streams.hello(0, OLD, 2, 2, False)
    with pytest.raises(Refused):
        streams.hello(1, OLD, 2, 2, False)
    monkeypatch.setattr(Streams, "UNUSED_AFTER_S", -1.0)
    connect(streams, 1)


def test_hello_may_be_repeated_before_streams_are_open():
    streams = make()
    streams.hello(0, OLD, 2, 2, False)
    assert connect(streams, 0, OLD)[0] == []


@pytest.mark.parametrize("group", [-1, 2, 2**31])
def test_a_group_that_does_not_exist(group):
    streams = make()
    streams.hello(0, OLD, 2, 2, False)
    with pytest.raises(Refused, match=r"attach\.group .* must be one of 0 to 1") as refusal:
        streams.attach(0, OLD, group, SPEC)
    assert refusal.value.status is Status.INVALID_ARGUMENT


def test_a_group_is_attached_once():
    streams = make()
    connect(streams, 0)
    with pytest.raises(Refused, match="not yet attached"):
        streams.attach(0, OLD, 0, SPEC)


def test_streams_are_limited():
    streams = make(max_streams=3)
    connect(streams, 0)
    streams.hello(1, OLD, 2, 2, False)
    streams.attach(1, OLD, 0, SPEC)
    with pytest.raises(Refused, match=r"accepts 3 streams; raise --inference\.max-streams") as refusal:
        streams.attach(1, OLD, 1, SPEC)
    assert refusal.value.status is Status.RESOURCE_EXHAUSTED


def test_streams_know_whether_they_are_evaluation():
    streams = make()
    _, training = connect(streams, 0)
    _, evaluation = connect(streams, 1, evaluation=True)
    assert not any(stream.evaluation for stream in training)
    assert all(stream.evaluation for stream in evaluation)


def test_live_rows_leave_out_the_silent_and_the_withheld():
    streams = make()
    _, (a, b) = connect(streams, 0)
    now = time.monotonic()
    assert streams.live_rows(now, 2.0, set()) == 4
    a.last_seen = now - 3.0
    assert streams.live_rows(now, 2.0, set()) == 2
    a.asking = True  # it waits for the server, not the other way round
    assert streams.live_rows(now, 2.0, set()) == 4
    assert streams.live_rows(now, 2.0, {a}) == 2
    streams.detach(b)
    assert streams.live_rows(now, 2.0, {a}) == 0


_operations = st.lists(
    st.one_of(
        st.tuples(st.just("hello"), st.integers(0, 3), st.integers(0, 5), st.integers(1, 3), st.integers(1, 3)),
        st.tuples(st.just("attach"), st.integers(0, 3), st.integers(0, 5), st.integers(0, 2)),
        st.tuples(st.just("detach"), st.integers(0, 10)),
    ),
    max_size=40,
)


@settings(max_examples=60, deadline=None)
@given(_operations, st.integers(1, 12))
def test_no_two_live_streams_share_a_slot(operations, num_slots):
    """Live: attached, and neither closed nor told to end."""
    streams, live = make(num_slots), []
    for name, *arguments in operations:
        try:
            match name, arguments:
                case "hello", (actor_id, start, groups, envs):
                    replaced = streams.hello(actor_id, (start, 0), groups, envs, False)
                    assert all(stream.actor_id == actor_id for stream in replaced)
                    live = [stream for stream in live if stream not in replaced]
                case "attach", (actor_id, start, group):
                    live.append(streams.attach(actor_id, (start, 0), group, SPEC))
                case "detach", (index,) if live:
                    streams.detach(live.pop(index % len(live)))
        except Refused:
            pass
        taken = slots_of(*live) if live else []
        assert len(taken) == len(set(taken))
        assert set(taken) <= set(range(num_slots))
        assert set(streams.all()) == set(live)
        assert len({(stream.actor_id, stream.group) for stream in live}) == len(live)

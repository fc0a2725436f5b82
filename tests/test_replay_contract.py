"""What every replay does alike: the embedded table and queue, and a Reverb server behind its client.

Reverb's part needs its server: pytest -m external tests/test_replay_contract.py
"""

import contextlib
import threading
import time

import jax
import numpy as np
import pytest
import scipy.stats
from bits import assert_bit_equal

from seedx.config import TableConfig
from seedx.replay.fifo import Fifo
from seedx.replay.items import Ragged
from seedx.replay.rate_limiter import limits_for
from seedx.replay.replay import Replay, ReplayTimeoutError
from seedx.replay.table import Table
from seedx.types import TimeStep, Unroll

SOON = 60.0  # seconds within which what is possible happens
BLOCKED = 0.3  # seconds after which a call that must wait gives up
AGES = 3600.0  # seconds; longer than any test


@contextlib.contextmanager
def embedded_table(config):
    """What a run makes of such a config."""
    limits = limits_for(config, batch_size=1)
    table = Fifo(config.max_size, config.max_bytes) if config.is_queue else Table(config, limits, seed=0)
    yield table
    table.close()


@pytest.fixture(params=["embedded", pytest.param("reverb", marks=pytest.mark.external)])
def make(request):
    """A function from settings of a table to a fresh replay, uniform and without limits where not said otherwise."""
    if request.param == "embedded":
        table = embedded_table
    else:
        from reverb_harness import reverb_table as table
    with contextlib.ExitStack() as stack:
        defaults = {"sampler": "uniform", "max_size": 1000, "max_times_sampled": 0}
        yield lambda **settings: stack.enter_context(table(TableConfig(**{**defaults, **settings})))


@pytest.fixture
def queue(make):
    """A function from a size to a queue."""
    return lambda size: make(sampler="fifo", max_times_sampled=1, max_size=size)


def unrolls(ids, state=None):
    """Items of three rows that carry their number in every leaf and row; time-major in memory."""
    ids = np.asarray(ids)
    rows = np.moveaxis(np.repeat(ids[None], 3, axis=0), 1, 0)
    timestep = TimeStep(
        step_type=(rows % 3).astype(np.uint8),
        reward=rows.astype(np.float32) / 3,
        discount=(rows % 2).astype(np.float32),
        observation={"pixels": np.broadcast_to(rows[..., None], (len(ids), 3, 5)).astype(np.uint8)},
    )
    return Unroll(timestep, rows.astype(np.int32), {"log_prob": -rows.astype(np.float32)}, rows.astype(np.int32), state)


def ids_of(sample):
    """The numbers of sampled items, whose leaves must be theirs."""
    ids = np.asarray(sample.items.version)[:, 0]
    assert_bit_equal(sample.items, unrolls(ids))
    return ids.tolist()


def insert(replay, *ids, priorities=None, timeout_s=SOON):
    if priorities is None:
        priorities = np.ones(len(ids), np.float32)
    return replay.insert(unrolls(ids), np.asarray(priorities, np.float32), timeout_s)


def assert_waits(call, *args, match=None):
    """The call gives up at its deadline, which is its last argument."""
    with pytest.raises(ReplayTimeoutError, match=match):
        call(*args, BLOCKED)


def assert_insert_waits(replay, *ids, match=None):
    """The insert gives up at its deadline; returns what tries again with the same arrays, as whoever inserts does."""
    items, priorities = unrolls(ids), np.ones(len(ids), np.float32)
    assert_waits(replay.insert, items, priorities, match=match)
    return lambda: replay.insert(items, priorities, SOON)


# ---- items


def test_it_is_a_replay(make, queue):
    assert isinstance(make(), Replay)
    assert isinstance(queue(8), Replay)


def test_every_dtype_and_nest_comes_back_bit_by_bit(make):
    rng = np.random.default_rng(0)
    dtypes = (np.uint8, np.int32, np.int64, np.float32, np.bool_, np.uint64)

    def leaf(dtype, *shape):
        raw = rng.integers(0, 256, (*shape, np.dtype(dtype).itemsize), np.uint8)
        return (raw[..., 0] > 127) if dtype == np.bool_ else raw.view(dtype)[..., 0]  # NaNs and infinities among them

    items = Unroll(
        TimeStep(
            leaf(np.uint8, 4, 3), leaf(np.float32, 4, 3), leaf(np.float32, 4, 3), {"a": leaf(np.uint8, 4, 3, 7, 5)}
        ),
        action={d.__name__: leaf(d, 4, 3) for d in dtypes},
        extras=({"x": [leaf(d, 4, 3, 2) for d in dtypes], "none": None}, ()),
        version=leaf(np.int32, 4, 3),
        state={"core": (leaf(np.float32, 4, 6), leaf(np.bool_, 4)), "nothing": None},
    )
    replay = make()
    keys = replay.insert(items, np.ones(4, np.float32), SOON)
    sample = replay.sample(100, SOON)
    places = {key: i for i, key in enumerate(keys.tolist())}
    where = np.array([places[key] for key in sample.keys.tolist()])
    assert set(where) == {0, 1, 2, 3}
    assert_bit_equal(sample.items, jax.tree.map(lambda leaf: leaf[where], items))


def test_time_major_items_without_state_come_back(make):
    replay = make()
    insert(replay, 7)
    sample = replay.sample(2, SOON)
    assert ids_of(sample) == [7, 7]
    assert sample.items.state is None


def test_a_sample_says_what_it_is(make):
    replay = make()
    keys = insert(replay, 1, 2, 3)
    assert (keys.dtype, keys.shape, len(set(keys.tolist()))) == (np.uint64, (3,), 3)
    sample = replay.sample(5, SOON)
    dtypes = [leaf.dtype for leaf in sample[1:]]
    assert dtypes == [np.uint64, np.float64, np.int32, np.int64]
    assert all(leaf.shape == (5,) for leaf in sample[1:])
    assert [keys.tolist().index(key) + 1 for key in sample.keys.tolist()] == ids_of(sample)
    np.testing.assert_allclose(sample.probabilities, 1 / 3, rtol=1e-12)
    np.testing.assert_array_equal(sample.table_size, 3)
    for key in keys:  # counted draw by draw
        np.testing.assert_array_equal(
            sample.times_sampled[sample.keys == key], np.arange(np.count_nonzero(sample.keys == key)) + 1
        )


# ---- ragged items


def ragged(ids):
    """Items that carry their number in every leaf; number i has 1 + i % 7 rows."""
    ids = np.asarray(ids, np.int64)
    lengths = 1 + ids % 7
    of = np.repeat(ids, lengths)
    rows = {"token": of.astype(np.int32), "logprob": (-of[:, None] / 3 * np.ones(2)).astype(np.float32)}
    return Ragged(rows, lengths, {"reward": ids.astype(np.float32), "prompt": (ids[:, None] + [0, 1]).astype(np.uint8)})


def ragged_ids(sample):
    """The numbers of sampled ragged items, whose leaves must be theirs."""
    ids = sample.items.state["reward"].astype(np.int64)
    assert_bit_equal(sample.items, ragged(ids))
    return ids.tolist()


def test_ragged_items_come_back_each_with_its_rows(make):
    replay = make(sampler="prioritized", priority_exponent=1.0)
    keys = replay.insert(ragged([3, 0, 6, 13]), np.ones(4, np.float32), SOON)
    keys = np.concatenate([keys, replay.insert(ragged([8]), np.ones(1, np.float32), SOON)])
    sample = replay.sample(200, SOON)
    places = dict(zip(keys.tolist(), [3, 0, 6, 13, 8], strict=True))
    assert ragged_ids(sample) == [places[key] for key in sample.keys.tolist()]
    assert set(places.values()) == set(ragged_ids(sample))
    replay.update_priorities(keys, np.array([0, 0, 5, 0, 0], np.float32))
    assert set(ragged_ids(replay.sample(10, SOON))) == {6}


def test_a_queue_gives_ragged_items_once_and_in_order(queue):
    replay, taken = queue(8), []
    for start in range(0, 40, 4):
        replay.insert(ragged(range(start, start + 4)), np.ones(4, np.float32), SOON)
        taken += ragged_ids(replay.sample(3, SOON)) + ragged_ids(replay.sample(1, SOON))
    assert taken == list(range(40))


def test_ragged_items_of_a_full_table_make_room(make):
    replay = make(max_size=5)
    for start in range(0, 60, 4):
        replay.insert(ragged(range(start, start + 4)), np.ones(4, np.float32), SOON)
    assert set(ragged_ids(replay.sample(100, SOON))) == {55, 56, 57, 58, 59}


@pytest.mark.parametrize("kind", ["table", "queue"])
def test_ragged_and_other_items_do_not_mix(make, queue, kind):
    replay = make() if kind == "table" else queue(8)
    replay.insert(ragged([1, 2]), np.ones(2, np.float32), SOON)
    wrong = ragged([3])
    for items in (
        unrolls([4]),
        wrong._replace(rows={**wrong.rows, "token": wrong.rows["token"].astype(np.int64)}),
        wrong._replace(state=None),
        wrong._replace(lengths=wrong.lengths + 1),
    ):
        with pytest.raises(ValueError, match=r"items|rows|state"):
            replay.insert(items, np.ones(1, np.float32), SOON)
    assert set(ragged_ids(replay.sample(50 if kind == "table" else 2, SOON))) == {1, 2}


# ---- samplers and removers


def test_a_queue_gives_each_item_once_and_in_order(queue):
    replay, taken, count = queue(8), [], 0
    for size, batch in [(3, 2), (5, 4), (6, 8), (1, 1)]:
        insert(replay, *range(count, count + size))
        count += size
        sample = replay.sample(batch, SOON)
        taken += ids_of(sample)
        np.testing.assert_array_equal(sample.times_sampled, 1)
        np.testing.assert_array_equal(sample.probabilities, 1.0)
        np.testing.assert_array_equal(sample.table_size, np.arange(count - len(taken) + batch, count - len(taken), -1))
        assert [leaf.dtype for leaf in sample[1:]] == [np.uint64, np.float64, np.int32, np.int64]
    assert taken == list(range(15))
    assert_waits(replay.sample, 1)


def test_a_full_queue_makes_inserts_wait_and_loses_nothing(queue):
    replay = queue(3)
    insert(replay, 0, 1, 2)
    try_again = assert_insert_waits(replay, 3)
    assert ids_of(replay.sample(1, SOON)) == [0]
    try_again()
    assert ids_of(replay.sample(3, SOON)) == [1, 2, 3]


def test_a_batch_that_is_not_complete_in_time_takes_nothing(queue):
    replay = queue(8)
    insert(replay, 0, 1)
    assert_waits(replay.sample, 3)
    insert(replay, 2)
    assert ids_of(replay.sample(3, SOON)) == [0, 1, 2]


def test_lifo_samples_the_newest(make):
    replay = make(sampler="lifo", max_times_sampled=1)
    insert(replay, 0, 1, 2)
    assert ids_of(replay.sample(2, SOON)) == [2, 1]
    insert(replay, 3)
    assert ids_of(replay.sample(2, SOON)) == [3, 0]


def test_fifo_gives_the_oldest_until_it_is_used_up(make):
    replay = make(sampler="fifo", max_times_sampled=2)
    insert(replay, 0, 1, 2)
    sample = replay.sample(5, SOON)
    assert ids_of(sample) == [0, 0, 1, 1, 2]
    np.testing.assert_array_equal(sample.times_sampled, [1, 2, 1, 2, 1])
    np.testing.assert_array_equal(sample.table_size, [3, 3, 2, 2, 1])


def test_uniform_reaches_every_item_equally(make):
    replay = make()
    insert(replay, *range(20))
    counts = np.zeros(20)
    for _ in range(10):
        np.add.at(counts, ids_of(replay.sample(500, SOON)), 1)
    statistic = ((counts - 250) ** 2 / 250).sum()
    assert statistic < scipy.stats.chi2.isf(1e-9, 19)


def test_prioritized_samples_by_the_power_of_priorities(make):
    replay = make(sampler="prioritized", priority_exponent=0.6)
    priorities = np.array([2.5, 1.0, 0.0, 0.2, 7.0])
    expected = np.where(priorities > 0, priorities**0.6, 0) / (priorities[priorities > 0] ** 0.6).sum()
    insert(replay, *range(5), priorities=priorities)
    counts = np.zeros(5)
    for _ in range(10):
        sample = replay.sample(500, SOON)
        ids = ids_of(sample)
        np.add.at(counts, ids, 1)
        np.testing.assert_allclose(sample.probabilities, expected[ids], rtol=1e-6)  # priorities came as float32
        np.testing.assert_array_equal(sample.table_size, 5)
    assert counts[2] == 0
    some = expected > 0
    statistic = ((counts - 5000 * expected)[some] ** 2 / (5000 * expected[some])).sum()
    assert statistic < scipy.stats.chi2.isf(1e-9, 3)


def test_prioritized_is_uniform_where_all_priorities_are_0(make):
    replay = make(sampler="prioritized")
    insert(replay, *range(4), priorities=np.zeros(4))
    sample = replay.sample(100, SOON)
    assert set(ids_of(sample)) == {0, 1, 2, 3}
    np.testing.assert_allclose(sample.probabilities, 0.25, rtol=1e-12)


def test_items_leave_when_they_were_sampled_often_enough(make):
    replay = make(max_times_sampled=2)
    keys = insert(replay, 0, 1, 2)
    sample = replay.sample(6, SOON)
    assert sorted(ids_of(sample)) == [0, 0, 1, 1, 2, 2]
    assert sorted(sample.times_sampled.tolist()) == [1, 1, 1, 2, 2, 2]
    np.testing.assert_allclose(sample.probabilities, 1 / sample.table_size)
    assert_waits(replay.sample, 1)
    replay.update_priorities(keys, np.ones(3, np.float32))  # of items that are gone: passed over
    insert(replay, 3)
    assert ids_of(replay.sample(2, SOON)) == [3, 3]


@pytest.mark.parametrize(("remover", "left"), [("fifo", {2, 3, 4}), ("lifo", {0, 1, 2}), ("uniform", None)])
def test_a_full_table_makes_room_by_its_remover(make, remover, left):
    replay = make(remover=remover, max_size=3)
    insert(replay, *range(3))
    insert(replay, *range(3, 5))
    sample = replay.sample(100, SOON)
    found = set(ids_of(sample))
    assert len(found) == 3
    assert found == (left or found)
    np.testing.assert_array_equal(sample.table_size, 3)


# ---- priorities and keys


def test_updated_priorities_count_from_then_on(make):
    replay = make(sampler="prioritized", priority_exponent=1.0)
    keys = insert(replay, 0, 1, 2)
    unknown = np.array([123], np.uint64)
    replay.update_priorities(np.concatenate([keys[:2], unknown]), np.array([0.0, 3.0, 5.0], np.float32))
    sample = replay.sample(200, SOON)
    assert set(ids_of(sample)) == {1, 2}
    np.testing.assert_allclose(sample.probabilities, np.where(sample.keys == keys[1], 0.75, 0.25), rtol=1e-6)


def test_of_equal_keys_the_last_priority_counts(make):
    replay = make(sampler="prioritized", priority_exponent=1.0)
    keys = insert(replay, 0, 1)
    replay.update_priorities(keys[[0, 1, 0, 1, 0]], np.array([9, 9, 9, 1, 4], np.float32))
    sample = replay.sample(50, SOON)
    np.testing.assert_allclose(sample.probabilities, np.where(sample.keys == keys[0], 0.8, 0.2), rtol=1e-6)


def test_a_key_of_an_item_that_left_never_hits_the_one_that_came_after(make):
    replay = make(sampler="prioritized", priority_exponent=1.0, max_size=2)
    old = insert(replay, 0, 1)
    insert(replay, 2, 3)
    replay.update_priorities(old, np.array([50.0, 0.0], np.float32))
    replay.delete(old)
    sample = replay.sample(50, SOON)
    assert set(ids_of(sample)) == {2, 3}
    np.testing.assert_allclose(sample.probabilities, 0.5, rtol=1e-6)


def test_deleted_items_are_gone_and_unknown_keys_are_passed_over(make):
    replay = make()
    keys = insert(replay, 0, 1, 2)
    replay.delete(np.array([keys[1], 123, keys[1]], np.uint64))
    sample = replay.sample(60, SOON)
    assert set(ids_of(sample)) == {0, 2}
    np.testing.assert_array_equal(sample.table_size, 2)


@pytest.mark.parametrize("wrong", [-1.0, np.nan, np.inf])
def test_wrong_priorities_are_refused_and_nothing_changes(make, wrong):
    replay = make(sampler="prioritized", priority_exponent=1.0)
    keys = insert(replay, 0, 1)
    with pytest.raises(ValueError, match="priorit"):
        insert(replay, 2, 3, priorities=[1.0, wrong])
    with pytest.raises(ValueError, match="priorit"):
        replay.update_priorities(keys, np.array([5.0, wrong], np.float32))
    sample = replay.sample(60, SOON)
    assert set(ids_of(sample)) == {0, 1}
    np.testing.assert_allclose(sample.probabilities, 0.5, rtol=1e-6)


@pytest.mark.parametrize("wrong", [-1.0, np.nan, np.inf])
def test_a_queue_refuses_wrong_priorities_too(queue, wrong):
    replay = queue(8)
    keys = insert(replay, 0, 1)
    with pytest.raises(ValueError, match="priorit"):
        insert(replay, 2, 3, priorities=[1.0, wrong])
    with pytest.raises(ValueError, match="priorit"):
        replay.update_priorities(keys, np.array([5.0, wrong], np.float32))
    with pytest.raises(ValueError, match="priorit"):
        insert(replay, 2, 3, priorities=[1.0])  # one for two
    replay.update_priorities(keys, np.array([5.0, 0.0], np.float32))
    insert(replay, 4)
    assert ids_of(replay.sample(3, SOON)) == [0, 1, 4]


def test_items_that_are_deleted_from_a_queue_are_not_given(queue):
    replay = queue(4)  # one more than it holds: in a Reverb server what is deleted makes no room
    keys = insert(replay, 0, 1, 2)
    replay.delete(np.array([keys[1], 123, keys[1]], np.uint64))
    replay.update_priorities(keys[1:], np.ones(2, np.float32))  # passed over
    insert(replay, 3)
    assert ids_of(replay.sample(3, SOON)) == [0, 2, 3]


# ---- rate limiter, deadlines, life


def test_samples_wait_for_min_size(make):
    replay = make(min_size=3)
    insert(replay, 0, 1)
    assert_waits(replay.sample, 1, match="min_size")
    insert(replay, 2)
    assert set(ids_of(replay.sample(60, SOON))) == {0, 1, 2}


def test_a_ratio_makes_both_sides_wait_and_errors_name_it(make):
    """The figures of a Reverb server with SampleToInsertRatio(2, 2, 4): 2 * inserts - samples stays in 0 to 8."""
    replay = make(samples_per_insert=2.0, min_size=2, error_buffer=4.0)
    for i in range(4):
        insert(replay, i)
    try_again = assert_insert_waits(replay, 4, match="samples_per_insert")
    replay.sample(6, SOON)
    try_again()
    for i in range(5, 7):
        insert(replay, i)
    try_again = assert_insert_waits(replay, 7, match="samples_per_insert")
    replay.sample(8, SOON)
    try_again()
    replay.sample(2, SOON)
    assert_waits(replay.sample, 1, match="samples_per_insert")
    insert(replay, 8)
    assert_waits(replay.sample, 3)
    replay.sample(2, SOON)


def test_whoever_waits_is_let_in_when_the_other_side_acts(queue):
    replay, got = queue(2), []
    thread = threading.Thread(target=lambda: got.extend(ids_of(replay.sample(1, SOON))), daemon=True)
    thread.start()
    time.sleep(0.1)
    insert(replay, 0)
    thread.join(SOON)
    assert got == [0]
    insert(replay, 1, 2)
    thread = threading.Thread(target=lambda: got.append(len(insert(replay, 3))), daemon=True)
    thread.start()
    time.sleep(0.1)
    assert got == [0]
    assert ids_of(replay.sample(1, SOON)) == [1]
    thread.join(SOON)
    assert got == [0, 1]
    assert ids_of(replay.sample(2, SOON)) == [2, 3]


def test_reset_removes_all_and_starts_the_limiter_anew(make):
    replay = make(samples_per_insert=2.0, min_size=2, error_buffer=4.0)
    keys = np.concatenate([insert(replay, i) for i in range(4)])
    replay.reset()
    assert_waits(replay.sample, 1, match="min_size")
    for i in range(10, 14):
        insert(replay, i)
    replay.delete(keys)
    sample = replay.sample(8, SOON)
    assert set(ids_of(sample)) <= {10, 11, 12, 13}
    np.testing.assert_array_equal(sample.table_size, 4)


def test_reset_empties_a_queue_and_lets_inserts_in(queue):
    replay = queue(2)
    keys = insert(replay, 0, 1)
    replay.reset()
    assert_waits(replay.sample, 1)
    insert(replay, 2, 3)
    replay.delete(keys)
    assert ids_of(replay.sample(2, SOON)) == [2, 3]
    info = replay.info()
    assert {"replay/items": 0, "replay/inserted": 2, "replay/sampled": 2}.items() <= info.items()


def test_info_counts_a_queue(queue):
    replay = queue(8)
    insert(replay, 0, 1, 2, 3)
    replay.sample(3, SOON)
    info = replay.info()
    assert {"replay/items": 1, "replay/inserted": 4, "replay/sampled": 3}.items() <= info.items()
    assert info["replay/samples_per_insert"] == 0.75
    assert all(name.startswith("replay/") for name in info)


def test_info_counts(make):
    replay = make()
    keys = insert(replay, 0, 1, 2)
    replay.sample(5, SOON)
    replay.delete(keys[:1])
    info = replay.info()
    assert {"replay/items": 2, "replay/inserted": 3, "replay/sampled": 5}.items() <= info.items()
    assert all(name.startswith("replay/") for name in info)


@pytest.mark.parametrize("side", ["insert", "sample"])
def test_close_ends_calls_that_wait(queue, side):
    replay, failures = queue(1), []

    def wait():
        try:
            insert(replay, 1, timeout_s=AGES) if side == "insert" else replay.sample(1, AGES)
        except Exception as error:
            failures.append(error)

    if side == "insert":
        insert(replay, 0)
    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    time.sleep(0.2)
    replay.close()
    thread.join(SOON)
    assert [type(error) for error in failures] == [ReplayTimeoutError]
    with pytest.raises(ReplayTimeoutError):  # and those that come end at once
        insert(replay, 2, timeout_s=AGES) if side == "insert" else replay.sample(1, AGES)

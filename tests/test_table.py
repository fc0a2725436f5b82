"""The embedded table against a slow oracle; its distributions, memory, errors and threads."""

import dataclasses
import os
import threading
import time
import tracemalloc
import weakref

import numpy as np
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_sum_tree import chi_square

from seedx.checks import ConfigError
from seedx.config import Config, TableConfig
from seedx.learner.batches import time_major
from seedx.replay import capacity
from seedx.replay.build import make_replay
from seedx.replay.rate_limiter import limits_for
from seedx.replay.replay import Replay, ReplayTimeoutError
from seedx.replay.roster import Roster, books_bytes
from seedx.replay.table import Table
from seedx.types import TimeStep, Unroll

SAMPLERS = ("fifo", "lifo", "uniform", "prioritized")
REMOVERS = ("fifo", "lifo", "uniform")


def config(**changes):
    return dataclasses.replace(TableConfig(sampler="uniform", max_size=100, max_times_sampled=0), **changes)


def make(batch_size=1, seed=0, **changes):
    table = config(**changes)
    return Table(table, limits_for(table, batch_size), seed)


def items(*numbers):
    n = np.array(numbers, np.int64)
    return {"a": n, "b": np.broadcast_to(n[:, None], (len(n), 2)).astype(np.float32)}


def insert(table, *numbers, priorities=None, timeout_s=0.0):
    if priorities is None:
        priorities = np.ones(len(numbers))
    return table.insert(items(*numbers), np.asarray(priorities, np.float32), timeout_s)


def numbers(sample):
    a, b = sample.items["a"], sample.items["b"]
    np.testing.assert_array_equal(b, np.broadcast_to(a[:, None], b.shape))
    return a.tolist()


# ---- the oracle


class Oracle:
    """What the table should hold, as a dict in the order of insertion: key -> [number, priority, times sampled]."""

    def __init__(self, table_config):
        self.config, self.items, self.gone = table_config, {}, []

    def leave(self, key):
        self.gone.append(key)
        del self.items[key]

    def probability(self, key):
        weights = {k: p**self.config.priority_exponent if p > 0 else 0.0 for k, (_, p, _) in self.items.items()}
        match self.config.sampler:
            case "fifo":
                return float(key == next(iter(self.items)))
            case "lifo":
                return float(key == next(reversed(self.items)))
            case "prioritized" if sum(weights.values()) > 0:
                return weights[key] / sum(weights.values())
        return 1 / len(self.items)

    def insert(self, keys, numbers_, priorities, held):
        """One by one; which item leaves a full table is checked but where it is random, and then as `held` says."""
        for key, number, priority in zip(keys, numbers_, priorities, strict=True):
            if self.config.remover == "lifo" and len(self.items) == self.config.max_size:
                assert key not in held
                self.gone.append(key)
                continue
            self.items[key] = [number, priority, 0]
            if self.config.remover == "fifo" and len(self.items) > self.config.max_size:
                self.leave(next(iter(self.items)))
        for key in [key for key in self.items if key not in held]:
            assert self.config.remover == "uniform"
            self.leave(key)

    def sample(self, sample):
        rows = zip(
            sample.keys.tolist(),
            numbers(sample),
            sample.probabilities,
            sample.times_sampled,
            sample.table_size,
            strict=True,
        )
        for key, number, probability, times, size in rows:
            assert probability == pytest.approx(self.probability(key), rel=1e-9)
            assert probability > 0
            entry = self.items[key]
            entry[2] += 1
            assert (number, times, size) == (entry[0], entry[2], len(self.items))
            if times == self.config.max_times_sampled:
                self.leave(key)

    def uses_left(self):
        return sum(self.config.max_times_sampled - times for _, _, times in self.items.values())


def held(table):
    """Keys of the items in a table, their priorities and their uses."""
    roster = table._roster
    slots = roster._slots.held()
    keys = roster._slots.keys(slots).tolist()
    return dict(zip(keys, zip(roster._priorities[slots], roster._times_sampled[slots], strict=True), strict=True))


@settings(max_examples=150)
@given(data=st.data(), sampler=st.sampled_from(SAMPLERS), remover=st.sampled_from(REMOVERS))
def test_any_sequence_of_operations_agrees_with_the_oracle(data, sampler, remover):
    max_times, max_size = data.draw(st.integers(0, 3)), data.draw(st.integers(1, 7))
    if sampler == "fifo" and max_times == 1:
        max_times = 2  # with 1 it would be a queue
    settings_ = config(sampler=sampler, remover=remover, max_times_sampled=max_times, max_size=max_size)
    table, oracle = Table(settings_, limits_for(settings_, 1), data.draw(st.integers(0, 99))), Oracle(settings_)
    priority, count = st.sampled_from([0.0, 0.0, 0.5, 1.0, 30.0]), 0

    def some_keys():
        known = list(oracle.items) + oracle.gone + [2**64 - 1, 12345]
        return data.draw(st.lists(st.sampled_from(known), max_size=5))

    for _ in range(data.draw(st.integers(1, 20))):
        match data.draw(st.sampled_from(["insert", "insert", "sample", "sample", "update", "delete", "reset"])):
            case "insert":
                priorities = data.draw(st.lists(priority, min_size=1, max_size=max_size))
                ids = list(range(count, count + len(priorities)))
                count += len(ids)
                keys = insert(table, *ids, priorities=priorities).tolist()
                assert not set(keys) & set(oracle.items)
                assert not (set(keys) - {2**64 - 1}) & set(oracle.gone)
                oracle.insert(keys, ids, priorities, held(table))
            case "sample":
                size = data.draw(st.integers(1, 6))
                if not oracle.items or (max_times and oracle.uses_left() < size):
                    with pytest.raises(ReplayTimeoutError):
                        table.sample(size, 0.0)
                else:
                    oracle.sample(table.sample(size, 0.0))
            case "update":
                keys = some_keys()
                priorities = [data.draw(priority) for _ in keys]
                table.update_priorities(np.array(keys, np.uint64), np.array(priorities, np.float32))
                for key, new in zip(keys, priorities, strict=True):
                    if key in oracle.items:
                        oracle.items[key][1] = new
            case "delete":
                keys = some_keys()
                table.delete(np.array(keys, np.uint64))
                for key in set(keys) & set(oracle.items):
                    oracle.leave(key)
            case "reset":
                table.reset()
                for key in list(oracle.items):
                    oracle.leave(key)
        assert held(table) == {key: (p, times) for key, (_, p, times) in oracle.items.items()}
        limiter = table._limiter
        assert limiter.inserted - limiter.deleted == len(oracle.items) == table.info()["replay/items"]


# ---- distributions


def counts_of(table, size, draws, batch=10_000):
    counts = np.zeros(size)
    for _ in range(draws // batch):
        np.add.at(counts, table.sample(batch, 0.0).items["a"], 1)
    return counts


@pytest.mark.parametrize("alpha", [0.0, 0.6, 1.3])
def test_prioritized_sampling_has_the_exact_probabilities(alpha):
    rng = np.random.default_rng(1)
    priorities = (rng.random(300) ** 4 * 10).astype(np.float32)
    priorities[::7] = 0
    table = make(sampler="prioritized", priority_exponent=alpha, max_size=300)
    insert(table, *range(300), priorities=priorities)
    weights = np.where(priorities > 0, priorities.astype(np.float64) ** alpha, 0)
    assert abs(chi_square(counts_of(table, 300, 1_000_000), weights / weights.sum())) < 4


@pytest.mark.parametrize("sampler", ["uniform", "prioritized"])
def test_uniform_sampling_is_uniform_over_the_items_left(sampler):
    """And so is prioritized where all priorities are 0, as in Reverb."""
    table = make(sampler=sampler, max_size=200)
    keys = insert(table, *range(200), priorities=np.zeros(200))
    table.delete(keys[::3])
    probabilities = np.where(np.arange(200) % 3 == 0, 0, 1)
    assert abs(chi_square(counts_of(table, 200, 500_000), probabilities / probabilities.sum())) < 4


def test_items_that_are_used_up_on_the_way_leave_the_others_their_probabilities():
    """Pairs drawn without replacement from priorities 1, 2, 3: P(i, j) = w_i / 6 * w_j / (6 - w_i)."""
    table = make(sampler="prioritized", priority_exponent=1.0, max_times_sampled=1, max_size=3)
    counts = np.zeros((3, 3))
    for _ in range(1_500):
        insert(table, 0, 1, 2, priorities=[1, 2, 3])
        first, second, _ = numbers(table.sample(3, 0.0))
        counts[first, second] += 1
    weights = np.array([1.0, 2.0, 3.0])
    expected = weights[:, None] / 6 * weights / (6 - weights[:, None])
    np.fill_diagonal(expected, 0)
    assert abs(chi_square(counts.ravel(), expected.ravel())) < 4


def test_the_uniform_remover_spares_each_item_equally_one_by_one_or_together():
    """7 items into room for 4: those held first survive 3 removals, each with probability 4/5."""
    together, single = np.zeros(7), np.zeros(7)
    for seed in range(400):
        for counts, pieces in ((together, [range(4), range(4, 7)]), (single, [[i] for i in range(7)])):
            table = make(remover="uniform", max_size=4, seed=2 * seed + (counts is single))
            keys = np.concatenate([insert(table, *piece) for piece in pieces])
            counts += np.isin(keys, list(held(table)))
    expected = np.array([0.8**3] * 5 + [0.8**2, 0.8])
    for counts in (together, single):
        error = (counts / 400 - expected) / np.sqrt(expected * (1 - expected) / 400)
        assert np.abs(error).max() < 4


def test_two_tables_with_one_seed_sample_alike():
    samples = []
    for seed in (3, 3, 4):
        table = make(sampler="prioritized", seed=seed)
        insert(table, *range(100))
        samples.append(numbers(table.sample(32, 0.0)))
    assert samples[0] == samples[1] != samples[2]


# ---- layout and memory


def unrolls(first, n, state=True):
    rows = np.arange(first, first + n, dtype=np.float32) + np.zeros((4, n, 3), np.float32).transpose(0, 2, 1)
    turned = np.moveaxis(rows.transpose(0, 2, 1).copy(), 1, 0)  # time-major memory, as the unroll store makes it
    timestep = TimeStep(turned[..., 0].astype(np.uint8), turned[..., 1], turned[..., 2], {"x": turned})
    return Unroll(timestep, turned, (turned,), turned, state=turned[:, 0].copy() if state else None)


@pytest.mark.parametrize("state", [True, False])
def test_a_batch_of_unrolls_is_time_major_in_memory(state):
    table = make()
    for i in range(3):
        table.insert(unrolls(10 * i, 5, state), np.ones(5), 0.0)
    sample = table.sample(6, 0.0).items
    turned = time_major(sample)
    assert turned.action.shape == (4, 6, 3)
    assert np.shares_memory(turned.action, sample.action)  # so that turning it copies nothing
    assert np.shares_memory(turned.timestep.step_type, sample.timestep.step_type)
    ids = sample.action[:, 0, 0]
    np.testing.assert_array_equal(sample.action, ids[:, None, None] + np.zeros((6, 4, 3)))
    if state:
        np.testing.assert_array_equal(sample.state, sample.action[:, 0])
        assert sample.state.flags.c_contiguous
    else:
        assert sample.state is None


def test_a_sample_is_a_copy_that_later_inserts_leave_alone():
    table = make(max_size=2)
    insert(table, 1, 2)
    sample = table.sample(8, 0.0)
    before = numbers(sample)
    insert(table, 3, 4)
    assert numbers(sample) == before


def test_the_size_estimate_agrees_with_the_memory_that_a_full_table_takes():
    count, width = 200_000, 100
    example = {"x": np.ones((1000, width), np.float32), "y": np.ones(1000, bool)}
    process = psutil.Process()
    before = process.memory_info().rss
    table = make(sampler="prioritized", max_size=count)
    for _ in range(count // 1000):
        table.insert(example, np.ones(1000), 0.0)
    table.sample(10, 0.0)
    measured = process.memory_info().rss - before
    assert table.info()["replay/bytes"] == count * (4 * width + 1)
    assert table.needs(example).total_bytes == pytest.approx(measured, rel=0.2)
    storage = weakref.ref(table._storage)
    table.close()
    assert storage() is None


def test_a_table_that_does_not_fit_is_refused_with_sizes_and_flags(monkeypatch):
    table = make(max_size=1000, max_bytes=100_000)  # 16 bytes an item, and about 50 for the books
    match = r"1,000 items of 16 bytes takes \d\d,\d\d\d bytes, more than table\.max_bytes \(50,000\).*--table\.max-size"
    insert(table, 1)
    with pytest.raises(ConfigError, match=match + r".*--table\.max-bytes"):
        insert(make(max_size=1000, max_bytes=50_000), 1)
    monkeypatch.setattr(capacity, "memory_bytes", lambda: 40_000)
    with pytest.raises(ConfigError, match=r"more than half of this machine's memory \(20,000\)"):
        insert(make(max_size=1000, max_bytes=100_000), 1)


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_what_a_table_notes_is_known_in_bytes_before_it_is_made(sampler):
    settings_ = config(sampler=sampler, max_size=70_000)
    roster = Roster(settings_, 0)
    slots, weights = roster._slots, roster._weights
    arrays = [slots._slots, slots._place, slots._keys, slots._order, roster._priorities, roster._times_sampled]
    arrays += [] if weights is None else [*weights._levels, weights._root, weights._running]
    assert books_bytes(settings_) == sum(array.nbytes for array in arrays)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_size": 10**8}, r"a table of 100,000,000 items of 16 bytes takes .* more than table\.max_bytes"),
        ({"max_size": 10**15}, r"a table of 1,0{3}(,0{3}){4} items .* Lower --table\.max-size"),
        ({"max_size": 1000, "max_bytes": 100}, r"a table of 1,000 items of 16 bytes .* than table\.max_bytes \(100\)"),
    ],
)
def test_a_run_refuses_a_table_that_does_not_fit_before_it_makes_an_array(changes, message):
    settings_ = Config(agent="apex", table=config(sampler="prioritized", **changes))
    tracemalloc.start()
    try:
        with pytest.raises(ConfigError, match=message):
            make_replay(settings_, items(0))
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


def test_a_table_whose_books_alone_do_not_fit_is_refused_whatever_its_items_are():
    tracemalloc.start()
    try:
        with pytest.raises(ConfigError, match=r"1,0{3}(,0{3}){4} items takes 6\d,\d{3}(,\d{3}){4} bytes beside them"):
            make(sampler="prioritized", max_size=10**15)
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


def test_the_memory_of_this_machine_is_plausible():
    assert 2**28 < capacity.memory_bytes() <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"a": np.zeros(2, np.int32), "b": np.zeros((2, 2), np.float32)}, r"items\['a'\] is int32\[2\].*int64\[2\]"),
        ({"a": np.zeros(2, np.int64), "b": np.zeros((2, 3), np.float32)}, r"items\['b'\] is float32\[2, 3\].*\[2, 2\]"),
        ({"a": np.zeros(2, np.int64), "b": np.zeros((3, 2), np.float32)}, r"items\['b'\] is float32\[3, 2\]"),
        ({"a": np.zeros(3, np.int64), "b": np.zeros((3, 2), np.float32)}, r"priorities \[2\] .* each of 3 items"),
        ({"a": np.zeros(2, np.int64)}, r"structure of the first ones"),
    ],
)
def test_items_unlike_the_first_ones_are_refused_and_nothing_changes(wrong, message):
    table = make()
    insert(table, 1)
    with pytest.raises(ValueError, match=message):
        table.insert(wrong, np.ones(2), 0.0)
    assert table.info()["replay/items"] == 1
    assert numbers(table.sample(1, 0.0)) == [1]


def test_more_items_than_the_table_holds_are_refused():
    with pytest.raises(ValueError, match=r"insert of 3 items does not fit into a table of 2; raise --table\.max-size"):
        insert(make(max_size=2), 1, 2, 3)


def test_a_replay_has_no_default_size():
    with pytest.raises(ConfigError, match=r"table\.max_size \(0\)"):
        make(max_size=0)


def test_priorities_that_are_no_vector_are_refused():
    with pytest.raises(ValueError, match=r"priorities \[2, 1\] must be a vector"):
        make().insert(items(1, 2), np.ones((2, 1)), 0.0)


@pytest.mark.parametrize("alpha", [0.6, 2.0])
def test_a_priority_whose_power_would_overflow_is_refused(alpha):
    table = make(sampler="prioritized", priority_exponent=alpha)
    keys = table.insert(items(1), np.array([1e140]), 0.0)
    with pytest.raises(ValueError, match=r"priority 1e\+300 \(item 1 of 2\)"):
        table.update_priorities(np.repeat(keys, 2), np.array([1.0, 1e300]))
    assert table.sample(1, 0.0).probabilities == [1.0]
    assert table.info()["replay/mean_priority"] == 1e140


# ---- waiting


def test_errors_name_the_state_and_who_waits_for_what():
    table = make(samples_per_insert=2.0, min_size=2, error_buffer=4.0)
    insert(table, 0)
    with pytest.raises(ReplayTimeoutError, match=r"samples wait for inserts, until there are min_size \(2\) items"):
        table.sample(1, 0.0)
    insert(table, 1, 2, 3)
    message = (
        r"no insert of 1 items within 0\.0 s: 4 of 100 items are held \(64 bytes\); 4 inserted, 0 deleted, 0 sampled, "
        r"so that inserted \* samples_per_insert \(2\) - sampled is 8, which stays in 0 to 8; inserts of \[1\] and "
        r"samples of \[\] items are under way; inserts wait for samples\."
    )
    with pytest.raises(ReplayTimeoutError, match=message):
        insert(table, 4)
    with pytest.raises(ReplayTimeoutError, match=r"no sample of 9 .*; samples wait for inserts, by samples_per_insert"):
        table.sample(9, 0.0)
    used_up = make(max_times_sampled=2)
    insert(used_up, 1, 2)
    with pytest.raises(ReplayTimeoutError, match=r"no sample of 5 .*items may be sampled only 4 times more"):
        used_up.sample(5, 0.0)
    table.close()
    with pytest.raises(ReplayTimeoutError, match=r"no sample of 1 items: the table is closed"):
        table.sample(1, 30.0)
    with pytest.raises(ReplayTimeoutError, match=r"no insert of 1 items: the table is closed"):
        insert(table, 1, timeout_s=30.0)


def test_an_error_says_so_when_both_sides_wait_for_each_other():
    """Items left unused, so that the ratio asks for more samples than those that are held may give."""
    table = make(sampler="lifo", max_times_sampled=1, samples_per_insert=1.0, error_buffer=4.0)
    table.delete(np.concatenate([insert(table, i) for i in range(5)])[:4])
    thread = threading.Thread(target=insert, args=(table, 5), kwargs={"timeout_s": 30.0}, daemon=True)
    thread.start()
    while not table._waiting.counts("insert"):
        time.sleep(0.001)
    message = (
        r"inserts of \[1\] and samples of \[2\] items are under way; inserts wait for samples; samples wait for "
        r"inserts, as the items may be sampled only 1 times more; raise "
        r"--table\.max-size, --table\.max-bytes or --table\.error-buffer"
    )
    with pytest.raises(ReplayTimeoutError, match=message):
        table.sample(2, 0.0)
    assert numbers(table.sample(1, 0.0)) == [4]
    thread.join(10)
    assert numbers(table.sample(1, 0.0)) == [5]


# ---- threads


def test_many_threads_lose_nothing_and_do_not_lock_up():
    """Exactly once each, under a ratio that makes both sides wait, while priorities change and items are deleted."""
    producers, each, batch = 4, 50, 5
    table = make(batch, sampler="prioritized", max_times_sampled=1, samples_per_insert=1.0, error_buffer=8.0)
    taken, failures, finished = [], [], threading.Event()

    def guarded(run, *args):
        try:
            run(*args)
        except BaseException as error:
            failures.append(error)
            finished.set()

    def produce(p):
        rng, i = np.random.default_rng(p), 0
        while i < each:
            size = min(int(rng.integers(1, 4)), each - i)
            keys = insert(table, *range(p * each + i, p * each + i + size), timeout_s=60.0)
            table.update_priorities(keys, rng.random(size))
            i += size

    def consume():
        while not finished.is_set():
            try:
                taken.extend(numbers(table.sample(batch, 0.05)))
            except ReplayTimeoutError:
                continue
            table.info()
            if len(taken) >= producers * each - 8:  # the rest waits for inserts, by the ratio
                finished.set()

    runs = [(produce, p) for p in range(producers)] + [(consume,)]
    threads = [threading.Thread(target=guarded, args=run, daemon=True) for run in runs]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 100
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    assert not failures
    assert not any(thread.is_alive() for thread in threads)
    assert len(taken) == len(set(taken))
    assert len(taken) + table.info()["replay/items"] == producers * each


def test_it_is_a_replay():
    assert isinstance(make(), Replay)

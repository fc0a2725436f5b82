"""The queue: in order, exactly once, bounded in items and bytes, never silent about why it waits."""

import threading
import time

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seedx.learner.batches import time_major
from seedx.replay.fifo import Fifo
from seedx.replay.replay import ReplayTimeoutError
from seedx.types import TimeStep, Unroll


def items(*numbers, width=2):
    """Items `[N, ...]` that carry their number in every leaf."""
    n = np.array(numbers)
    return {"a": n.astype(np.int64), "b": np.broadcast_to(n[:, None], (len(n), width)).astype(np.float32)}


def insert(fifo, some, timeout_s=0.0):
    return fifo.insert(some, np.ones(len(jax.tree.leaves(some)[0])), timeout_s)


def figures(items_, bytes_, inserted, sampled):
    """What `info` says."""
    return {
        "replay/items": items_,
        "replay/bytes": bytes_,
        "replay/inserted": inserted,
        "replay/sampled": sampled,
        "replay/samples_per_insert": sampled / max(inserted, 1),
    }


def numbers(sample):
    a, b = sample.items["a"], sample.items["b"]
    np.testing.assert_array_equal(b, np.broadcast_to(a[:, None], b.shape))
    return a.tolist()


@settings(deadline=None)
@given(chunks=st.lists(st.integers(1, 5), max_size=12), batches=st.lists(st.integers(1, 7), max_size=12))
def test_items_leave_in_order_exactly_once(chunks, batches):
    fifo, count, taken = Fifo(1000), 0, []
    for size in chunks:
        insert(fifo, items(*range(count, count + size)))
        count += size
    for size in batches:
        try:
            taken += numbers(fifo.sample(size, 0.0))
        except ReplayTimeoutError:
            assert size > count - len(taken)
    assert taken == list(range(len(taken)))
    left = count - len(taken)
    assert fifo.info() == figures(left, left * 16, count, len(taken))


def unrolls(n, fill):
    rows = np.full((4, n, 3), fill, np.float32)  # time-major memory, as the store makes it
    turned = np.moveaxis(rows, 1, 0)
    timestep = TimeStep(turned[..., 0], turned[..., 1], turned[..., 2], {"x": turned})
    return Unroll(timestep, turned, turned, turned, state=np.full((n, 2), fill, np.float32))


def test_unrolls_stay_time_major_in_memory_when_a_batch_is_put_together():
    fifo = Fifo(100)
    for i in range(3):
        insert(fifo, unrolls(2, i))
    sampled = fifo.sample(6, 0.0).items
    assert np.moveaxis(sampled.action, 0, 1).flags.c_contiguous
    turned = time_major(sampled)
    assert turned.action.shape == (4, 6, 3)
    assert turned.action.flags.c_contiguous
    assert np.shares_memory(turned.action, sampled.action)  # so that turning it copies nothing
    np.testing.assert_array_equal(turned.action[0, :, 0], [0, 0, 1, 1, 2, 2])
    np.testing.assert_array_equal(turned.state[:, 0], [0, 0, 1, 1, 2, 2])


def test_inserts_wait_at_the_bound_in_items_and_one_may_overshoot_it():
    fifo = Fifo(4)
    insert(fifo, items(0, 1, 2))
    insert(fifo, items(3, 4, 5))
    message = (
        r"no insert of 2 items within 0\.0 s: 6 of 4 items, 96 of 1,073,741,824 bytes are held; 6 inserted, 0 sampled; "
        r"inserts of \[2\] and samples of \[\] items are under way; inserts wait for samples\."
    )
    with pytest.raises(ReplayTimeoutError, match=message):
        insert(fifo, items(6, 7))
    assert numbers(fifo.sample(3, 0.0)) == [0, 1, 2]
    insert(fifo, items(6, 7))
    assert numbers(fifo.sample(5, 0.0)) == [3, 4, 5, 6, 7]


def test_inserts_wait_at_the_bound_in_bytes():
    fifo = Fifo(1000, max_bytes=100)
    insert(fifo, items(0, width=10))
    insert(fifo, items(1, 2, width=10))
    with pytest.raises(ReplayTimeoutError, match=r"144 of 100 bytes"):
        insert(fifo, items(3, width=10))
    fifo.sample(1, 0.0)
    insert(fifo, items(3, width=10))


def test_a_sample_takes_nothing_when_there_is_too_little():
    fifo = Fifo(4)
    insert(fifo, items(0, 1))
    started = time.monotonic()
    message = r"no sample of 3 items within 0\.05 s: 2 of 4 items.* samples of \[3\] .*; samples wait for inserts\."
    with pytest.raises(ReplayTimeoutError, match=message):
        fifo.sample(3, 0.05)
    assert time.monotonic() - started >= 0.05
    assert numbers(fifo.sample(2, 0.0)) == [0, 1]


@pytest.mark.parametrize("bound", [{"max_items": 4}, {"max_items": 100, "max_bytes": 64}])
def test_a_batch_that_can_never_be_complete_is_an_error_not_a_wait(bound):
    """The queue is full and holds less than a batch: inserting and sampling would wait for each other for ever."""
    fifo = Fifo(**bound)
    insert(fifo, items(0, 1, 2, 3))
    with pytest.raises(ValueError, match=r"a batch of 5 items does not fit .*4 of .*table\.max-size"):
        fifo.sample(5, 3600.0)


@pytest.mark.parametrize("waits", ["insert", "sample"])
def test_whoever_waits_is_woken(waits):
    fifo, results = Fifo(1), []
    if waits == "insert":
        insert(fifo, items(0))
        thread = threading.Thread(target=lambda: results.append(insert(fifo, items(1), 60.0)), daemon=True)
    else:
        thread = threading.Thread(target=lambda: results.append(numbers(fifo.sample(1, 60.0))), daemon=True)
    thread.start()
    time.sleep(0.02)
    assert not results
    if waits == "insert":
        assert numbers(fifo.sample(1, 0.0)) == [0]
    else:
        insert(fifo, items(7))
    thread.join(60)
    assert results == ([[1]] if waits == "insert" else [[7]])


def test_items_are_deleted_by_key_and_all_by_reset():
    fifo = Fifo(100)
    keys = np.concatenate([insert(fifo, items(*range(i, i + 3))) for i in (0, 3, 6)])
    fifo.delete(np.append(keys[[1, 3, 4, 5]], np.uint64(10**6)))
    sample = fifo.sample(4, 0.0)
    assert numbers(sample) == [0, 2, 6, 7]
    assert fifo.info() == figures(1, 16, 9, 4)
    np.testing.assert_array_equal(sample.keys, keys[[0, 2, 6, 7]])
    fifo.reset()
    assert fifo.info() == figures(0, 0, 0, 0)
    assert not set(insert(fifo, items(9)).tolist()) & set(keys.tolist())  # a key is given out once


def test_a_small_queue_under_many_threads_loses_nothing_and_does_not_lock_up():
    producers, each, batch = 6, 60, 5
    fifo, taken, lock = Fifo(batch), [], threading.Lock()
    finished = threading.Event()

    def produce(p):
        rng = np.random.default_rng(p)
        i = 0
        while i < each:
            size = min(int(rng.integers(1, 4)), each - i)
            insert(fifo, items(*range(p * each + i, p * each + i + size)), 60.0)
            i += size

    def consume():
        while not finished.is_set():
            try:
                got = numbers(fifo.sample(batch, 0.05))
            except ReplayTimeoutError:
                continue
            with lock:
                taken.extend(got)
                if len(taken) == producers * each:
                    finished.set()

    threads = [threading.Thread(target=produce, args=(p,), daemon=True) for p in range(producers)]
    threads += [threading.Thread(target=consume, daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()
    assert finished.wait(60), fifo.info()
    for thread in threads:
        thread.join(60)
    assert sorted(taken) == list(range(producers * each))
    assert fifo.info()["replay/bytes"] == 0

"""The batcher: why a batch goes, that requests leave exactly once and in order, and that nobody waits for ever."""

import threading
import time
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seedx.inference.batcher import Batcher, Reason

AGES = 3600.0  # seconds; longer than any test


@dataclass(frozen=True, eq=False)
class Group:
    rows: int
    name: int = 0


def make(max_rows=8, groups=2, max_wait_s=AGES, in_flight=2, lock_step_rows=0, live=16):
    batcher = Batcher(max_rows, groups, max_wait_s, in_flight, lock_step_rows)
    batcher.set_live_rows(live)
    return batcher


def offer(batcher, *rows):
    requests = [Group(r, i) for i, r in enumerate(rows)]
    for request in requests:
        batcher.offer(request)
    return requests


def test_goes_full_with_whole_requests_and_keeps_the_rest_in_order():
    batcher = make(max_rows=8, live=1000)
    requests = offer(batcher, 3, 4, 2, 8)
    batch = batcher.take(0.0)
    assert (batch.requests, batch.rows, batch.reason) == (requests[:2], 7, Reason.FULL)
    batch = batcher.take(0.0)
    assert (batch.requests, batch.rows, batch.reason) == (requests[2:3], 2, Reason.FULL)  # the next would not fit


def test_goes_ready_at_the_live_slots_share():
    batcher = make(max_rows=100, groups=2, live=16)
    offer(batcher, 7)
    assert batcher.take(0.0) is None
    offer(batcher, 1)
    batch = batcher.take(0.0)
    assert (batch.rows, batch.reason) == (8, Reason.READY)


def test_goes_on_timeout_and_says_how_long_the_oldest_waited():
    batcher = make(max_rows=100, max_wait_s=0.05)
    offer(batcher, 1)
    batch = batcher.take(AGES)
    assert batch.reason is Reason.TIMEOUT
    assert batch.waited_s >= 0.05


def test_never_waits_on_the_dead():
    batcher = make(max_rows=100, groups=2, live=16)
    offer(batcher, 4)
    taken = []
    taker = threading.Thread(target=lambda: taken.append(batcher.take(AGES)), daemon=True)
    taker.start()
    time.sleep(0.02)
    assert not taken
    batcher.set_live_rows(8)  # half of the actors died
    taker.join(60)
    assert taken[0].reason is Reason.READY


def test_takes_no_more_than_the_in_flight_places():
    batcher = make(max_rows=2, in_flight=2)
    offer(batcher, 2, 2, 2)
    assert batcher.take(0.0) is not None
    assert batcher.take(0.0) is not None
    assert batcher.take(0.0) is None
    batcher.release()
    assert batcher.take(0.0).rows == 2


def test_a_release_wakes_the_taker():
    batcher = make(max_rows=2, in_flight=1)
    offer(batcher, 2, 2)
    batcher.take(0.0)
    taken = []
    taker = threading.Thread(target=lambda: taken.append(batcher.take(AGES)), daemon=True)
    taker.start()
    time.sleep(0.02)
    batcher.release()
    taker.join(60)
    assert taken[0].rows == 2


def test_an_empty_batcher_waits_out_its_timeout():
    started = time.monotonic()
    assert make(live=0).take(0.05) is None
    assert time.monotonic() - started >= 0.05


def test_withdrawn_requests_never_leave_and_no_longer_count():
    batcher = make(max_rows=8, groups=1, live=8)
    a, b, c = offer(batcher, 4, 3, 1)
    batcher.withdraw(lambda request: request is b)
    assert batcher.take(0.0) is None  # 5 of 8
    batcher.set_live_rows(5)
    assert batcher.take(0.0).requests == [a, c]
    assert batcher.take(0.0) is None


def test_lock_step_waits_for_every_row():
    batcher = make(max_rows=8, max_wait_s=0.001, lock_step_rows=8, live=1)
    offer(batcher, 4, 3)
    time.sleep(0.01)
    assert batcher.take(0.01) is None
    offer(batcher, 1)
    assert batcher.take(0.0).rows == 8


@given(
    max_rows=st.integers(1, 10),
    groups=st.integers(1, 3),
    live=st.integers(0, 40),
    actions=st.lists(st.one_of(st.integers(1, 10), st.sampled_from(["take", "release", "withdraw"])), max_size=60),
)
def test_every_request_leaves_exactly_once_and_in_order(max_rows, groups, live, actions):
    batcher = make(max_rows, groups, max_wait_s=0.0, in_flight=2, live=live)
    offered, gone, out, flying = [], set(), [], 0

    def take():
        batch = batcher.take(0.0)
        if batch is None:
            return 0
        assert batch.requests
        assert batch.rows == sum(request.rows for request in batch.requests) <= max_rows
        out.extend(batch.requests)
        return 1

    for action in actions:
        match action:
            case "take":
                taken = take()
                assert taken == 0 or flying < 2
                flying += taken
            case "release" if flying:
                batcher.release()
                flying -= 1
            case "withdraw":
                waiting = [request for request in offered if request not in out and request not in gone]
                gone.update(waiting[::2])
                batcher.withdraw(lambda request: request in gone)
            case int(rows):
                request = Group(min(rows, max_rows))
                offered.append(request)
                batcher.offer(request)
    while True:
        for _ in range(flying):
            batcher.release()
        flying = take()
        if not flying:
            break
    assert out == [request for request in offered if request not in gone]


def test_no_wake_up_is_lost():
    """Streams as the front-end drives them: the next request comes after the reply; every one must be answered."""
    streams, rounds = 12, 150
    batcher = make(max_rows=6, groups=2, max_wait_s=AGES, in_flight=2, live=2 * streams)
    replies = [threading.Semaphore(0) for _ in range(streams)]
    left = [rounds] * streams
    done = threading.Event()
    lock = threading.Lock()

    def ask(stream):
        for _ in range(rounds):
            batcher.offer(Group(2, stream))
            assert replies[stream].acquire(timeout=100)
        with lock:
            left[stream] = 0
            batcher.set_live_rows(2 * sum(n > 0 for n in left))

    def answer():
        while not done.is_set():
            batch = batcher.take(AGES)  # longer than anybody waits below: one lost wake-up is seen
            batcher.release()
            for request in batch.requests:
                replies[request.name].release()

    threads = [threading.Thread(target=ask, args=(i,), daemon=True) for i in range(streams)]
    server = threading.Thread(target=answer, daemon=True)
    for thread in [*threads, server]:
        thread.start()
    for thread in threads:
        thread.join(100)
    done.set()
    batcher.offer(Group(2, 0))
    server.join(60)
    assert left == [0] * streams


@pytest.mark.parametrize("places", [1, 2])
def test_a_busy_device_does_not_hold_up_offers(places):
    batcher = make(max_rows=1, in_flight=places)
    for _ in range(places):
        offer(batcher, 1)
        batcher.take(0.0)
    offer(batcher, *[1] * 100)
    assert batcher.take(0.0) is None

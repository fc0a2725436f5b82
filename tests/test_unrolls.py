"""Unrolls overlap by one row, give back what was put in, and are left alone once they are finished."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seedx.inference.unrolls import UnrollStore


def row(t, slots):
    """Leaves of row t: every number in them says where it belongs."""
    t, n = np.broadcast_arrays(t, slots)
    return [
        (100 * t + n).astype(np.float32),
        (t + n)[:, None, None].astype(np.uint8) + np.zeros((1, 2, 3), np.uint8),
        np.zeros((len(n), 0), np.float32),
    ]


def state(t, slots):
    t, n = np.broadcast_arrays(t, slots)
    return [np.stack([t, n], axis=1).astype(np.float32), -t]


def check(rows, before, slot, start, length):
    """That an unroll, leaves `[T+1, ...]`, holds the slot's rows from `start` on."""
    for kept, expected in zip(before, state(start, [slot]), strict=True):
        np.testing.assert_array_equal(kept, expected[0])
    for leaf, expected in zip(rows, row(np.arange(start, start + length + 1), slot), strict=True):
        assert leaf.dtype == expected.dtype
        np.testing.assert_array_equal(leaf, expected)


@settings(deadline=None)
@given(length=st.integers(1, 5), sizes=st.lists(st.integers(1, 3), min_size=1, max_size=4), data=st.data())
def test_each_group_gets_its_rows_back_whoever_shares_its_batches(length, sizes, data):
    """Batches of any groups, in any order; now and then a group is given to a new actor."""
    period = data.draw(st.integers(1, length))
    store, groups = UnrollStore(sum(sizes), length, period), np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1])
    t, begin = np.zeros(len(sizes), int), np.zeros(len(sizes), int)  # next row; first row of the group's actor
    actor_of = {}  # the slot and the first row of the actor, by source
    for order in data.draw(st.lists(st.permutations(range(len(sizes))), max_size=20)):
        batch = order[: data.draw(st.integers(0, len(sizes)))]
        if batch and data.draw(st.booleans()):
            begin[batch[0]] = t[batch[0]]
            store.reset(groups[batch[0]])
        slots = np.concatenate([np.empty(0, int), *(groups[g] for g in batch)])
        bounds = np.cumsum([0, *(sizes[g] for g in batch)])
        rows = np.concatenate([np.empty(0, int), *(np.full(sizes[g], t[g]) for g in batch)])
        # Only where it is wanted is the state before a row fetched from the device.
        starts = (t - begin)[batch] % period == 0
        assert store.wants_state(slots[bounds[:-1]]) == starts.any()
        finished = store.add(slots, bounds, row(rows, slots), state(rows, slots) if starts.any() else [])
        age = (t - begin)[batch]
        ends = np.flatnonzero((age >= length) & ((age - length) % period == 0))
        assert (finished is None) == (len(ends) == 0)
        if finished is not None:
            assert finished.groups.tolist() == ends.tolist()
            expected = [(slot, t[batch[end]] - length) for end in ends for slot in groups[batch[end]]]
            for k, (slot, start) in enumerate(expected):
                check([leaf[:, k] for leaf in finished.rows], [leaf[k] for leaf in finished.state], slot, start, length)
            assert finished.rows[0].shape[1] == len(expected)
            begins = np.repeat(begin[batch][ends], np.diff(bounds)[ends]).tolist()
            for source, (slot, _), first in zip(finished.sources.tolist(), expected, begins, strict=True):
                assert actor_of.setdefault(source, (slot, first)) == (slot, first)
            assert len(set(actor_of.values())) == len(actor_of)
        t[batch] += 1


@pytest.mark.parametrize("length", [1, 3])
@pytest.mark.parametrize("bounds", [[0, 2], [0, 1, 2]])
def test_a_finished_unroll_is_left_alone_and_owes_nothing_to_its_inputs(length, bounds):
    slots = np.array([1, 2])
    store, seen = UnrollStore(3, length, length), []
    inputs, before = row(0, slots), state(0, slots)
    for t in range(4 * length + 1):
        for leaf, new in zip(inputs + before, row(t, slots) + state(t, slots), strict=True):
            leaf[...] = new  # the caller uses its memory again
        made = store.add(slots, np.array(bounds), inputs, before)
        if made is not None:
            seen.append((made, [leaf.copy() for leaf in (*made.rows, *made.state)]))
    for leaf in inputs + before:
        leaf[...] = 77
    assert len(seen) == 4
    for made, copies in seen:
        for leaf, copy in zip((*made.rows, *made.state), copies, strict=True):
            np.testing.assert_array_equal(leaf, copy)
    memory = [leaf for made, _ in seen for leaf in (*made.rows, *made.state)]
    assert not any(np.shares_memory(a, b) for i, a in enumerate(memory) for b in memory[:i])


def test_a_stateless_agent_has_no_state():
    store, slots = UnrollStore(2, 2, 2), np.arange(2)
    made = [store.add(slots, np.array([0, 2]), row(t, slots), []) for t in range(5)]
    assert [m is not None for m in made] == [False, False, True, False, True]
    assert made[2].state == made[4].state == []

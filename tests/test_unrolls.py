"""Unrolls overlap, give back what was put in, count each row alike, and are left alone once they are finished."""

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


def check(rows, before, slot, start, num_rows, lead):
    """That an unroll holds the slot's rows from `start` on, and the state before those that follow the leading ones."""
    for kept, expected in zip(before, state(start + lead, [slot]), strict=True):
        np.testing.assert_array_equal(kept, expected[0])
    for leaf, expected in zip(rows, row(np.arange(start, start + num_rows), slot), strict=True):
        assert leaf.dtype == expected.dtype
        np.testing.assert_array_equal(leaf, expected)


@settings(deadline=None)
@given(
    length=st.integers(1, 5),
    lead=st.integers(0, 3),
    sizes=st.lists(st.integers(1, 3), min_size=1, max_size=4),
    data=st.data(),
)
def test_each_group_gets_its_rows_back_whoever_shares_its_batches(length, lead, sizes, data):
    """Batches of any groups, in any order; now and then a group is given to a new actor."""
    period, num_rows = data.draw(st.integers(1, length)), lead + length + 1
    store = UnrollStore(sum(sizes), num_rows, period, lead)
    groups = np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1])
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
        age = (t - begin)[batch]
        starts = np.isin(age, lead + period * np.arange(30))
        assert store.wants_state(slots[bounds[:-1]]) == starts.any()
        finished = store.add(slots, bounds, row(rows, slots), state(rows, slots) if starts.any() else [])
        ends = np.flatnonzero(np.isin(age, num_rows - 1 + period * np.arange(30)))
        assert (finished is None) == (len(ends) == 0)
        if finished is not None:
            assert finished.groups.tolist() == ends.tolist()
            expected = [(slot, t[batch[end]] - num_rows + 1) for end in ends for slot in groups[batch[end]]]
            for k, (slot, start) in enumerate(expected):
                rows, before = [leaf[:, k] for leaf in finished.rows], [leaf[k] for leaf in finished.state]
                check(rows, before, slot, start, num_rows, lead)
            assert finished.rows[0].shape[1] == len(expected)
            begins = np.repeat(begin[batch][ends], np.diff(bounds)[ends]).tolist()
            for source, (slot, _), first in zip(finished.sources.tolist(), expected, begins, strict=True):
                assert actor_of.setdefault(source, (slot, first)) == (slot, first)
            assert len(set(actor_of.values())) == len(actor_of)
        t[batch] += 1


def trained(num_steps, length, period, lead):
    """In how many unrolls each of a stream's transitions is behind the rows that lead, int `[num_steps]`."""
    store, slots, counts = UnrollStore(1, lead + length + 1, period, lead), np.arange(1), np.zeros(num_steps, int)
    for t in range(num_steps + 1):
        finished = store.add(slots, np.array([0, 1]), [np.array([t])], [])
        if finished is not None:
            counts[finished.rows[0][lead:-1, 0]] += 1
    return counts


@given(length=st.integers(1, 5), lead=st.integers(1, 3), num_steps=st.integers(0, 30), data=st.data())
def test_but_for_the_first_rows_of_a_stream_each_transition_is_trained_on_as_often_as_without_leading_rows(
    length, lead, num_steps, data
):
    period = data.draw(st.integers(1, length))
    counts = trained(num_steps + lead, length, period, lead)
    assert not counts[:lead].any()
    np.testing.assert_array_equal(counts[lead:], trained(num_steps, length, period, 0))
    # With one unroll for each transition, all that an unroll's end has passed are trained on once.
    if period == length:
        np.testing.assert_array_equal(counts[lead:], np.arange(num_steps) < num_steps // length * length)


@pytest.mark.parametrize("length", [1, 3])
@pytest.mark.parametrize("bounds", [[0, 2], [0, 1, 2]])
def test_a_finished_unroll_is_left_alone_and_owes_nothing_to_its_inputs(length, bounds):
    slots = np.array([1, 2])
    store, seen = UnrollStore(3, length + 1, length), []
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
    store, slots = UnrollStore(2, 3, 2), np.arange(2)
    made = [store.add(slots, np.array([0, 2]), row(t, slots), []) for t in range(5)]
    assert [m is not None for m in made] == [False, False, True, False, True]
    assert made[2].state == made[4].state == []

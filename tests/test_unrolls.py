"""Unrolls overlap by one row, give back what was put in, and are left alone once they are finished."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seedx.inference.unrolls import UnrollBuilder


def row(t, num_envs):
    """Leaves of row t: every number in them says where it belongs."""
    n = np.arange(num_envs)
    return [
        (100 * t + n).astype(np.float32),
        (t + n[:, None, None] + np.zeros((1, 2, 3))).astype(np.uint8),
        np.zeros((num_envs, 0), np.float32),
    ]


def state(t, num_envs):
    return [np.full((num_envs, 2), t, np.float32), np.full((num_envs,), -t, np.int32)]


@settings(deadline=None)
@given(num_envs=st.integers(1, 3), length=st.integers(1, 5), rows=st.integers(0, 23))
def test_unrolls_give_the_rows_back(num_envs, length, rows):
    builder, finished = UnrollBuilder(num_envs, length), []
    for t in range(rows):
        # Only where it is wanted is the state before a row fetched from the device.
        given_state = state(t, num_envs) if builder.wants_state else []
        made = builder.add(row(t, num_envs), t // 3, given_state)
        assert (made is not None) == (t > 0 and t % length == 0)
        finished += [made] if made is not None else []
    for i, unroll in enumerate(finished):
        start = i * length
        for kept, expected in zip(unroll.state, state(start, num_envs), strict=True):
            np.testing.assert_array_equal(kept, expected)
        assert unroll.version.dtype == np.int32
        for t in range(length + 1):
            for leaf, expected in zip(unroll.rows, row(start + t, num_envs), strict=True):
                assert leaf.dtype == expected.dtype
                np.testing.assert_array_equal(leaf[t], expected)
            np.testing.assert_array_equal(unroll.version[t], (start + t) // 3)
    if finished:
        whole = np.concatenate([unroll.rows[0][:-1] for unroll in finished])
        np.testing.assert_array_equal(whole, np.stack([row(t, num_envs)[0] for t in range(len(whole))]))


@pytest.mark.parametrize("length", [1, 3])
def test_a_finished_unroll_is_left_alone_and_owes_nothing_to_its_inputs(length):
    builder, seen = UnrollBuilder(2, length), []
    inputs, before = row(0, 2), state(0, 2)
    for t in range(4 * length + 1):
        for leaf, new in zip(inputs + before, row(t, 2) + state(t, 2), strict=True):
            leaf[...] = new  # the caller uses its memory again
        made = builder.add(inputs, t, before)
        if made is not None:
            seen.append((made, [leaf.copy() for leaf in (*made.rows, made.version, *made.state)]))
    for leaf in inputs + before:
        leaf[...] = 77
    assert len(seen) == 4
    for made, copies in seen:
        for leaf, copy in zip((*made.rows, made.version, *made.state), copies, strict=True):
            np.testing.assert_array_equal(leaf, copy)
    memory = [leaf for made, _ in seen for leaf in (*made.rows, made.version, *made.state)]
    assert not any(np.shares_memory(a, b) for i, a in enumerate(memory) for b in memory[:i])


def test_a_stateless_agent_has_no_state():
    builder = UnrollBuilder(2, 2)
    made = [builder.add(row(t, 2), 0, []) for t in range(5)]
    assert [m is not None for m in made] == [False, False, True, False, True]
    assert made[2].state == made[4].state == []

"""Sequences in rows: every token has one place, and the order of the sequences decides nothing else."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from text_fakes import take

from seedx.learner.packing import microbatches, pack, place, positions_and_segments
from seedx.learner.text_batch import TokenBatch

L = 16
lengths_lists = st.lists(st.integers(1, L), min_size=1, max_size=40).map(np.array)


@given(lengths=lengths_lists, multiple=st.integers(1, 5))
def test_every_token_has_one_place(lengths, multiple):
    packing = pack(lengths, L, multiple)
    count = int(lengths.sum())
    assert len(np.unique(packing.places)) == len(packing.places) == count
    assert packing.num_rows % multiple == 0
    used = np.bincount(packing.rows, lengths, packing.num_rows)
    assert (packing.starts + lengths <= L).all()
    assert (used <= L).all()
    assert np.count_nonzero(used == 0) < multiple  # only what fills up the last microbatch
    tokens = np.arange(1, count + 1)
    rows = place(packing, tokens)
    assert rows.shape == (packing.num_rows, L)
    assert np.count_nonzero(rows) == count
    np.testing.assert_array_equal(take(packing, rows), tokens)


@given(lengths=lengths_lists)
def test_positions_and_segments_tell_sequences_apart(lengths):
    packing = pack(lengths, L)
    positions, segments = positions_and_segments(packing)
    assert positions.dtype == segments.dtype == np.int32
    numbers = [[] for _ in range(packing.num_rows)]
    for length, row, start in zip(lengths, packing.rows, packing.starts, strict=True):
        np.testing.assert_array_equal(positions[row, start : start + length], np.arange(length))
        (number,) = np.unique(segments[row, start : start + length])
        numbers[row].append((start, number))
    for found in numbers:  # from 1, from left to right
        assert [number for _, number in sorted(found)] == list(range(1, len(found) + 1))
    padding = np.ones((packing.num_rows, L), bool)
    padding.ravel()[packing.places] = False
    np.testing.assert_array_equal(segments[padding], 0)
    np.testing.assert_array_equal(positions[padding], 0)


def first_fit(lengths):
    """Rows and starts, one sequence at a time, longest first; of equal ones the first."""
    used, found = [], {}
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        row = next((row for row, n in enumerate(used) if n + lengths[i] <= L), len(used))
        used += [0] * (row == len(used))
        found[i] = (row, used[row])
        used[row] += lengths[i]
    return [found[i] for i in range(len(lengths))]


@given(lengths=lengths_lists)
def test_it_is_first_fit_longest_first(lengths):
    packing = pack(lengths, L)
    assert list(zip(packing.rows, packing.starts, strict=True)) == first_fit(lengths.tolist())


@given(lengths=lengths_lists, per_row=st.integers(1, 4))
def test_rows_hold_as_many_sequences_as_always_fit(lengths, per_row):
    """What the learner sizes its microbatches by."""
    packing = pack(lengths, L * per_row)
    assert packing.num_rows <= -(-len(lengths) // per_row)


def test_a_worked_example():
    packing = pack(np.array([2, 5, 3]), 6, 3)
    np.testing.assert_array_equal(
        place(packing, np.arange(1, 11, dtype=np.float32)),
        [[3, 4, 5, 6, 7, 0], [8, 9, 10, 1, 2, 0], [0] * 6],
    )
    positions, segments = positions_and_segments(packing)
    np.testing.assert_array_equal(positions, [[0, 1, 2, 3, 4, 0], [0, 1, 2, 0, 1, 0], [0] * 6])
    np.testing.assert_array_equal(segments, [[1, 1, 1, 1, 1, 0], [1, 1, 1, 2, 2, 0], [0] * 6])


@pytest.mark.parametrize("dtype", [bool, np.int32, np.float32])
def test_values_keep_their_dtype(dtype):
    packing = pack(np.array([2, 1]), 4)
    values = np.array([1, 0, 1], dtype)
    assert place(packing, values).dtype == dtype
    np.testing.assert_array_equal(take(packing, place(packing, values)), values)


@pytest.mark.parametrize("lengths", [[], [3, 0], [3, -1], [17, 2]])
def test_what_does_not_fit_is_refused(lengths):
    with pytest.raises(ValueError, match=r"must be at least one, each from 1 to row_tokens \(16\)"):
        pack(np.array(lengths, int), L)


def test_microbatches_are_all_rows_in_order():
    leaf = np.arange(24).reshape(6, 4)
    parts = microbatches(TokenBatch(*[leaf + i for i in range(len(TokenBatch._fields))]), 2)
    assert len(parts) == 3
    for i, name in enumerate(TokenBatch._fields):
        np.testing.assert_array_equal(np.concatenate([getattr(part, name) for part in parts]), leaf + i)

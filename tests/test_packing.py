"""Sequences in rows: every token has one place, and the order of the sequences decides nothing else."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from text_fakes import take

from seedx.learner.packing import lay_out, microbatches, pack, place
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
    layout = lay_out(packing)
    for length, row, start in zip(lengths, packing.rows, packing.starts, strict=True):
        own = slice(start, start + length)
        np.testing.assert_array_equal(layout.positions[row, own], np.arange(length))
        np.testing.assert_array_equal(layout.before[row, own], [0, *range(start, start + length - 1)])
        for leaf in (layout.segments, layout.parents):
            np.testing.assert_array_equal(leaf[row, own], start + 1)
    padding = np.ones((packing.num_rows, L), bool)
    padding.ravel()[packing.places] = False
    for leaf in layout:
        assert leaf.dtype == np.int32
        np.testing.assert_array_equal(leaf[padding], 0)


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
    positions, segments, parents, before = lay_out(packing)
    np.testing.assert_array_equal(positions, [[0, 1, 2, 3, 4, 0], [0, 1, 2, 0, 1, 0], [0] * 6])
    np.testing.assert_array_equal(segments, [[1, 1, 1, 1, 1, 0], [1, 1, 1, 4, 4, 0], [0] * 6])
    np.testing.assert_array_equal(parents, segments)
    np.testing.assert_array_equal(before, [[0, 0, 1, 2, 3, 0], [0, 0, 1, 0, 3, 0], [0] * 6])


# ---- sequences that begin with the same prompt


@st.composite
def shared(draw):
    """Prompts `[P]` and whole lengths `[N]`, none longer than a row."""
    per_prompt = draw(st.integers(1, 5))
    prompts = draw(st.lists(st.integers(1, L - 1), min_size=1, max_size=6))
    rest = [draw(st.integers(1, L - prompt)) for prompt in prompts for _ in range(per_prompt)]
    return np.array(prompts), np.repeat(prompts, per_prompt) + rest


@given(case=shared())
def test_sequences_of_a_prompt_have_it_in_common_and_nothing_else(case):
    prompts, lengths = case
    packing = pack(lengths, L, prompts=prompts)
    row_of, owner = packing.places // L, {}
    families = set()
    for i, of_sequence in enumerate(np.split(np.arange(lengths.sum()), np.cumsum(lengths)[:-1])):
        number = i // (len(lengths) // len(prompts))
        assert len(set(row_of[of_sequence])) == 1
        for position, place_of in enumerate(packing.places[of_sequence]):
            token = (number, position) if position < prompts[number] else (number, position, i)
            assert owner.setdefault(place_of, token) == token
        families.add((number, packing.places[of_sequence][0]))
    rest = lengths - np.repeat(prompts, len(lengths) // len(prompts))
    assert len(owner) == rest.sum() + sum(prompts[number] for number, _ in families)


@given(case=shared())
def test_a_family_has_as_many_as_fit(case):
    """One for each prompt, but where it is too long: then the first of the next would not have fitted."""
    prompts, lengths = case
    packing, per_prompt = pack(lengths, L, prompts=prompts), len(lengths) // len(prompts)
    of = list(zip(packing.rows, packing.prompt_starts, strict=True))
    for i in range(len(lengths)):
        own = lengths[i] - prompts[i // per_prompt]
        if i % per_prompt and of[i] != of[i - 1]:
            assert packing.starts[i - 1] + lengths[i - 1] - prompts[i // per_prompt] - of[i - 1][1] + own > L
        elif i % per_prompt:
            assert packing.starts[i] == packing.starts[i - 1] + lengths[i - 1] - prompts[i // per_prompt]


def test_families_worked_by_hand():
    """Prompts of 2 and 1 tokens; 3, 1, 2 and 1, 1, 1 follow them. The first family is a token too long for a row."""
    tokens = np.array([1, 2, 3, 4, 5, 1, 2, 6, 1, 2, 7, 8, 11, 12, 11, 13, 11, 14])
    packing = pack(np.array([5, 3, 4, 2, 2, 2]), 7, prompts=np.array([2, 1]))
    np.testing.assert_array_equal(
        place(packing, tokens), [[1, 2, 3, 4, 5, 6, 0], [1, 2, 7, 8, 0, 0, 0], [11, 12, 13, 14, 0, 0, 0]]
    )
    layout = lay_out(packing)
    for name, want in {
        "positions": [[0, 1, 2, 3, 4, 2, 0], [0, 1, 2, 3, 0, 0, 0], [0, 1, 1, 1, 0, 0, 0]],
        "segments": [[1, 1, 3, 3, 3, 6, 0], [1, 1, 3, 3, 0, 0, 0], [1, 2, 3, 4, 0, 0, 0]],
        "parents": [[1, 1, 1, 1, 1, 1, 0], [1, 1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 0, 0, 0]],
        "before": [[0, 0, 1, 2, 3, 1, 0], [0, 0, 1, 2, 0, 0, 0], [0, 0, 0, 0, 0, 0, 0]],
    }.items():
        np.testing.assert_array_equal(getattr(layout, name), want, err_msg=name)


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

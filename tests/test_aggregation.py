"""Weights of tokens: the worked example, what they sum to, and that no split of a batch changes the loss."""

from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from seedx.learner.aggregation import Aggregation, sequence_weights

LOSSES = np.array([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
MASK = np.array([[True, True, False], [True, True, True]])
MODES = get_args(Aggregation)
lengths_lists = st.lists(st.integers(0, 50), min_size=1, max_size=8).map(np.array)


def aggregate(mode, losses, mask, fixed_length=None):
    weights = sequence_weights(mode, mask.sum(axis=1), fixed_length)
    return np.sum(losses * mask * weights[:, None])


@pytest.mark.parametrize(
    ("mode", "value"),
    [
        ("token-mean", 3.6),
        ("seq-mean-token-mean", 3.25),
        ("seq-mean-token-sum", 9.0),
        ("fixed-length", 3.0),
        ("fixed-length-sum", 6.0),
    ],
)
def test_worked_example(mode, value):
    np.testing.assert_allclose(aggregate(mode, LOSSES, MASK, 3), value, rtol=1e-6)


@pytest.mark.parametrize("mode", MODES)
@given(lengths=lengths_lists)
def test_what_the_weights_of_all_tokens_sum_to(mode, lengths):
    weights = sequence_weights(mode, lengths, 64)
    tokens, count = lengths.sum(), max((lengths > 0).sum(), 1)
    want = {
        "token-mean": float(tokens > 0),
        "seq-mean-token-mean": float(tokens > 0),
        "seq-mean-token-sum": tokens / count,
        "fixed-length": tokens / (count * 64),
        "fixed-length-sum": tokens / 64,
    }
    np.testing.assert_allclose(np.sum(weights * lengths, dtype=np.float64), want[mode], rtol=1e-6)


@pytest.mark.parametrize("mode", MODES)
@given(lengths=lengths_lists, empty=st.integers(1, 3))
def test_empty_sequences_count_nowhere(mode, lengths, empty):
    padded = sequence_weights(mode, np.concatenate([lengths, np.zeros(empty, int)]), 64)
    np.testing.assert_array_equal(padded[: len(lengths)], sequence_weights(mode, lengths, 64))
    np.testing.assert_array_equal(padded[len(lengths) :], 0.0)
    np.testing.assert_array_equal(padded[:-empty][lengths == 0], 0.0)


@pytest.mark.parametrize("mode", MODES)
def test_parts_of_a_batch_add_up_to_it(mode):
    rng = np.random.default_rng(0)
    mask = np.arange(5) < rng.integers(0, 6, (6, 1))
    losses, weights = rng.normal(size=(6, 5)), sequence_weights(mode, mask.sum(axis=1), 5)[:, None]
    parts = [np.sum((losses * mask * weights)[rows]) for rows in np.split(rng.permutation(6), [1, 4])]
    np.testing.assert_allclose(sum(parts), aggregate(mode, losses, mask, 5), rtol=1e-6)


@pytest.mark.parametrize("mode", ["fixed-length", "fixed-length-sum"])
@pytest.mark.parametrize("fixed_length", [None, 0])
def test_a_fixed_length_is_required_where_it_is_used(mode, fixed_length):
    with pytest.raises(ValueError, match=f'"{mode}" divides by a fixed length of at least 1 token, got {fixed_length}'):
        sequence_weights(mode, np.array([3]), fixed_length)

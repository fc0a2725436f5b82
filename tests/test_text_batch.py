"""From groups to packed rows: sequences, advantages and weights against numbers worked by hand."""

from typing import get_args, get_type_hints

import numpy as np
import pytest
from text_fakes import Completion, items_of, parts_of, random_items, take

from seedx.grpo_config import GrpoConfig
from seedx.learner.text_batch import pack_batch, sequence_ids, sequences_of
from seedx.replay.fifo import Fifo
from seedx.replay.items import choose

HALF = 0.5**0.5  # a group of [1, 0] has deviation HALF, with ddof 1
ADVANTAGES = get_args(get_type_hints(GrpoConfig)["advantage"])
AGGREGATIONS = get_args(get_type_hints(GrpoConfig)["aggregation"])
SIMPLE = items_of(
    ([5, 6], [Completion([7, 8, 9], 1.0, (1,), version=3), Completion([4], 0.0, finish_reason="length")]),
    ([1], [Completion([2, 3], 5.0, version=4), Completion([3, 2, 1, 0], 1.0, (0, 2))]),
)
# One completion without a score, one that was cut off.
RAGGED = items_of(
    ([5], [Completion([1, 2], 1.0), Completion([3], np.nan), Completion([4, 5, 6], 0.0, (1,), "length")]),
    ([6, 7], [Completion([8], 2.0), Completion([9, 9], 2.0), Completion([1] * 4, 5.0)]),
)


def packed(items, config, **options):
    return pack_batch(
        sequences_of(items, config), config, **{"version": 0, "row_tokens": 8, "rows_multiple": 2, **options}
    )


def test_each_sequence_is_the_prompt_with_one_completion():
    sequences = sequences_of(SIMPLE, GrpoConfig(group_size=2))
    np.testing.assert_array_equal(sequences.lengths, [5, 3, 3, 5])
    for name, want in {
        "tokens": [[5, 6, 7, 8, 9], [5, 6, 4], [1, 2, 3], [1, 3, 2, 1, 0]],
        "sampled": [[0, 0, 1, 0, 1], [0, 0, 1], [0, 1, 1], [0, 0, 1, 0, 1]],
        "logprobs": [[0, 0, -0.125, 0, -0.375], [0, 0, -0.125], [0, -0.125, -0.25], [0, 0, -0.25, 0, -0.5]],
        "versions": [[0, 0, 3, 0, 3], [0, 0, 0], [0, 4, 4], [0] * 5],
    }.items():
        for got, row in zip(parts_of(sequences, getattr(sequences, name)), want, strict=True):
            np.testing.assert_array_equal(got, row, err_msg=name)
    np.testing.assert_array_equal(sequences.counted, [2, 1, 2, 2])


# The rewards are [1, 0] and [5, 1], of completions with [2, 1] and [2, 2] tokens that count.
@pytest.mark.parametrize(
    ("advantage", "want"),
    [
        ("group_std", [0.5 / (HALF + 1e-4), -0.5 / (HALF + 1e-4), 2 / (4 * HALF + 1e-4), -2 / (4 * HALF + 1e-4)]),
        ("group_mean", [0.5, -0.5, 2.0, -2.0]),
        # All four rewards, less their mean 1.75: -.75, -1.75, 3.25, -.75.
        ("batch_std", np.array([0.5, -0.5, 2.0, -2.0]) / ((14.75 / 3) ** 0.5 + 1e-4)),
        ("leave_one_out", [1.0, -1.0, 4.0, -4.0]),
        # Of tokens: .5, .5, -.5, 2, 2, -2, -2, whose mean is 1/14.
        ("whitened", (np.array([0.5, -0.5, 2.0, -2.0]) - 1 / 14) / ((16.75 - 7 / 14**2) / 6) ** 0.5),
    ],
)
def test_advantages_worked_by_hand(advantage, want):
    sequences = sequences_of(SIMPLE, GrpoConfig(group_size=2, advantage=advantage))
    assert sequences.advantages.dtype == np.float32
    np.testing.assert_allclose(sequences.advantages, want, rtol=1e-5)


@pytest.mark.parametrize("advantage", ADVANTAGES)
@pytest.mark.parametrize("mask_truncated", [False, True])
def test_what_is_left_out_counts_nowhere(advantage, mask_truncated):
    config = GrpoConfig(group_size=3, advantage=advantage, mask_truncated=mask_truncated)
    sequences = sequences_of(RAGGED, config)
    np.testing.assert_array_equal(sequences.counted, [2, 0, 0 if mask_truncated else 2, 1, 2, 4])
    assert np.isfinite(sequences.advantages).all()
    np.testing.assert_array_equal(sequences.advantages[1], 0.0)
    if advantage == "leave_one_out":
        np.testing.assert_allclose(
            sequences.advantages, [0 if mask_truncated else 1, 0, -1 + mask_truncated, -1.5, -1.5, 3]
        )
    if advantage == "group_mean":
        half = 0.0 if mask_truncated else 0.5  # alone in its group it has nothing to be compared with
        np.testing.assert_allclose(sequences.advantages, [half, 0, -half, -1, -1, 2], rtol=1e-6)
    batch, packing = packed(RAGGED, config, max_tokens=4)
    trained = parts_of(sequences, take(packing, batch.trained))
    assert [int(part.sum()) for part in trained] == sequences.counted.tolist()
    for part, sampled in zip(trained, parts_of(sequences, sequences.sampled), strict=True):
        assert not (part & ~sampled).any()


@pytest.mark.parametrize("seed", range(3))
def test_whitened_advantages_have_no_mean_and_deviation_1_over_all_tokens(seed):
    sequences = sequences_of(random_items(seed), GrpoConfig(group_size=4, advantage="whitened"))
    tokens = np.repeat(sequences.advantages.astype(np.float64), sequences.counted)
    np.testing.assert_allclose(tokens.mean(), 0.0, atol=1e-6)
    np.testing.assert_allclose(tokens.std(ddof=1), 1.0, rtol=1e-6)


@pytest.mark.parametrize("advantage", ADVANTAGES)
def test_equal_rewards_teach_nothing(advantage):
    items = items_of(([1], [Completion([2], 0.1), Completion([3, 4], 0.1)]), ([2], [Completion([5], 0.7)] * 2))
    np.testing.assert_array_equal(sequences_of(items, GrpoConfig(group_size=2, advantage=advantage)).advantages, 0.0)


def test_a_batch_without_a_single_score_trains_nothing():
    items = items_of(([1], [Completion([2], np.nan), Completion([3, 4], np.nan)]))
    for advantage in ADVANTAGES:
        batch, _ = packed(items, GrpoConfig(group_size=2, advantage=advantage), max_tokens=4)
        assert not batch.trained.any()
        assert not batch.weight.any()
        assert not batch.advantage.any()


# RAGGED has sequences with 2, 0, 2, 1, 2 and 4 tokens that count; the weights of these 11 tokens sum to this.
@pytest.mark.parametrize(
    ("aggregation", "each", "total"),
    [
        ("token-mean", [1 / 11] * 6, 1.0),
        ("seq-mean-token-mean", [1 / 10, 0, 1 / 10, 1 / 5, 1 / 10, 1 / 20], 1.0),
        ("seq-mean-token-sum", [1 / 5] * 6, 11 / 5),
        ("fixed-length", [1 / 40] * 6, 11 / 40),
        ("fixed-length-sum", [1 / 8] * 6, 11 / 8),
    ],
)
def test_weights_of_tokens(aggregation, each, total):
    config = GrpoConfig(group_size=3, aggregation=aggregation)
    sequences = sequences_of(RAGGED, config)
    batch, packing = packed(RAGGED, config, max_tokens=8)
    weights = parts_of(sequences, take(packing, batch.weight))
    trained = parts_of(sequences, take(packing, batch.trained))
    for i in range(6):
        np.testing.assert_allclose(weights[i], each[i] * trained[i], rtol=1e-6)
    np.testing.assert_allclose(batch.weight.sum(dtype=np.float64), total, rtol=1e-6)


@pytest.mark.parametrize("row_tokens", [16, 40])
def test_packed_rows_hold_the_sequences(row_tokens):
    config = GrpoConfig(group_size=4)
    sequences = sequences_of(random_items(1), config)
    batch, packing = packed(random_items(1), config, max_tokens=8, row_tokens=row_tokens, rows_multiple=3)
    shape = (packing.num_rows, row_tokens)
    dtypes = (*[np.int32] * 5, bool, bool, *[np.float32] * 6)
    assert [(leaf.shape, leaf.dtype) for leaf in batch] == [(shape, dtype) for dtype in dtypes]
    assert packing.num_rows % 3 == 0
    np.testing.assert_array_equal(take(packing, batch.tokens), sequences.tokens)
    advantages = np.repeat(sequences.advantages, sequences.lengths)
    np.testing.assert_array_equal(take(packing, batch.advantage)[sequences.sampled], advantages[sequences.sampled])
    for leaf in (batch.behaviour, batch.old):
        np.testing.assert_array_equal(take(packing, leaf), sequences.logprobs)
    assert not np.any(batch.value)
    assert not np.any(batch.target)
    ids, count = sequence_ids(batch)
    assert 0 <= int(ids.min()) <= int(ids.max()) < count
    own = np.where(packing.in_prompt, -1, take(packing, np.asarray(ids)))
    numbers = [set(part) - {-1} for part in parts_of(sequences, own)]
    assert all(len(number) == 1 for number in numbers)
    assert len(set.union(*numbers)) == len(sequences.lengths)  # one for each, whatever row it is in


def test_the_most_sequences_that_a_row_may_hold_have_ids_of_their_own():
    items = items_of(*[([1], [Completion([2])] * 7)] * 2)
    batch, packing = packed(items, GrpoConfig(group_size=7), max_tokens=1, rows_multiple=1)
    assert packing.num_rows == 2
    ids, count = sequence_ids(batch)
    assert len(np.unique(ids)) == 16  # two prompts, too
    assert int(ids.max()) < count


def test_groups_come_out_of_a_replay_as_they_were():
    items, config = random_items(2, num_groups=5), GrpoConfig(group_size=4)
    fifo = Fifo(100)
    for places in (slice(0, 1), slice(1, 4), slice(4, 5)):
        part = choose(items, places)
        fifo.insert(part, np.ones(len(part.lengths)), 60.0)
    got = [sequences_of(fifo.sample(count, 60.0).items, config) for count in (2, 3)]
    want = [sequences_of(choose(items, places), config) for places in (slice(0, 2), slice(2, 5))]
    for a, b in zip(got, want, strict=True):
        for name in a._fields:
            np.testing.assert_array_equal(getattr(a, name), getattr(b, name), err_msg=name)


def test_a_completion_that_went_on_over_a_swap_is_not_fresh():
    """Its new tokens look back on keys and values of the old weights."""
    items = items_of(([1], [Completion([2, 3, 4], 1.0, version=7), Completion([5, 6, 7], 0.0, version=7)]))
    items.rows["version"][np.flatnonzero(items.rows["token"] == 5)] = 6
    batch, _ = pack_batch(
        sequences_of(items, GrpoConfig()), GrpoConfig(), version=7, max_tokens=3, row_tokens=4, rows_multiple=1
    )
    assert sorted(batch.tokens[batch.fresh & batch.trained].tolist()) == [2, 3, 4]

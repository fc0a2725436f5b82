"""Group advantages against the constants of other frameworks, exact zeros, and what NaN rewards leave untouched."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from seedx.learner.advantages import (
    group_relative,
    leave_one_out,
    overlong_penalty,
    returns_to_go,
    spread,
    whiten,
)

PASSES = np.array([[1.0, 0.0, 0.0, 1.0]])
SIGNS = np.array([[1.0, -1.0, -1.0, 1.0]])
NAN = np.nan

quarters = st.integers(-8, 8).map(lambda n: n / 4)
groups = arrays(np.float64, st.tuples(st.integers(1, 4), st.integers(1, 6)), elements=quarters | st.just(NAN))


def slow_group_relative(rewards, scale, ddof, eps):
    """One group at a time, one reward at a time."""
    batch = [r for r in rewards.ravel() if not np.isnan(r)]
    out = np.zeros(rewards.shape)
    for p, group in enumerate(rewards):
        scored = [r for r in group if not np.isnan(r)]
        if len(set(scored)) < 2:
            continue
        mean = sum(scored) / len(scored)
        of = {"std": scored, "batch_std": batch, "none": None}[scale]
        below = 1.0 if of is None else np.std(of, ddof=ddof) + eps
        out[p] = [0.0 if np.isnan(r) else (r - mean) / below for r in group]
    return out


@pytest.mark.parametrize(
    ("eps", "ddof", "size"),
    [(1e-4, 1, 0.8658754), (1e-6, 1, 0.8660239), (1e-9, 1, 0.8660254), (0.0, 0, 1.0)],
    ids=["TRL", "verl and tunix", "OpenRLHF", "numpy.std"],
)
def test_constants_of_other_frameworks(eps, ddof, size):
    np.testing.assert_allclose(group_relative(PASSES, ddof=ddof, eps=eps), size * SIGNS, atol=1e-7)


def test_dr_grpo_and_rloo():
    np.testing.assert_array_equal(group_relative(PASSES, "none"), 0.5 * SIGNS)
    np.testing.assert_allclose(leave_one_out(PASSES), 2 / 3 * SIGNS, rtol=1e-6)
    np.testing.assert_allclose(leave_one_out(np.array([[3.0, 1.0, 2.0, NAN]])), [[1.5, -1.5, 0.0, 0.0]], atol=1e-7)


@pytest.mark.parametrize("ddof", [0, 1])
@pytest.mark.parametrize("scale", ["std", "batch_std", "none"])
@given(rewards=groups)
def test_equals_the_loop_over_groups(scale, ddof, rewards):
    got = group_relative(rewards, scale, ddof=ddof)
    np.testing.assert_allclose(got, slow_group_relative(rewards, scale, ddof, 1e-4), rtol=1e-6, atol=1e-6)


@given(rewards=groups)
def test_leave_one_out_is_the_mean_of_the_others(rewards):
    got = leave_one_out(rewards)
    for p, i in np.ndindex(rewards.shape):
        others = [r for r in np.delete(rewards[p], i) if not np.isnan(r)]
        want = rewards[p, i] - np.mean(others) if others and not np.isnan(rewards[p, i]) else 0.0
        np.testing.assert_allclose(got[p, i], want, atol=1e-6)


@given(rewards=groups, shift=st.integers(-100, 100))
def test_a_shift_of_all_rewards_changes_nothing(rewards, shift):
    for advantages in (group_relative, leave_one_out):
        np.testing.assert_allclose(advantages(rewards + shift), advantages(rewards), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("scale", ["std", "batch_std", "none"])
def test_equal_rewards_give_exactly_zero(scale, dtype):
    """Also where their mean is not exactly one of them, and where they differ by the rounding of a sum."""
    equal = [[0.1] * 8, [0.35] * 7 + [NAN], [0.1 + 0.2, 0.3] * 4, [1e6] * 8, [NAN] * 8, [0.7] + [NAN] * 7]
    mixed = np.array([*equal, [0.0, 1.0] * 4], dtype)
    for got in (group_relative(mixed, scale, eps=1e-9), leave_one_out(mixed)):
        np.testing.assert_array_equal(got[:-1].view(np.uint32), 0)
        assert (got[-1] != 0).all()
    np.testing.assert_array_equal(spread(mixed), [False] * len(equal) + [True])
    np.testing.assert_array_equal(group_relative(mixed[:-1], scale, eps=0.0), 0.0)


def test_a_reward_that_could_not_be_scored_is_as_if_it_were_not_there():
    with_nan = group_relative(np.array([[1.0, NAN, 0.0, 0.0, NAN]]))
    np.testing.assert_array_equal(with_nan[:, [0, 2, 3]], group_relative(np.array([[1.0, 0.0, 0.0]])))
    np.testing.assert_array_equal(with_nan[:, [1, 4]], 0.0)


@pytest.mark.parametrize("advantages", [group_relative, leave_one_out, spread])
def test_infinite_rewards_are_refused(advantages):
    with pytest.raises(ValueError, match=r"group 1 is -inf; rewards are finite"):
        advantages(np.array([[0.0, 1.0], [0.0, -np.inf]]))


def test_whitening_is_over_the_tokens_that_count():
    values, mask = np.array([[1.0, NAN, 2.0], [3.0, 4.0, np.inf]]), np.array([[True, False, True], [True, True, False]])
    got = whiten(values, mask)
    np.testing.assert_allclose(got[mask], np.array([-1.5, -0.5, 0.5, 1.5]) / np.sqrt(5 / 3), rtol=1e-6)
    np.testing.assert_array_equal(got[~mask], 0.0)


@pytest.mark.parametrize("mask", [[True] * 7, [True] + [False] * 6, [False] * 7])
def test_whitening_equal_values_gives_exactly_zero(mask):
    np.testing.assert_array_equal(whiten(np.full(7, 0.35, np.float32), np.array(mask)).view(np.uint32), 0)


def test_whitening_takes_no_notice_of_the_layout():
    values = np.random.default_rng(0).normal(size=12)
    flat, square = whiten(values, np.ones(12, bool)), whiten(values.reshape(3, 4), np.ones((3, 4), bool))
    np.testing.assert_allclose(flat, square.ravel(), rtol=1e-6)
    np.testing.assert_allclose([flat.mean(), flat.std(ddof=1)], [0, 1], atol=1e-6)


def test_returns_to_go_skip_what_was_not_sampled_and_end_with_the_sequence():
    rewards = np.array([[1.0, NAN, 2.0, 4.0, 8.0, NAN]])
    mask = np.array([[True, False, True, True, True, False]])
    got = returns_to_go(rewards, mask, np.array([[0, 0, 0, 1, 1, 1]]), discount=0.5)
    np.testing.assert_array_equal(got, [[2.0, 0.0, 2.0, 8.0, 8.0, 0.0]])


def test_overlong_penalty_of_dapo():
    got = overlong_penalty(np.array([0, 80, 81, 90, 100, 101, 1000]), max_length=100, cache=20)
    np.testing.assert_allclose(got, [0.0, 0.0, -0.05, -0.5, -1.0, -1.0, -1.0], rtol=1e-6)
    with pytest.raises(ValueError, match=r"cache is 0 tokens; allowed: 1 to max_length \(100\)"):
        overlong_penalty(np.array([5]), max_length=100, cache=0)

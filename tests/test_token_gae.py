"""Advantages over sampled tokens against a loop over each sequence alone; the value loss by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from seedx.learner.token_gae import token_gae, token_value_loss

L = 10


def alone(rewards, values, discount, lambda_):
    """Equation 16 for the sampled tokens of one sequence: the discounted sum of what is left of the deltas."""
    n, after = len(rewards), np.append(values[1:], 0.0)
    deltas = rewards + discount * after - values
    return [sum((discount * lambda_) ** (k - t) * deltas[k] for k in range(t, n)) for t in range(n)]


def random_row(seed, cuts, mask):
    rng = np.random.default_rng(seed)
    sequence = np.searchsorted(sorted(cuts), np.arange(L), side="right")
    return rng.normal(size=L), rng.normal(size=L), np.array(mask), sequence


def test_golden_values():
    """Two completions, the second cut: discount times the value of what follows, .4, is part of its last reward."""
    got = token_gae(
        rewards=np.array([1.0, 0.0, -1.0, 2.0 + 0.9 * 0.4]),
        values=np.array([0.5, 0.2, -0.3, 1.0]),
        mask=np.ones(4, bool),
        sequence=np.array([0, 0, 0, 1]),
        discount=0.9,
        lambda_=0.95,
    )
    np.testing.assert_allclose(got.advantages, [-0.233568, -1.0685, -0.7, 1.36], atol=1e-6)
    np.testing.assert_allclose(got.targets, [0.266432, -0.8685, -1.0, 2.36], atol=1e-6)


@given(
    seed=st.integers(0, 1000),
    cuts=st.sets(st.integers(1, L - 1), max_size=4),
    mask=st.lists(st.booleans(), min_size=L, max_size=L),
    discount=st.sampled_from([1.0, 0.9]),
    lambda_=st.sampled_from([0.0, 0.95, 1.0]),
)
def test_a_packed_row_equals_its_sequences_alone(seed, cuts, mask, discount, lambda_):
    rewards, values, mask, sequence = random_row(seed, cuts, mask)
    got = token_gae(rewards, values, mask, sequence, discount=discount, lambda_=lambda_)
    for i in set(sequence):
        tokens = mask & (sequence == i)
        want = alone(rewards[tokens], values[tokens], discount, lambda_)
        np.testing.assert_allclose(got.advantages[tokens], want, atol=1e-5)
        np.testing.assert_allclose(got.targets[tokens], want + values[tokens], atol=1e-5)


def test_rows_are_independent_and_nothing_masked_leaks():
    rows = [random_row(seed, {4, 7}, np.arange(L) % 3 != seed) for seed in range(3)]
    rewards, values, mask, sequence = map(np.stack, zip(*rows, strict=True))
    dirty = [np.where(mask, x, bad) for x, bad in ((rewards, np.nan), (values, -np.inf))]
    together = token_gae(*dirty, mask, np.where(mask, sequence, 1), discount=0.9, lambda_=0.95)
    for got, row in zip(zip(*together, strict=True), rows, strict=True):
        for x, y in zip(got, token_gae(*row, discount=0.9, lambda_=0.95), strict=True):
            np.testing.assert_array_equal(x, y)
    for x in together:
        np.testing.assert_array_equal(x[~mask], 0.0)


def test_without_discount_and_lambda_1_targets_are_returns():
    rewards, values, mask, _ = random_row(3, {5}, [True] * L)
    got = token_gae(rewards, values, mask, np.zeros(L, int))
    np.testing.assert_allclose(got.targets, np.cumsum(rewards[::-1])[::-1], atol=1e-5)


@pytest.mark.parametrize(
    ("value", "clip", "loss", "gradient"),
    [
        (3.0, None, 0.5, -1.0),
        (3.0, 0.5, 3.125, 0.0),  # went further towards the target than allowed: the held value's error, no gradient
        (1.2, 0.5, 3.92, -2.8),
        (0.0, 0.5, 8.0, -4.0),  # went away from it: its own error is the larger
    ],
)
def test_value_loss_of_one_token(value, clip, loss, gradient):
    old, target = jnp.array([1.0]), jnp.array([4.0])

    def total(values):
        return jnp.sum(token_value_loss(values, old, target, jnp.ones(1, bool), clip))

    got = jax.value_and_grad(total)(jnp.array([value]))
    np.testing.assert_allclose(got[0], loss, rtol=1e-6)
    np.testing.assert_allclose(got[1], [gradient], rtol=1e-6)


@pytest.mark.parametrize("clip", [None, 0.2])
def test_value_loss_of_masked_tokens_is_zero_and_only_values_have_a_gradient(clip):
    mask = jnp.array([True, False])

    def total(values, old, targets):
        losses = token_value_loss(values, old, targets, mask, clip)
        return jnp.sum(losses), losses

    inputs = jnp.array([1.0, jnp.nan]), jnp.array([0.9, jnp.inf]), jnp.array([0.5, jnp.nan])
    gradients, losses = jax.grad(total, argnums=(0, 1, 2), has_aux=True)(*inputs)
    np.testing.assert_allclose(losses, [0.125, 0.0])
    np.testing.assert_allclose(gradients, [[0.5, 0.0], [0.0, 0.0], [0.0, 0.0]])

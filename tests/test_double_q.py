"""Value rescaling and n-step double Q targets against plain transcriptions of their definitions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from seedx.learner.double_q import mixed_priorities, n_step_returns
from seedx.learner.rescaling import EPSILON, rescale, unscale


def h(x):
    return np.sign(x) * (np.sqrt(np.abs(x) + 1) - 1) + EPSILON * x


@pytest.mark.parametrize(("x", "expected"), [(100.0, 9.149876), (1000.0, 31.638584), (-10.0, -2.326625), (0.0, 0.0)])
def test_rescaling_has_the_published_values(x, expected):
    np.testing.assert_allclose(rescale(jnp.asarray(x)), expected, rtol=1e-6)


@given(st.floats(-1e6, 1e6, width=32))
def test_rescaling_is_undone_in_float32(x):
    x = np.float32(x)
    np.testing.assert_allclose(rescale(x[None]), h(np.float64(x))[None], rtol=1e-6, atol=1e-15)
    for value in (x[None], jnp.asarray(x)[None]):
        np.testing.assert_allclose(unscale(rescale(value)), value, rtol=2e-6, atol=1e-30)
        np.testing.assert_allclose(rescale(unscale(value)), value, rtol=2e-6, atol=1e-30)


def slow_returns(rewards, discounts, values, mask, n):
    """One row and one environment at a time, straight from the definition."""
    length, batch = rewards.shape
    out = np.zeros((length, batch))
    for b in range(batch):
        for t in range(length):
            total, product, k = 0.0, 1.0, t
            while k < min(t + n, length) and mask[k, b]:
                total += product * rewards[k, b]
                product *= discounts[k, b]
                k += 1
            out[t, b] = total + product * values[k, b]
    return out


@given(st.integers(1, 8), st.integers(1, 6), st.integers(0, 2**31))
def test_returns_equal_the_plain_transcription_over_ends_and_resets(length, n, seed):
    rng = np.random.default_rng(seed)
    mask = rng.random((length, 3)) < 0.7
    rewards, discounts = rng.normal(size=(2, length, 3)).astype(np.float32)
    discounts = np.where(rng.random((length, 3)) < 0.2, 0, np.abs(discounts)).astype(np.float32)
    values = rng.normal(size=(length + 1, 3)).astype(np.float32)
    poisoned = np.where(mask, rewards, np.nan).astype(np.float32), np.where(mask, discounts, np.inf).astype(np.float32)
    expected = slow_returns(rewards, discounts, values, mask, n)
    for found in (
        n_step_returns(*poisoned, values, mask, n),
        jax.jit(n_step_returns, static_argnums=4)(*poisoned, values, mask, n),
    ):
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-5)


def test_priorities_mix_the_largest_and_the_mean_error_of_executed_rows():
    errors = np.array([[1.0, 5.0, 9.0], [-3.0, 7.0, 9.0], [np.nan, -2.0, 9.0]], np.float32)
    mask = np.array([[True, False, False], [True, False, False], [False, True, False]])
    expected = [0.9 * 3 + 0.1 * 2, 2.0, 0.0]
    for found in (mixed_priorities(errors, mask, 0.9), mixed_priorities(jnp.asarray(errors), jnp.asarray(mask), 0.9)):
        np.testing.assert_allclose(found, np.asarray(expected, np.float32), rtol=1e-6)

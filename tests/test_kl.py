"""KL estimates: published values, and the mean of their gradients over all tokens of a small softmax."""

from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from seedx.learner.kl import KL, kl_terms

LOG_PROBS = jnp.array([[-1.0, -2.0, -3.0], [-0.5, -0.1, -4.0]])
REF = jnp.array([[-1.1, -1.5, -3.0], [-0.4, -0.3, -2.0]])
K3 = [[0.00483739, 0.14872122, 0.0], [0.00517094, 0.01873076, 4.389056]]
EVERY = jnp.ones((2, 3), bool)
KINDS = get_args(KL)

LOGITS = jnp.array([0.3, -0.8, 1.1])  # of pi
REF_LOG_PROBS = jax.nn.log_softmax(jnp.array([-0.5, 0.4, 0.2]))
OLD_LOG_PROBS = jax.nn.log_softmax(jnp.array([0.1, 0.2, -0.6]))
ALL_TOKENS = jnp.ones(3, bool)


def kl(p, q):
    return jnp.sum(jnp.exp(p) * (p - q))


FORWARD = jax.grad(lambda logits: kl(jax.nn.log_softmax(logits), REF_LOG_PROBS))(LOGITS)  # grad KL(pi, ref)
BACKWARD = jax.grad(lambda logits: kl(REF_LOG_PROBS, jax.nn.log_softmax(logits)))(LOGITS)  # grad KL(ref, pi)


def mean_gradient(terms, sampler):
    """Gradient with respect to the logits of the mean of terms(log pi) over tokens that `sampler` draws."""
    return jax.grad(lambda logits: jnp.sum(jnp.exp(sampler) * terms(jax.nn.log_softmax(logits))))(LOGITS)


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        ("k1", [[0.1, -0.5, 0.0], [-0.1, 0.2, -2.0]]),
        ("k2", [[0.005, 0.125, 0.0], [0.005, 0.02, 2.0]]),
        ("k3", K3),
        ("k3+", K3),
    ],
)
def test_golden_values_of_tunix(kind, values):
    np.testing.assert_allclose(kl_terms(kind, LOG_PROBS, REF, EVERY), values, atol=1e-6)


def test_k3_keeps_its_digits_near_zero():
    d = jnp.array([1e-2, -1e-3])
    np.testing.assert_allclose(kl_terms("k3", d, jnp.zeros(2), jnp.ones(2, bool)), [4.98337e-5, 5.00167e-7], rtol=1e-3)


@pytest.mark.parametrize(
    ("kind", "gradient"), [("k1", 0 * FORWARD), ("k2", FORWARD), ("k3", BACKWARD), ("k3+", FORWARD)]
)
def test_mean_gradient_in_the_loss(kind, gradient):
    got = mean_gradient(lambda lp: kl_terms(kind, lp, REF_LOG_PROBS, ALL_TOKENS), jax.nn.log_softmax(LOGITS))
    np.testing.assert_allclose(got, gradient, atol=1e-6)
    assert np.abs(FORWARD - BACKWARD).max() > 0.01


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sampler", [jax.nn.log_softmax(LOGITS), OLD_LOG_PROBS], ids=["on policy", "off policy"])
def test_mean_gradient_with_the_policy_that_sampled(kind, sampler):
    got = mean_gradient(lambda lp: kl_terms(kind, lp, REF_LOG_PROBS, ALL_TOKENS, sampler), sampler)
    np.testing.assert_allclose(got, FORWARD, atol=1e-6)


@pytest.mark.parametrize(
    ("kind", "gradient"), [("k1", FORWARD), ("k3", FORWARD - BACKWARD), ("k3+", FORWARD - BACKWARD)]
)
def test_mean_gradient_in_the_reward(kind, gradient):
    """The score function: a reward, which has no gradient, times log pi."""

    def terms(lp):
        return jax.lax.stop_gradient(kl_terms(kind, lp, REF_LOG_PROBS, ALL_TOKENS)) * lp

    np.testing.assert_allclose(mean_gradient(terms, jax.nn.log_softmax(LOGITS)), gradient, atol=1e-6)


@pytest.mark.parametrize(("kind", "value"), [("k1", 20.0), ("k2", 200.0), ("k3", 19.0), ("k3+", 19.0)])
def test_a_difference_beyond_the_clamp_has_no_gradient(kind, value):
    def total(lp):
        return jnp.sum(kl_terms(kind, lp, jnp.array([-50.0, -jnp.inf]), jnp.ones(2, bool)))

    got, gradient = jax.value_and_grad(total)(jnp.array([-1.0, -1.0]))
    np.testing.assert_allclose(got, 2 * value, rtol=1e-6)
    np.testing.assert_array_equal(gradient, 0.0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("garbage", [jnp.nan, -jnp.inf, 1e30])
def test_nothing_masked_leaks(kind, garbage):
    mask = jnp.array([[True, False, True], [False, True, True]])

    def total(lp, ref, old):
        terms = kl_terms(kind, lp, ref, mask, old)
        return jnp.sum(terms), terms

    def dirty(x):
        return jnp.where(mask, x, garbage)

    gradient, terms = jax.grad(total, has_aux=True)(dirty(LOG_PROBS), dirty(REF), dirty(LOG_PROBS))
    clean_gradient, clean = jax.grad(total, has_aux=True)(LOG_PROBS, REF, LOG_PROBS)
    np.testing.assert_array_equal(terms, clean)
    np.testing.assert_array_equal(gradient, clean_gradient)
    np.testing.assert_array_equal(terms[~mask], 0.0)
    np.testing.assert_array_equal(gradient[~mask], 0.0)


@pytest.mark.parametrize("kind", KINDS)
def test_reference_and_sampler_carry_no_gradient(kind):
    def total(ref, old):
        return jnp.sum(kl_terms(kind, LOG_PROBS, ref, EVERY, old))

    for gradient in jax.grad(total, argnums=(0, 1))(REF, REF):
        np.testing.assert_array_equal(gradient, 0.0)

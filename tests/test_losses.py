"""The loss terms against sums written out, and their gradients."""

import jax
import jax.numpy as jnp
import numpy as np

from seedx.learner.losses import entropy_loss, policy_gradient_loss, value_loss

MASK = jnp.array([[True, True], [False, True]])
X = jnp.array([[1.0, 2.0], [jnp.nan, 4.0]])
Y = jnp.array([[0.5, -1.0], [jnp.nan, 3.0]])


def test_sums_over_executed_transitions():
    assert policy_gradient_loss(X, Y, MASK) == -(1 * 0.5 - 2 * 1 + 4 * 3)
    assert value_loss(X, Y, MASK) == 0.5 * (0.5**2 + 3**2 + 1**2)
    assert entropy_loss(X, MASK) == -(1.0 + 2 + 4)


def test_gradients_of_masked_rows_are_zero_though_they_hold_nan():
    policy = jax.grad(policy_gradient_loss)(X, Y, MASK)
    value = jax.grad(value_loss)(X, Y, MASK)
    entropy = jax.grad(entropy_loss)(X, MASK)
    np.testing.assert_array_equal(policy, [[-0.5, 1.0], [0.0, -3.0]])
    np.testing.assert_array_equal(value, [[0.5, 3.0], [0.0, 1.0]])
    np.testing.assert_array_equal(entropy, [[-1.0, -1.0], [0.0, -1.0]])


def test_advantages_and_targets_are_stopped():
    np.testing.assert_array_equal(jax.grad(policy_gradient_loss, argnums=1)(X, Y, MASK), 0.0)
    np.testing.assert_array_equal(jax.grad(value_loss, argnums=1)(X, Y, MASK), 0.0)

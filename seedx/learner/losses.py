"""The three terms of an actor-critic loss, each summed over executed transitions (mask True).

The caller divides by the number of executed transitions of the whole batch. Masked inputs are replaced before they
are used, so that a NaN in them reaches neither the loss nor its gradient.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


def masked_sum(x: Float[Array, "T *B"], mask: Bool[Array, "T *B"]) -> Float[Array, ""]:
    """Sum of x where mask is True."""
    return jnp.sum(jnp.where(mask, x, 0.0))


def policy_gradient_loss(
    log_probs: Float[Array, "T *B"], advantages: Float[Array, "T *B"], mask: Bool[Array, "T *B"]
) -> Float[Array, ""]:
    """Sum of -log pi(a_t|x_t) A_t; no gradient flows into the advantages."""
    advantages = jax.lax.stop_gradient(jnp.where(mask, advantages, 0.0))
    return -jnp.sum(jnp.where(mask, log_probs, 0.0) * advantages)


def value_loss(
    values: Float[Array, "T *B"], targets: Float[Array, "T *B"], mask: Bool[Array, "T *B"]
) -> Float[Array, ""]:
    """Sum of 1/2 (target_t - V_t)^2; no gradient flows into the targets."""
    errors = jnp.where(mask, jax.lax.stop_gradient(targets) - values, 0.0)
    return 0.5 * jnp.sum(jnp.square(errors))


def entropy_loss(entropies: Float[Array, "T *B"], mask: Bool[Array, "T *B"]) -> Float[Array, ""]:
    """Sum of -H(pi(.|x_t))."""
    return -masked_sum(entropies, mask)

"""The logarithm of a ratio of probabilities of tokens, safe to exponentiate."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

_BOUND = 20.0  # exp of it is 5e8: far outside every clip, and its square is still a float32


def log_ratio(log_probs: Float[Array, "*B"], others: Float[Array, "*B"], mask: Bool[Array, "*B"]) -> Float[Array, "*B"]:
    """log_probs - others within +-20, beyond which it has no gradient; 0 where mask is False.

    Both are float32 and of the same temperature. Masked inputs are replaced before they are used, so they may be
    anything. A NaN in a token that counts stays one, for the update to refuse.
    """
    difference = jnp.where(mask, log_probs, 0.0) - jnp.where(mask, others, 0.0)
    return jnp.clip(difference, -_BOUND, _BOUND)

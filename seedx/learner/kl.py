"""Estimates of KL(pi || ref) from the sampled tokens, as terms of a loss or of a reward."""

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from seedx.learner.log_ratio import log_ratio

KL = Literal["k1", "k2", "k3", "k3+"]


def kl_terms(
    kind: KL,
    log_probs: Float[Array, "*B"],
    ref: Float[Array, "*B"],
    mask: Bool[Array, "*B"],
    old: Float[Array, "*B"] | None = None,
) -> Float[Array, "*B"]:
    """One estimate for each token, 0 where mask is False; with d = log pi - log ref, clamped to +-20:

        k1 = d,  k2 = d^2 / 2,  k3 = exp(-d) - 1 + d,  k3+ has the value of k3 and the gradient of k2

    k1 and k3 have the right mean. What descends is the mean gradient, which is another matter. Over tokens of pi:

    | kind | in the loss | in the loss, with `old` | in the reward |
    |---|---|---|---|
    | k1 | 0: no regularisation at all | grad KL(pi, ref) | grad KL(pi, ref) |
    | k2 | grad KL(pi, ref) | grad KL(pi, ref) | - |
    | k3 | grad KL(ref, pi) | grad KL(pi, ref) | grad KL(pi, ref) - grad KL(ref, pi) |
    | k3+ | grad KL(pi, ref) | grad KL(pi, ref) | as k3 |

    With `old` the term is multiplied by pi / old, and the column holds for tokens that old sampled. k1 and k3 are
    differentiated through that ratio, being unbiased values; k2 and k3+ are only weighted, being unbiased gradients.

    Args:
        kind: See above.
        log_probs: log pi, which is differentiated; stop its gradient for a reward.
        ref: log ref, which is not.
        mask: Tokens that count; the other arguments may be anything elsewhere.
        old: Log-probabilities that the tokens were sampled with: log pi, stopped, where pi sampled them itself.
    """
    d = log_ratio(log_probs, jax.lax.stop_gradient(ref), mask)
    match kind:
        case "k1":
            terms = d
        case "k2":
            terms = _k2(d)
        case "k3":
            terms = _k3(d)
        case "k3+":
            terms = jax.lax.stop_gradient(_k3(d)) + (_k2(d) - jax.lax.stop_gradient(_k2(d)))
    if old is None:
        return terms
    ratio = jnp.exp(log_ratio(log_probs, jax.lax.stop_gradient(old), mask))
    return terms * (ratio if kind in ("k1", "k3") else jax.lax.stop_gradient(ratio))


def _k2(d: Array) -> Array:
    return 0.5 * jnp.square(d)


def _k3(d: Array) -> Array:
    return jnp.expm1(-d) + d  # expm1: near d = 0 the difference cancels

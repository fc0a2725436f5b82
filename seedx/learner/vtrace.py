"""V-trace targets and advantages (arXiv 1802.01561, equation 1 and section 4.2)."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


class VTrace(NamedTuple):
    """What V-trace gives; neither carries a gradient."""

    targets: Float[Array, "T *B"]  # vs_t, what the value of row t is regressed on
    advantages: Float[Array, "T *B"]  # of the policy gradient, importance weight included; 0 in masked rows


def vtrace(
    log_rhos: Float[Array, "T *B"],
    discounts: Float[Array, "T *B"],
    rewards: Float[Array, "T *B"],
    values: Float[Array, "T+1 *B"],
    mask: Bool[Array, "T *B"],
    *,
    lambda_: float = 1.0,
    clip_rho: float = 1.0,
    clip_pg_rho: float = 1.0,
) -> VTrace:
    """V-trace over unrolls that may hold several episodes.

    With rho_t = exp(log_rhos[t]) and c_t = lambda * min(1, rho_t) (the paper's c-bar is 1):

        delta_t    = m_t min(clip_rho, rho_t) (R_t + gamma_t V_{t+1} - V_t)
        vs_t - V_t = delta_t + gamma_t c_t (vs_{t+1} - V_{t+1}),  vs_T = V_T
        A_t        = m_t min(clip_pg_rho, rho_t) (R_t + gamma_t vs_{t+1} - V_t)

    A masked row has vs_t = V_t and ends the trace, so the row before it bootstraps from V of the last observation.
    Lambda scales c alone and A_t takes vs_{t+1}, as in SEED RL (rlax mixes V_{t+1} into A_t where lambda < 1).

    Args:
        log_rhos: log pi(a_t|x_t) - log mu(a_t|x_t).
        discounts: gamma_t = gamma * discount[t+1]; 0 iff a_t terminated the episode.
        rewards: R_t = reward[t+1].
        values: V_t; row T bootstraps.
        mask: m_t, True iff a_t was really executed. Of the other arguments only `values` is read where it is False.
        lambda_: Lambda of the trace.
        clip_rho: rho-bar of the target.
        clip_pg_rho: rho-bar of the policy gradient.
    """
    # Masked inputs are replaced, not multiplied: 0 * NaN is NaN.
    rhos = jnp.exp(jnp.where(mask, log_rhos, 0.0))
    discounts = jnp.where(mask, discounts, 0.0)
    rewards = jnp.where(mask, rewards, values[:-1])  # makes the temporal difference of a masked row 0

    deltas = jnp.minimum(clip_rho, rhos) * (rewards + discounts * values[1:] - values[:-1])
    decays = discounts * lambda_ * jnp.minimum(1.0, rhos)

    def backwards(correction: Array, row: tuple[Array, Array]) -> tuple[Array, Array]:
        delta, decay = row
        correction = delta + decay * correction
        return correction, correction

    _, corrections = jax.lax.scan(backwards, jnp.zeros_like(values[-1]), (deltas, decays), reverse=True)
    targets = values[:-1] + corrections
    next_targets = jnp.concatenate([targets[1:], values[-1:]])
    advantages = jnp.minimum(clip_pg_rho, rhos) * (rewards + discounts * next_targets - values[:-1])
    return VTrace(jax.lax.stop_gradient(targets), jax.lax.stop_gradient(advantages))

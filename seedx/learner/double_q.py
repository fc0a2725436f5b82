"""n-step returns over unrolls that may hold several episodes, and the parts of a double Q-learning loss.

The functions take JAX and NumPy arrays alike: the loss needs them on the device, initial priorities on the host.
"""

from typing import TypeVar

import jax
import numpy as np
from jaxtyping import Bool, Float

A = TypeVar("A", jax.Array, np.ndarray)


def n_step_returns(
    rewards: Float[A, "T *B"],
    discounts: Float[A, "T *B"],
    values: Float[A, "T+1 *B"],
    mask: Bool[A, "T *B"],
    num_steps: int,
) -> Float[A, "T *B"]:
    """G_t = R_t + gamma_t R_{t+1} + ... + (gamma_t ... gamma_{t+k-1}) V_{t+k}, k = `num_steps` where it can be.

    The horizon ends earlier at the last row of the unroll and at the last row of an episode, and bootstraps there.
    A masked row, whose action was not executed, has G_t = V_t.

    Args:
        rewards: R_t = reward[t+1].
        discounts: gamma_t = gamma * discount[t+1]; 0 iff a_t terminated the episode.
        values: V_t of all rows; for double Q-learning (1509.06461) Q'(x_t, argmax_a Q(x_t, a)).
        mask: m_t, True iff a_t was really executed. Rewards and discounts are not read where it is False.
        num_steps: n, at least 1.
    """
    xp = values.__array_namespace__()
    # Masked inputs are replaced, not multiplied: 0 * NaN is NaN.
    discounts = xp.where(mask, discounts, 0.0)
    rewards = xp.where(mask, rewards, values[:-1])
    returns = values
    for _ in range(num_steps):  # each pass looks one step further
        returns = xp.concatenate([rewards + discounts * returns[1:], values[-1:]])
    return returns[:-1]


def mixed_priorities(errors: Float[A, "T B"], mask: Bool[A, "T B"], eta: float) -> Float[A, "B"]:
    """eta max_t |delta_t| + (1 - eta) mean_t |delta_t| over executed rows, 0 if there are none (R2D2, section 2.3)."""
    xp = errors.__array_namespace__()
    sizes = xp.where(mask, xp.abs(errors), 0.0)
    count = xp.maximum(xp.sum(xp.astype(mask, errors.dtype), axis=0), 1.0)
    return eta * xp.max(sizes, axis=0) + (1 - eta) * xp.sum(sizes, axis=0) / count

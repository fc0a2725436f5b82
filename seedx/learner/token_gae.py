"""Generalised advantages over the tokens of completions (PPO with a value head), and the loss of that head.

Advantages are made on the host, once for each batch, from the values that the learner had before its updates.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32, Int


class TokenGAE(NamedTuple):
    """What `token_gae` gives."""

    advantages: Float32[np.ndarray, "*B L"]  # 0 where mask is False
    targets: Float32[np.ndarray, "*B L"]  # what the value of a token is regressed on; 0 where mask is False


def token_gae(
    rewards: Float[np.ndarray, "*B L"],
    values: Float[np.ndarray, "*B L"],
    mask: Bool[np.ndarray, "*B L"],
    sequence: Int[np.ndarray, "*B L"],
    *,
    discount: float = 1.0,
    lambda_: float = 1.0,
) -> TokenGAE:
    """A_t = delta_t + discount lambda A_t', delta_t = R_t + discount V_t' - V_t (1506.02438, equation 16).

    t' is the next sampled token of the same sequence. Tokens between them, which the environment of a multi-turn task
    wrote, take no part and cost no discount (as in verl and tunix). After the last one A and V are 0; a completion
    that was cut bootstraps if discount times the value of what follows is added to its last reward.

    Args:
        rewards: R_t, what arrived when token t was sampled.
        values: V_t, of the state in which token t was sampled.
        mask: Tokens that were sampled. Of the other arguments none is read where it is False.
        sequence: Sequence of each token, at least 0. Sequences lie one after another in a row, L long.
        discount: Of one sampled token.
        lambda_: Lambda of the trace.
    """
    rewards, values = np.where(mask, rewards, 0.0), np.where(mask, values, 0.0)
    advantages = np.zeros(rewards.shape, np.float32)
    next_sequence = np.full(rewards.shape[:-1], -1)  # of the sampled token that was seen last, going backwards
    next_value = next_advantage = np.zeros(rewards.shape[:-1])
    for t in reversed(range(rewards.shape[-1])):
        here, goes_on = mask[..., t], mask[..., t] & (sequence[..., t] == next_sequence)
        after = np.where(goes_on, next_value + lambda_ * next_advantage, 0.0)
        advantage = rewards[..., t] - values[..., t] + discount * after
        advantages[..., t] = advantage
        next_sequence = np.where(here, sequence[..., t], next_sequence)
        next_value = np.where(here, values[..., t], next_value)
        next_advantage = np.where(here, advantage, next_advantage)
    return TokenGAE(advantages, (advantages + values).astype(np.float32))


def token_value_loss(
    values: Float[Array, "*B"],
    old_values: Float[Array, "*B"],
    targets: Float[Array, "*B"],
    mask: Bool[Array, "*B"],
    clip: float | None = None,
) -> Float[Array, "*B"]:
    """1/2 (target - V)^2 of each token, 0 where mask is False; only V has a gradient.

    Args:
        values: V.
        old_values: The values that advantages were made of.
        targets: From `token_gae`.
        mask: Tokens that count; the other arguments may be anything elsewhere.
        clip: The larger of the errors of V and of V held within this distance of the old value. None: that of V.
    """
    values = jnp.where(mask, values, 0.0)
    old_values, targets = (jax.lax.stop_gradient(jnp.where(mask, x, 0.0)) for x in (old_values, targets))
    squared = jnp.square(targets - values)
    if clip is not None:
        held = old_values + jnp.clip(values - old_values, -clip, clip)
        squared = jnp.maximum(squared, jnp.square(targets - held))
    return 0.5 * squared

"""GRPO and its relatives over packed rows of completions: docs/grpo.md says which settings make which of them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from seedx.grpo_config import GrpoConfig
from seedx.learner import policy_loss
from seedx.learner.kl import kl_terms
from seedx.learner.policy_loss import PolicyLoss
from seedx.learner.text_batch import TokenBatch, sequence_ids
from seedx.learner.token_gae import token_value_loss
from seedx.learner.token_logprobs import Model
from seedx.learner.value_head import value_sums


def grpo_loss(
    model: Model, config: GrpoConfig, params: PyTree, reference: PyTree, batch: TokenBatch, head: PyTree = None
) -> tuple[Float[Array, ""], dict[str, Array]]:
    """The loss of a part of a batch, a sum over its tokens with the batch's weights; and sums for metrics.

    Sums over trained tokens, but for those that end in "_max".

    Args:
        model: Of `params` and `reference`.
        config: Of the loss.
        params: Of the policy.
        reference: Parameters of the reference policy; None if `config.kl_cost` is 0.
        batch: `[R, L]`.
        head: The value head, which is trained with the policy (PPO); None: there is none.
    """
    values = None
    if head is None:
        logprobs, entropy = model.logprobs(params, batch)
    else:
        logprobs, entropy, values = model.logprobs_and_values(params, head, batch)
    mask = jnp.asarray(batch.trained)
    losses = _policy_loss(config, logprobs, batch, mask)
    weight = jnp.where(mask, batch.weight, 0.0)
    importance = _importance(config, batch, mask)
    total = losses.loss * importance.weights
    entropy = jnp.where(mask, entropy, 0.0)
    if config.entropy_cost:
        total -= config.entropy_cost * entropy
    sums = policy_loss.loss_sums(losses, logprobs, batch.old, mask)
    sums |= policy_loss.mismatch_sums(importance, batch.old, batch.behaviour, mask)
    gap = jnp.abs(jax.lax.stop_gradient(logprobs) - batch.behaviour)
    sums["engine_gap_max"] = jnp.max(gap, initial=0.0, where=mask & batch.fresh)
    sums["ratio_max"] = jnp.max(losses.ratio, initial=0.0, where=mask)
    sums["entropy"] = jax.lax.stop_gradient(jnp.sum(entropy))
    if config.kl_cost:
        wanted = jax.lax.stop_gradient(model.logprobs(reference, batch)[0])
        kl = kl_terms(config.kl, logprobs, wanted, mask, batch.behaviour)
        total += config.kl_cost * kl
        sums["kl_reference"] = jnp.sum(jax.lax.stop_gradient(kl_terms("k3", logprobs, wanted, mask)))
    if values is not None:
        errors = token_value_loss(values, batch.value, batch.target, mask, config.value_clip or None)
        total += config.value_cost * errors
        sums |= value_sums(errors, values, batch.target, mask)
    return jnp.sum(total * weight), sums


def _policy_loss(config: GrpoConfig, logprobs: Array, batch: TokenBatch, mask: Array) -> PolicyLoss:
    arrays = (logprobs, batch.old, batch.advantage, mask)
    low, high = config.clip_low, config.clip_high
    match config.loss:
        case "clip":
            return policy_loss.clipped(*arrays, clip_low=low, clip_high=high, dual_clip=config.dual_clip or None)
        case "gspo":
            dual_clip = config.dual_clip or None
            return policy_loss.gspo(*arrays, *sequence_ids(batch), clip_low=low, clip_high=high, dual_clip=dual_clip)
        case "cispo":
            return policy_loss.cispo(*arrays, clip_high=high)


def _importance(config: GrpoConfig, batch: TokenBatch, mask: Array) -> policy_loss.ImportanceWeights:
    if config.importance == "none":
        return policy_loss.ImportanceWeights(mask.astype(jnp.float32), jnp.zeros_like(mask))
    return policy_loss.importance_weights(
        batch.old,
        batch.behaviour,
        mask,
        *sequence_ids(batch),
        mode=config.importance,
        high=config.importance_bound,
    )

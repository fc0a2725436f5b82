"""GRPO and its relatives over packed rows of completions: docs/grpo.md says which settings make which of them."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, PyTree

from seedx.grpo_config import GrpoConfig
from seedx.learner import policy_loss
from seedx.learner.kl import kl_terms
from seedx.learner.policy_loss import PolicyLoss
from seedx.learner.text_batch import TokenBatch
from seedx.learner.token_logprobs import token_logprobs
from seedx.networks.transformer_config import TransformerConfig


class Model(NamedTuple):
    """How log-probabilities are computed.

    Attributes:
        config: Of the transformer.
        temperature: Of the distribution that completions are drawn from.
        dtype: That the model computes in.
        remat: Whether the gradient computes each block anew.
    """

    config: TransformerConfig
    temperature: float = 1.0
    dtype: DTypeLike = jnp.float32
    remat: bool = False

    def logprobs(self, params: PyTree, batch: TokenBatch) -> tuple[Float[Array, "R L"], Float[Array, "R L"]]:
        """Log-probability of each token, and the entropy that it was drawn with."""
        return token_logprobs(
            self.config,
            params,
            batch.tokens,
            batch.positions,
            batch.segments,
            temperature=self.temperature,
            dtype=self.dtype,
            remat=self.remat,
        )


def grpo_loss(
    model: Model, config: GrpoConfig, params: PyTree, reference: PyTree, batch: TokenBatch
) -> tuple[Float[Array, ""], dict[str, Array]]:
    """The loss of a part of a batch, a sum over its tokens with the batch's weights; and sums for metrics.

    Sums over trained tokens, but for those that end in "_max".

    Args:
        model: Of `params` and `reference`.
        config: Of the loss.
        params: Of the policy.
        reference: Parameters of the reference policy; None if `config.kl_cost` is 0.
        batch: `[R, L]`.
    """
    logprobs, entropy = model.logprobs(params, batch)
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
    sums["ratio_max"] = jnp.max(losses.ratio, initial=0.0, where=mask)
    sums["entropy"] = jax.lax.stop_gradient(jnp.sum(entropy))
    if config.kl_cost:
        wanted = jax.lax.stop_gradient(model.logprobs(reference, batch)[0])
        kl = kl_terms(config.kl, logprobs, wanted, mask, batch.old)
        total += config.kl_cost * kl
        sums["kl_reference"] = jnp.sum(jax.lax.stop_gradient(kl_terms("k3", logprobs, wanted, mask)))
    return jnp.sum(total * weight), sums


def _policy_loss(config: GrpoConfig, logprobs: Array, batch: TokenBatch, mask: Array) -> PolicyLoss:
    arrays = (logprobs, batch.old, batch.advantage, mask)
    low, high = config.clip_low, config.clip_high
    match config.loss:
        case "clip":
            return policy_loss.clipped(*arrays, clip_low=low, clip_high=high, dual_clip=config.dual_clip or None)
        case "gspo":
            dual_clip = config.dual_clip or None
            return policy_loss.gspo(*arrays, *_sequence_ids(batch), clip_low=low, clip_high=high, dual_clip=dual_clip)
        case "cispo":
            return policy_loss.cispo(*arrays, clip_high=high)


def _importance(config: GrpoConfig, batch: TokenBatch, mask: Array) -> policy_loss.ImportanceWeights:
    if config.importance == "none":
        return policy_loss.ImportanceWeights(mask.astype(jnp.float32), jnp.zeros_like(mask))
    return policy_loss.importance_weights(
        batch.old,
        batch.behaviour,
        mask,
        *_sequence_ids(batch),
        mode=config.importance,
        high=config.importance_bound,
    )


def _sequence_ids(batch: TokenBatch) -> tuple[Array, int]:
    """A number for each sequence of the rows, and how many there may be: each has two tokens at least."""
    rows, length = batch.segments.shape
    most = length // 2 + 1
    return jnp.arange(rows)[:, None] * most + batch.segments, rows * most


def imitation_loss(model: Model, params: PyTree, batch: TokenBatch) -> tuple[Float[Array, ""], dict[str, Array]]:
    """-sum of log p over trained tokens, with their weights: supervised learning of given completions.

    The metric "solved" sums over sequences the probability of a whole completion: what sampling would score.
    """
    logprobs, _ = model.logprobs(params, batch)
    mask = jnp.asarray(batch.trained)
    said = jnp.where(mask, logprobs, 0.0)
    ids, count = _sequence_ids(batch)
    whole = jax.ops.segment_sum(said.ravel(), ids.ravel(), count)
    there = jax.ops.segment_max(mask.ravel().astype(jnp.int32), ids.ravel(), count) > 0
    solved = jnp.sum(jnp.exp(whole), where=there)
    return -jnp.sum(said * batch.weight), {"solved": jax.lax.stop_gradient(solved), "sequences": jnp.sum(there)}

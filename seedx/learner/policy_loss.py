"""Policy losses of completions, token by token: clipped (PPO, GRPO, DAPO), GSPO, CISPO; and their importance weights.

Token arrays have any common shape. `sequence` names the sequence of each token, by ids below `num_sequences`; so it
makes no difference whether sequences are packed into a row, padded, or have a row each. Sequences of one call are
whole. Where mask is False the id is any valid one and the other inputs may be anything: losses, weights and gradients
are 0 there. The loss of a batch is the sum of token losses times importance weights times `sequence_weights`.
"""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from seedx.learner.kl import kl_terms
from seedx.learner.log_ratio import log_ratio

Bounding = Literal["truncate", "mask", "sequence-truncate", "sequence-mask"]


class PolicyLoss(NamedTuple):
    """Token losses and what metrics need."""

    loss: Float[Array, "*B"]
    ratio: Float[Array, "*B"]  # pi / old, no gradient; 1 where mask is False
    clipped_low: Bool[Array, "*B"]  # a bad token that is already less likely than the range allows
    clipped_high: Bool[Array, "*B"]  # a good token that is already more likely
    clipped_dual: Bool[Array, "*B"]  # a bad token that is so much more likely that its loss is bounded


def clipped(
    log_probs: Float[Array, "*B"],
    old: Float[Array, "*B"],
    advantages: Float[Array, "*B"],
    mask: Bool[Array, "*B"],
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> PolicyLoss:
    """max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)), r = pi / old of the token (PPO, 1707.06347, equation 7).

    Args:
        log_probs: log pi of the sampled tokens.
        old: Log-probabilities that the ratio is to; stop_gradient(log pi) where each batch is used once.
        advantages: A; no gradient flows into it.
        mask: Tokens that count.
        clip_low: How far below 1 the ratio is followed. PPO and GRPO have .2 for both, DAPO (2503.14476) .2 and .28.
        clip_high: How far above 1.
        dual_clip: c > 1: where A < 0 the loss is at most -A c (1912.09729); verl has 3. None: it has no bound.
    """
    return _clip(
        log_ratio(log_probs, jax.lax.stop_gradient(old), mask), advantages, mask, clip_low, clip_high, dual_clip
    )


def gspo(
    log_probs: Float[Array, "*B"],
    old: Float[Array, "*B"],
    advantages: Float[Array, "*B"],
    mask: Bool[Array, "*B"],
    sequence: Int[Array, "*B"],
    num_sequences: int,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> PolicyLoss:
    """`clipped` with the geometric mean of a sequence's ratios for each of its tokens (GSPO, 2507.18071, equation 7).

    The gradient is GSPO-token's: s exp(log pi - stop_gradient(log pi)), so advantages may differ between the tokens
    of a sequence. Aggregated by "seq-mean-token-mean" it is GSPO's. The paper clips at 3e-4 and 4e-4.
    """
    own = log_ratio(log_probs, jax.lax.stop_gradient(old), mask)
    lengths = _sequence_sums(mask.astype(own.dtype), sequence, num_sequences)
    mean = _sequence_sums(own, sequence, num_sequences) / jnp.maximum(lengths, 1.0)
    shared = jnp.where(mask, jax.lax.stop_gradient(mean) + (own - jax.lax.stop_gradient(own)), 0.0)
    return _clip(shared, advantages, mask, clip_low, clip_high, dual_clip)


def cispo(
    log_probs: Float[Array, "*B"],
    old: Float[Array, "*B"],
    advantages: Float[Array, "*B"],
    mask: Bool[Array, "*B"],
    *,
    clip_high: float,
) -> PolicyLoss:
    """-stop_gradient(min(r, 1 + clip_high)) A log pi: a bounded weight, and a gradient for every token (2506.13585).

    `clipped_high` marks the tokens whose weight is bounded, whatever the sign of A.
    """
    ratio = jax.lax.stop_gradient(jnp.exp(log_ratio(log_probs, old, mask)))
    advantages = jax.lax.stop_gradient(jnp.where(mask, advantages, 0.0))
    loss = -jnp.minimum(ratio, 1.0 + clip_high) * advantages * jnp.where(mask, log_probs, 0.0)
    nowhere = jnp.zeros_like(mask)
    return PolicyLoss(loss, ratio, nowhere, ratio > 1.0 + clip_high, nowhere)


class ImportanceWeights(NamedTuple):
    """Weights of token losses, without a gradient."""

    weights: Float[Array, "*B"]  # 0 where mask is False
    bounded: Bool[Array, "*B"]  # tokens that count, whose weight was out of bounds


def importance_weights(
    prox: Float[Array, "*B"],
    behaviour: Float[Array, "*B"],
    mask: Bool[Array, "*B"],
    sequence: Int[Array, "*B"],
    num_sequences: int,
    *,
    mode: Bounding,
    high: float,
    low: float = 0.0,
) -> ImportanceWeights:
    """w = prox / behaviour within bounds, which multiplies the token losses (decoupled PPO, 2110.00641; 2505.24298).

    It corrects for tokens that were sampled by other weights or another kernel than `old` was computed with. Where
    behaviour log-probabilities serve as `old`, the ratio holds the correction already and w must not be used.
    The denominator of the loss stays that of all tokens, also of those that w leaves out.

    Args:
        prox: Log-probabilities that the learner computed before the update, the `old` of the loss.
        behaviour: Log-probabilities that the tokens were sampled with.
        mask: Tokens that count.
        sequence: Sequence of each token.
        num_sequences: Number of sequences.
        mode: What becomes of w outside [low, high]: "truncate" sets it to the bound (verl and tunix: high 2), "mask"
            to 0 (IcePop). "sequence-..." takes the product over the sequence for each of its tokens (TRL: mask, 3).
        high: Largest weight, finite.
        low: Smallest weight.
    """
    logs = log_ratio(prox, behaviour, mask)
    if mode in ("sequence-truncate", "sequence-mask"):
        logs = _sequence_sums(logs, sequence, num_sequences)
    weights = jnp.exp(logs)  # of a long sequence it may be infinite, until it is bounded
    bounded = mask & ((weights < low) | (weights > high))
    within = jnp.clip(weights, low, high) if mode in ("truncate", "sequence-truncate") else 0.0
    weights = jnp.where(mask, jnp.where(bounded, within, weights), 0.0)
    return ImportanceWeights(jax.lax.stop_gradient(weights), bounded)


def loss_sums(
    loss: PolicyLoss, log_probs: Float[Array, "*B"], old: Float[Array, "*B"], mask: Bool[Array, "*B"]
) -> dict[str, Float[Array, ""]]:
    """How far the policy is from `old`: sums over tokens that count, to be divided by "tokens".

    "kl_k1" and "kl_k3" estimate KL(old || pi) from tokens of old.
    """
    return _sums(
        mask,
        tokens=mask,
        ratio=loss.ratio,
        clipped_low=loss.clipped_low,
        clipped_high=loss.clipped_high,
        clipped_dual=loss.clipped_dual,
        kl_k1=kl_terms("k1", old, log_probs, mask),
        kl_k3=kl_terms("k3", old, log_probs, mask),
    )


def mismatch_sums(
    importance: ImportanceWeights, prox: Float[Array, "*B"], behaviour: Float[Array, "*B"], mask: Bool[Array, "*B"]
) -> dict[str, Float[Array, ""]]:
    """How far the sampler is from the learner: sums over tokens that count, except "gap_max", a maximum.

    "weight" squared over "weight_squared" is the effective number of tokens; "gap" sums |prox - behaviour|.
    """
    gap = jnp.abs(log_ratio(prox, behaviour, mask))
    weights = importance.weights
    sums = _sums(mask, weight=weights, weight_squared=jnp.square(weights), weight_bounded=importance.bounded, gap=gap)
    return sums | {"gap_max": jax.lax.stop_gradient(jnp.max(gap, initial=0.0))}


def _clip(
    logs: Array, advantages: Array, mask: Array, clip_low: float, clip_high: float, dual_clip: float | None
) -> PolicyLoss:
    """The loss -A r, r = exp(logs), where r is held at a bound once it has gone far enough in A's direction."""
    advantages = jax.lax.stop_gradient(jnp.where(mask, advantages, 0.0))
    good, bad, ratio = advantages > 0.0, advantages < 0.0, jnp.exp(logs)
    most = jnp.inf if dual_clip is None else dual_clip
    low, high, dual = bad & (ratio < 1.0 - clip_low), good & (ratio > 1.0 + clip_high), bad & (ratio > most)
    held = jnp.select([low, high, dual], [1.0 - clip_low, 1.0 + clip_high, most], ratio)
    return PolicyLoss(-advantages * held, jax.lax.stop_gradient(ratio), low, high, dual)


def _sequence_sums(x: Float[Array, "*B"], sequence: Int[Array, "*B"], num_sequences: int) -> Float[Array, "*B"]:
    """For each token, the sum of x over its sequence; x is 0 where mask is False."""
    sums = jax.ops.segment_sum(x.ravel(), sequence.ravel(), num_sequences)
    return sums[sequence]


def _sums(mask: Bool[Array, "*B"], **terms: Array) -> dict[str, Float[Array, ""]]:
    return {name: jax.lax.stop_gradient(jnp.sum(x, where=mask, dtype=jnp.float32)) for name, x in terms.items()}

"""Draws the next token of every row, and says how likely it was.

The sampling distribution is softmax(logits / temperature), cut to its `top_k` likeliest tokens, then to the smallest
set of likeliest tokens that holds `top_p` of what is left (Holtzman et al. 2020, arXiv 1904.09751), and normalised.
Of equal tokens the lower id counts as likelier. A row's token depends on its own logits, seed and position alone, never
on its batch.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32, UInt32

_BLOCK = 256  # tokens that the second draw chooses among


class Sampling(NamedTuple):
    """How each row is sampled."""

    temperature: Float32[Array, " B"]  # 0: the likeliest token
    top_k: Int32[Array, " B"]  # 0: all
    top_p: Float32[Array, " B"]  # 1: all
    seed: UInt32[Array, " B"]


class Sample(NamedTuple):
    """The drawn tokens and their natural log-probabilities."""

    token: Int32[Array, " B"]
    logprob: Float32[Array, " B"]  # under the sampling distribution; 0 where the likeliest token is taken
    raw_logprob: Float32[Array, " B"]  # under softmax(logits)


def uniforms(seed: UInt32[Array, "*B"], position: Int32[Array, "*B"]) -> Float32[Array, "*B 2"]:
    """The randomness of tokens: two numbers in [0, 1) from fold_in(seed, position of the token).

    Best made for many tokens at once: on a CPU the generator is a loop, whose cost hardly grows with their number.
    """

    def pair(seed: UInt32[Array, ""], position: Int32[Array, ""]) -> Float32[Array, "2"]:
        return jax.random.uniform(jax.random.fold_in(jax.random.key(seed), position), (2,))

    return jnp.vectorize(pair, signature="(),()->(n)")(seed, position)


def is_cut(sampling: Sampling) -> Bool[Array, " B"]:
    """Which rows leave tokens out."""
    return ((sampling.top_k > 0) | (sampling.top_p < 1)) & (sampling.temperature > 0)


def sample(
    logits: Float32[Array, "B V"],
    sampling: Sampling,
    uniform: Float32[Array, "B 2"],
    any_cut: Bool[Array, ""] | bool = True,
) -> Sample:
    """Draws a token for each row.

    Args:
        logits: Of the next token.
        sampling: How.
        uniform: The randomness, of `uniforms`.
        any_cut: Whether a row leaves tokens out; if none does, the search for them is left out as well.
    """
    greedy = sampling.temperature <= 0
    temperature = jnp.where(greedy, 1.0, sampling.temperature)
    above = logits - jnp.max(logits, axis=-1, keepdims=True)  # the likeliest token's is 0
    scaled = above / temperature[:, None]
    weights = jnp.exp(scaled)
    weights = jax.lax.cond(any_cut, lambda: _cut(scaled, weights, sampling), lambda: weights)
    token = jnp.where(greedy, jnp.argmax(logits, axis=-1).astype(jnp.int32), _draw(weights, uniform))

    def chosen(values: Float32[Array, "B V"]) -> Float32[Array, " B"]:
        return jnp.take_along_axis(values, token[:, None], axis=-1)[:, 0]

    raw_logprob = chosen(above) - jnp.log(jnp.sum(jnp.exp(above), axis=-1))
    logprob = chosen(scaled) - jnp.log(jnp.sum(weights, axis=-1))
    return Sample(token, jnp.where(greedy, 0.0, logprob), raw_logprob)


def _draw(weights: Float32[Array, "B V"], uniforms: Float32[Array, "B 2"]) -> Int32[Array, " B"]:
    """A token for each row, with probability proportional to its weight, by inverting the distribution function twice.

    First a block of tokens is drawn, then a token of it: sums stay short, and so exact, for any vocabulary.
    """
    rows, vocab = weights.shape
    block = min(vocab, _BLOCK)
    blocks = jnp.pad(weights, ((0, 0), (0, -vocab % block))).reshape(rows, -1, block)
    which = _invert(jnp.sum(blocks, axis=-1), uniforms[:, 0])
    inside = jnp.take_along_axis(blocks, which[:, None, None], axis=1)[:, 0]
    return which * block + _invert(inside, uniforms[:, 1])


def _invert(weights: Float32[Array, "B N"], uniform: Float32[Array, " B"]) -> Int32[Array, " B"]:
    """The first index whose cumulated weight exceeds uniform * total; never one without weight."""
    cumulated = jnp.cumsum(weights, axis=-1)
    possible = weights > 0
    hit = possible & (cumulated > uniform[:, None] * cumulated[:, -1:])
    last = jnp.max(jnp.where(possible, _indices(weights), 0), axis=-1)  # where rounding left no hit
    return jnp.minimum(_first(hit), last)


def _first(marked: Bool[Array, "B N"]) -> Int32[Array, " B"]:
    """The first marked index; the last one if none is. Much faster than an argmax on a CPU."""
    last = marked.shape[-1] - 1
    return jnp.min(jnp.where(marked, _indices(marked), last), axis=-1)


def _indices(values: Array) -> Int32[Array, " 1 N"]:
    return jnp.arange(values.shape[-1], dtype=jnp.int32)[None]


# ---- top-k and top-p: the least score that is kept is found bit by bit, which costs no sort of the vocabulary


def _cut(scaled: Float32[Array, "B V"], weights: Float32[Array, "B V"], sampling: Sampling) -> Float32[Array, "B V"]:
    """The weights with those outside of top-k and top-p set to 0."""
    order = _ordered(scaled)
    ones = jnp.ones_like(weights)
    top_k = jnp.where(sampling.top_k > 0, sampling.top_k, scaled.shape[-1]).astype(jnp.float32)
    weights = jnp.where(_leading(order, ones, top_k), weights, 0.0)
    top_p = jnp.maximum(sampling.top_p, jnp.finfo(jnp.float32).tiny)  # so that the likeliest token is always kept
    kept = _leading(order, weights, top_p * jnp.sum(weights, axis=-1))
    return jnp.where(kept | (sampling.top_p >= 1)[:, None], weights, 0.0)


def _leading(
    order: UInt32[Array, "B V"], mass: Float32[Array, "B V"], enough: Float32[Array, " B"]
) -> Bool[Array, "B V"]:
    """Marks the fewest tokens, in falling order and rising id, whose mass is at least `enough`; all if none is."""

    def add_bit(i: Int32[Array, ""], least: UInt32[Array, " B"]) -> UInt32[Array, " B"]:
        higher = least | (jnp.uint32(1 << 31) >> i.astype(jnp.uint32))
        inside = jnp.sum(jnp.where(order >= higher[:, None], mass, 0.0), axis=-1)
        return jnp.where(inside >= enough, higher, least)

    least = jax.lax.fori_loop(0, 32, add_bit, jnp.zeros(order.shape[0], jnp.uint32))[:, None]
    above, tied = order > least, order == least
    before = jnp.sum(jnp.where(above, mass, 0.0), axis=-1, keepdims=True)
    ties = jnp.where(tied, mass, 0.0)
    earlier = jnp.cumsum(ties, axis=-1) - ties
    return above | (tied & (before + earlier < enough[:, None]))


def _ordered(values: Float32[Array, "B V"]) -> UInt32[Array, "B V"]:
    """Bits that compare as integers as the values do as numbers."""
    bits = jax.lax.bitcast_convert_type(values + 0.0, jnp.uint32)  # + 0.0 makes one zero of two
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))

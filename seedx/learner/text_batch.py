"""From groups of completions to packed rows with advantages and weights. NumPy, on the host.

Letters: P groups, G completions of each, N = P G sequences (a prompt with a completion), R rows, L tokens of a row.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from seedx.grpo_config import GrpoConfig
from seedx.learner import advantages as adv
from seedx.learner.aggregation import sequence_weights
from seedx.learner.packing import Packing, lay_out, pack, place
from seedx.replay.items import Ragged


class TokenBatch(NamedTuple):
    """Packed rows, leaves `[R, L]`, NumPy or on the devices; all but the first five mean nothing where `weight` is 0.

    Attributes:
        tokens: int32.
        positions: int32; this and the next three are those of `Layout`.
        segments: int32.
        parents: int32.
        before: int32.
        trained: bool, whether it was sampled and counts.
        fresh: bool, whether the weights of now made its whole completion: after a swap, what older ones left in the
            cache counts in every token that follows.
        weight: float32, what a token counts in the loss.
        advantage: float32.
        behaviour: float32, the log-probability that it was drawn with.
        old: float32, the log-probability that the ratio is relative to.
        value: float32, of the state that it was drawn in, before the update; 0 without a value head.
        target: float32, what that value should have been; 0 without a value head.
    """

    tokens: Any
    positions: Any
    segments: Any
    parents: Any
    before: Any
    trained: Any
    fresh: Any
    weight: Any
    advantage: Any
    behaviour: Any
    old: Any
    value: Any
    target: Any


class Sequences(NamedTuple):
    """Sequences one after the other: leaves of tokens `[sum(lengths)]`, the others `[N]`, but for `prompts`.

    Attributes:
        lengths: int64, with the prompt.
        prompts: int64 `[P]`, tokens of each prompt.
        tokens: int32.
        sampled: bool.
        logprobs: float32.
        versions: int32.
        rewards: float32, NaN where the sequence is left out.
        advantages: float32.
        counted: int64, sampled tokens that count in the loss; 0: the sequence is left out.
    """

    lengths: np.ndarray
    prompts: np.ndarray
    tokens: np.ndarray
    sampled: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray
    rewards: np.ndarray
    advantages: np.ndarray
    counted: np.ndarray


def used(rewards: np.ndarray, truncated: np.ndarray, config: GrpoConfig) -> np.ndarray:
    """Which completions count, in their group's mean and in the loss; of any shape."""
    return ~np.isnan(rewards) & ~(truncated & config.mask_truncated)


def sequences_of(items: Ragged, config: GrpoConfig) -> Sequences:
    """The sequences of P groups, with their advantages."""
    rewards, lengths = items.state["reward"], items.state["lengths"]
    prompts = lengths[:, 0].astype(np.int64)
    parts = np.split(np.arange(len(items.rows["token"])), np.cumsum(lengths.ravel())[:-1])
    per_group = lengths.shape[1]
    order = [
        np.concatenate([parts[g], parts[g + i]])
        for g in range(0, len(parts), per_group)
        for i in range(1, per_group)  # the prompt again for each completion
    ]
    rows = np.concatenate(order)
    tokens, sampled, logprobs, versions = (
        items.rows[name][rows] for name in ("token", "sampled", "logprob", "version")
    )
    lengths = np.array([len(part) for part in order], np.int64)
    starts = np.cumsum(lengths) - lengths
    left_out = ~used(rewards, items.state["truncated"], config)
    counted = np.where(left_out.ravel(), 0, np.add.reduceat(sampled.astype(np.int64), starts))
    rewards = np.where(left_out, np.float32(np.nan), rewards)
    advantages = _advantages(rewards, counted, config)
    return Sequences(lengths, prompts, tokens, sampled, logprobs, versions, rewards.ravel(), advantages, counted)


def _advantages(rewards: np.ndarray, counted: np.ndarray, config: GrpoConfig) -> np.ndarray:
    """Of each sequence, `[N]`; rewards `[P, G]`, NaN where a completion is left out."""
    match config.advantage:
        case "group_std":
            values = adv.group_relative(rewards, "std")
        case "group_mean":
            values = adv.group_relative(rewards, "none")
        case "batch_std":
            values = adv.group_relative(rewards, "batch_std")
        case "leave_one_out":
            values = adv.leave_one_out(rewards)
        case "whitened":  # over tokens, of which a sequence has so many
            centred = np.repeat(adv.group_relative(rewards, "none").ravel(), counted)
            whitened = adv.whiten(centred, np.ones(len(centred), bool))
            values = np.zeros(len(counted), np.float32)
            values[counted > 0] = whitened[np.cumsum(counted)[counted > 0] - 1]
        case "gae":  # of each token, made of values: see text_gae.py
            values = np.zeros(len(counted), np.float32)
    return values.ravel()


def pack_batch(
    sequences: Sequences, config: GrpoConfig, *, version: int, max_tokens: int, row_tokens: int, rows_multiple: int
) -> tuple[TokenBatch, Packing]:
    """Packed rows, and where each token lies in them.

    Args:
        sequences: Of the whole batch: the weights are made of all lengths.
        config: How tokens are aggregated.
        version: Of the weights of now.
        max_tokens: The most that a completion may have, for the modes with a fixed length.
        row_tokens: L.
        rows_multiple: What R is a multiple of.
    """
    packing = pack(sequences.lengths, row_tokens, rows_multiple, prompts=sequences.prompts)
    weights = sequence_weights(config.aggregation, sequences.counted, max_tokens)
    per_token = packing.of_tokens(weights) * sequences.sampled
    logprobs = place(packing, sequences.logprobs)
    nothing = np.zeros_like(logprobs)
    batch = TokenBatch(
        place(packing, sequences.tokens),
        *lay_out(packing),
        trained=place(packing, per_token > 0),
        fresh=place(packing, packing.of_tokens(_is_fresh(sequences, version))),
        weight=place(packing, per_token),
        advantage=place(packing, packing.of_tokens(sequences.advantages)),
        behaviour=logprobs,
        old=logprobs,
        value=nothing,
        target=nothing,
    )
    return batch, packing


def _is_fresh(sequences: Sequences, version: int) -> np.ndarray:
    """Whether all sampled tokens of a sequence have this version, bool `[N]`."""
    starts = np.cumsum(sequences.lengths) - sequences.lengths
    return np.logical_and.reduceat((sequences.versions == version) | ~sequences.sampled, starts)


def sequence_ids(batch: TokenBatch) -> tuple[Array, int]:
    """A number for each segment of the rows, and how many there may be; what was sampled of a sequence is in one."""
    rows, length = batch.segments.shape
    most = length + 1
    return jnp.arange(rows)[:, None] * most + batch.segments, rows * most

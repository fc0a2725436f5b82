"""Advantages of a packed batch from values (PPO): generalised, of each token, whitened. NumPy, on the host."""

from __future__ import annotations

import numpy as np

from seedx.grpo_config import GrpoConfig
from seedx.learner.advantages import whiten
from seedx.learner.packing import Packing, place
from seedx.learner.text_batch import Sequences, TokenBatch
from seedx.learner.token_gae import token_gae


def with_gae(batch: TokenBatch, packing: Packing, sequences: Sequences, config: GrpoConfig) -> TokenBatch:
    """The batch with `advantage` and `target` made of its `value`.

    A completion's reward arrives at its last sampled token and nothing follows it, also where it was cut: what it was
    scored as is all that it earns. Advantages are whitened over all trained tokens; targets are not.

    Args:
        batch: Of `pack_batch`, all of it, with values.
        packing: Where its sequences lie.
        sequences: What it was packed from.
        config: With the discount and lambda.
    """
    found = token_gae(
        place(packing, _arriving(sequences)),
        batch.value,
        batch.trained,
        batch.segments,
        discount=config.discount,
        lambda_=config.gae_lambda,
    )
    return batch._replace(advantage=whiten(found.advantages, batch.trained), target=found.targets)


def _arriving(sequences: Sequences) -> np.ndarray:
    """The reward that arrives when a token was sampled, float32 `[sum(lengths)]`."""
    starts = np.cumsum(sequences.lengths) - sequences.lengths
    numbers = np.where(sequences.sampled, np.arange(len(sequences.sampled)), -1)
    ends = np.maximum.reduceat(numbers, starts)  # -1: nothing was sampled
    rewards = np.zeros(len(numbers), np.float32)
    rewards[ends[ends >= 0]] = sequences.rewards[ends >= 0]
    return rewards

"""What int8 weights change: the log-probabilities of texts that they drew, against those of the weights they are from.

In reinforcement learning that is the log of the importance ratio which quantisation alone brings.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Int32

from seedx.inference.engine import Engine, Placement
from seedx.inference.memory_plan import GAP_TEXTS, GAP_TOKENS
from seedx.networks import transformer
from seedx.networks.transformer_config import TransformerConfig
from seedx.types import Tree
from seedx.weights import Weights


class LogprobGap(NamedTuple):
    """|log p(token) under int8 weights - under their originals| over the texts, nats."""

    mean: float
    greatest: float


class GapMeter:
    """Measures versions on the same texts, in one pass of each kind of weights, so that figures can be compared.

    Args:
        engine: The first measurement draws the texts with it: then it must be idle.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._logprobs = jax.jit(partial(logprobs_of, engine.config))
        self._texts: np.ndarray | None = None

    def measure(self, original: Tree, weights: Weights) -> LogprobGap:
        """The gap of int8 weights.

        Args:
            original: What they were made from, in the engine's layout.
            weights: The quantised version.
        """
        if self._texts is None:
            self._texts = draw_texts(self._engine, weights)
        with self._engine.launching:
            both = [self._logprobs(params, self._texts) for params in (original, weights.params)]
        gap = np.abs(np.subtract(*map(np.asarray, both)))
        return LogprobGap(float(gap.mean()), float(gap.max()))


def draw_texts(engine: Engine, weights: Weights) -> np.ndarray:
    """Texts that begin with random tokens and go on at temperature 1, int32 `[R, L]`; the engine is idle."""
    count, length = min(GAP_TEXTS, engine.plan.num_slots), min(GAP_TOKENS, engine.plan.length)
    firsts = np.random.default_rng(0).integers(0, engine.config.vocab_size, (count, 1)).astype(np.int32)
    prefixes = engine.prefill(weights, list(firsts))
    engine.insert([Placement(slot, prefix, 1.0, 0, 1.0, seed=slot) for slot, prefix in enumerate(prefixes)])
    steps = -(-(length - 1) // engine.steps_per_dispatch)
    drawn = np.concatenate([engine.generate(weights).fetch()[0] for _ in range(steps)])
    engine.free(range(count))
    return np.concatenate([firsts, drawn[: length - 1, :count].T], axis=1)


def logprobs_of(config: TransformerConfig, params: Tree, texts: Int32[Array, "R L"]) -> Float32[Array, "R L-1"]:
    """Log-probabilities of each token but the first, in one forward pass."""
    positions = jnp.broadcast_to(jnp.arange(texts.shape[1] - 1, dtype=jnp.int32), texts[:, 1:].shape)
    logits, _ = transformer.apply(config, params, texts[:, :-1], positions)
    taken = jnp.take_along_axis(logits, texts[:, 1:, None], axis=-1)[..., 0]
    return taken - jax.nn.logsumexp(logits, axis=-1)

"""Supervised learning of a task's own answers before reinforcement learning: who never succeeds learns nothing.

It ends when sampling would give the right answer with a given probability, which every batch tells of prompts that were
not learned from yet: it is the product of the tokens' probabilities.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh
from jaxtyping import Float, PyTree

from seedx import sharding
from seedx.checks import ConfigError
from seedx.grpo_config import TextLearnerConfig, WarmStartConfig
from seedx.learner.packing import lay_out, pack, place
from seedx.learner.text_batch import TokenBatch, sequence_ids
from seedx.learner.text_update import make_optimizer, make_update
from seedx.learner.token_logprobs import Model
from seedx.types import Tree

_SMOOTHING = 0.8  # of the probability, over batches

Shown = tuple[Sequence[int], Sequence[bool]]  # tokens of a right text, and which of them are the model's


def warm_start(
    model: Model,
    config: WarmStartConfig,
    params: Tree,
    shown: Callable[[int], Sequence[Shown]],
    *,
    mesh: Mesh,
    row_tokens: int,
    zero: int = 3,
    progress: Callable[[int, float], None],
) -> Tree:
    """Parameters after learning.

    Args:
        model: Of the parameters.
        config: How long and how fast.
        params: To begin with; not donated.
        shown: The texts of batch number i.
        mesh: Of `sharding.serve_mesh`.
        row_tokens: Of a row; no text is longer.
        zero: See `make_update`.
        progress: Told after each update how many there were, and the probability of a right answer.

    Raises:
        ConfigError: it was not reached.
    """
    optimizer = make_optimizer(TextLearnerConfig())
    programs = make_update(lambda p, _, batch: imitation_loss(model, p, batch), optimizer, mesh, params, zero=zero)
    place_rows = partial(jax.device_put, device=sharding.split_rows(mesh))
    state, solved = programs.init(params), 0.0
    rows = -(-config.batch_size // sharding.row_groups(mesh)) * sharding.row_groups(mesh)
    for i in range(config.max_updates):
        sums = programs.gradient(params, None, place_rows(_batch(shown(i), row_tokens, rows)))
        now = float(sums.metrics["solved"]) / float(sums.metrics["sequences"])
        solved = _SMOOTHING * solved + (1 - _SMOOTHING) * now
        progress(i, solved)
        if solved >= config.reward:
            return params
        params, state, *_ = programs.step(params, state, sums.gradient, sums.loss, np.float32(config.learning_rate))
    raise ConfigError(
        f"the warm start came to {solved:.1%} right answers in {config.max_updates} updates, not to "
        f"{config.reward:.1%}; raise --warm-start.max-updates, lower --warm-start.reward, or choose another task."
    )


def _batch(shown: Sequence[Shown], row_tokens: int, rows: int) -> TokenBatch:
    """All texts in rows; each of the model's tokens counts alike."""
    packing = pack(np.array([len(tokens) for tokens, _ in shown]), row_tokens, rows)
    tokens = np.concatenate([tokens for tokens, _ in shown]).astype(np.int32)
    own = np.concatenate([own for _, own in shown])
    nothing = np.zeros((packing.num_rows, row_tokens), np.float32)
    weight = place(packing, own / np.float32(own.sum()))
    sampled = (weight > 0, weight > 0, weight)
    return TokenBatch(place(packing, tokens), *lay_out(packing), *sampled, *[nothing] * 5)


def imitation_loss(model: Model, params: PyTree, batch: TokenBatch) -> tuple[Float[Array, ""], dict[str, Array]]:
    """-sum of log p over trained tokens, with their weights: supervised learning of given completions.

    The metric "solved" sums over sequences the probability of a whole completion: what sampling would score.
    """
    logprobs, _ = model.logprobs(params, batch)
    mask = jnp.asarray(batch.trained)
    said = jnp.where(mask, logprobs, 0.0)
    ids, count = sequence_ids(batch)
    whole = jax.ops.segment_sum(said.ravel(), ids.ravel(), count)
    there = jax.ops.segment_max(mask.ravel().astype(jnp.int32), ids.ravel(), count) > 0
    solved = jnp.sum(jnp.exp(whole), where=there)
    return -jnp.sum(said * batch.weight), {"solved": jax.lax.stop_gradient(solved), "sequences": jnp.sum(there)}

"""One learner update as a pure, jitted function: gradients of the agent's loss, clipped, applied.

`update(params, target_params, opt_state, batch, weights, env_steps, updates, votes) -> Updated` donates target_params
and opt_state, never params: the new params *are* the published version, and the old ones are freed by their last
reader. A loss or gradient that is not finite changes nothing and is reported in `finite`; a batch without executed
transitions changes nothing either.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from seedx import sharding
from seedx.config import LearnerConfig
from seedx.seeds import Purpose, run_key
from seedx.types import Agent, Tree, Unroll


class Updated(NamedTuple):
    """What an update returns."""

    params: Tree
    target_params: Tree  # None without a target network
    opt_state: Tree
    priorities: Any  # float32 [B], or None where the agent has none
    metrics: dict[str, Array]  # scalars, means over the transitions that were trained on
    finite: Array  # bool; False: loss or gradient was not finite and nothing was changed
    votes: Any  # float32 [devices, ...], as they were put in, from all hosts to all; None on one host


def make_optimizer(config: LearnerConfig) -> optax.GradientTransformation:
    """Clipping and preconditioning; the learning rate is applied by the update, since it follows environment steps."""
    clip = optax.clip_by_global_norm(config.max_grad_norm) if config.max_grad_norm else optax.identity()
    match config.optimizer:
        case "rmsprop":
            scale = optax.scale_by_rms(decay=config.rmsprop_decay, eps=config.epsilon, eps_in_sqrt=False)
        case "adam":
            scale = optax.scale_by_adam(eps=config.epsilon)
    return optax.chain(clip, scale)


def learning_rate(config: LearnerConfig, env_steps: Float[Array, ""]) -> Float[Array, ""]:
    """Linear from `learning_rate` to `learning_rate_end` over `learning_rate_steps`; constant if that is 0."""
    if not config.learning_rate_steps:
        return jnp.full((), config.learning_rate, jnp.float32)
    done = jnp.clip(env_steps / config.learning_rate_steps, 0.0, 1.0)
    return config.learning_rate + done * (config.learning_rate_end - config.learning_rate)


def batch_shardings(mesh: Mesh) -> Unroll:
    """Where a batch `[T+1, B]` lives: B over the data axis (a prefix tree for device_put and jit)."""
    time_major: NamedSharding = sharding.split_axis(mesh, 1)
    return Unroll(time_major, time_major, time_major, time_major, state=sharding.split_axis(mesh, 0))  # type: ignore[arg-type]


def make_update(
    agent: Agent, config: LearnerConfig, mesh: Mesh, seed: int
) -> Callable[[Tree, Tree, Tree, Unroll, Any, Any, Any, Any], Updated]:
    """The jitted update of an agent on a mesh; the same function on one device or many.

    Every `target_period` updates, the target network becomes the network as it was before the update.
    """
    optimizer = make_optimizer(config)

    def summed(params: Tree, target_params: Tree, batch: Unroll, weights: Array, key: jax.Array) -> tuple[Tree, Any]:
        key = jax.random.fold_in(key, sharding.data_index())
        sums, priorities = _summed(agent, params, target_params, batch, weights, key, config.microbatches)
        return sharding.sum_over_data(sums), priorities

    # Each device computes on its own rows: what the compiler makes of a batch that is spread over them, and whose rows
    # and columns a network merges, sends all frames to all devices.
    rows, everywhere = PartitionSpec(sharding.DATA), PartitionSpec()
    batch_specs = jax.tree.map(lambda place: place.spec, batch_shardings(mesh))
    summed_everywhere = jax.shard_map(
        summed,
        mesh=mesh,
        in_specs=(everywhere, everywhere, batch_specs, rows, everywhere),
        out_specs=(everywhere, rows),
        check_vma=False,
    )

    def update(
        params: Tree,
        target_params: Tree,
        opt_state: Tree,
        batch: Unroll,
        weights: Float[Array, "B"],
        env_steps: Float[Array, ""],
        updates: Int[Array, ""],
        votes: Any,
    ) -> Updated:
        key = jax.random.fold_in(run_key(seed, Purpose.LOSS), updates)
        if config.target_period:
            due = updates % config.target_period == 0
            target_params = jax.tree.map(lambda new, old: jnp.where(due, new, old), params, target_params)
        ((loss, metrics, count), gradient), priorities = summed_everywhere(params, target_params, batch, weights, key)
        some, count = count > 0, jnp.maximum(count.astype(jnp.float32), 1.0)
        gradient = jax.tree.map(lambda g: g / count.astype(g.dtype), gradient)
        metrics = {name: value / count for name, value in metrics.items()}
        norm = optax.tree.norm(gradient)
        finite = jnp.isfinite(loss) & jnp.isfinite(norm)
        with jax.numpy_dtype_promotion("standard"):  # optax's Adam mixes dtypes
            direction, new_opt_state = optimizer.update(gradient, opt_state, params)
        rate = learning_rate(config, env_steps)
        new_params = jax.tree.map(lambda p, d: p - (rate * d).astype(p.dtype), params, direction)

        def keep_if_sound(new: Array, old: Array) -> Array:
            return jnp.where(finite & some, new, old)

        return Updated(
            params=jax.tree.map(keep_if_sound, new_params, params),
            target_params=target_params,
            opt_state=jax.tree.map(keep_if_sound, new_opt_state, opt_state),
            priorities=priorities,
            metrics={**metrics, "loss": loss / count, "grad_norm": norm, "learning_rate": rate},
            finite=finite,
            votes=votes,
        )

    whole, rows = sharding.replicated(mesh), sharding.split_axis(mesh, 0)
    return jax.jit(
        update,
        in_shardings=(whole, whole, whole, batch_shardings(mesh), rows, whole, whole, rows),
        out_shardings=whole,
        donate_argnums=(1, 2),
    )


def _summed(
    agent: Agent,
    params: Tree,
    target_params: Tree,
    batch: Unroll,
    weights: Float[Array, "B"],
    key: jax.Array,
    microbatches: int,
) -> tuple[tuple[tuple[Array, dict[str, Array], Array], Tree], Any]:
    """Loss, metrics, count and gradient, summed over the batch; priorities `[B]` or None."""

    def loss_and_output(params: Tree, part: Unroll, weights: Array, key: jax.Array) -> tuple[Array, Any]:
        loss, output = agent.loss(params, target_params, part, weights, key)
        return loss, (dict(output.metrics), output.count, output.priorities)

    value_and_grad = jax.value_and_grad(loss_and_output, has_aux=True)

    def summed(part: Unroll, weights: Array, key: jax.Array) -> tuple[Tree, Any]:
        (loss, (metrics, count, priorities)), gradient = value_and_grad(params, part, weights, key)
        return ((loss, metrics, count), gradient), priorities

    if microbatches == 1:
        return summed(batch, weights, key)
    parts = Unroll(*[_split(leaf, microbatches, 1) for leaf in batch[:-1]], state=_split(batch.state, microbatches, 0))
    rows = (parts, _split(weights, microbatches, 0), jax.random.split(key, microbatches))

    def accumulate(total: Tree, row: tuple[Unroll, Array, jax.Array]) -> tuple[Tree, Any]:
        sums, priorities = summed(*row)
        return jax.tree.map(jnp.add, total, sums), priorities

    shapes, _ = jax.eval_shape(summed, *jax.tree.map(lambda x: x[0], rows))
    sums, priorities = jax.lax.scan(accumulate, jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes), rows)
    return sums, jax.tree.map(lambda x: x.T.reshape(-1), priorities)  # undoes the strided split


def _split(tree: Tree, parts: int, axis: int) -> Tree:
    """Leaves with axis `axis` cut into `parts` strided parts along a new leading axis."""

    def split(leaf: Array) -> Array:
        shape = (*leaf.shape[:axis], leaf.shape[axis] // parts, parts, *leaf.shape[axis + 1 :])
        return jnp.moveaxis(leaf.reshape(shape), axis + 1, 0)

    return jax.tree.map(split, tree)

"""One learner update as a pure, jitted function: gradients of the agent's loss, clipped, applied.

`update(params, opt_state, batch, env_steps, updates) -> Updated` donates opt_state, never params: the new params *are*
the published version, and the old ones are freed by their last reader. A loss or gradient that is not finite changes
nothing and is reported in `finite`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, Float, Int

from seedx import sharding
from seedx.config import LearnerConfig
from seedx.seeds import Purpose, run_key
from seedx.types import Agent, Tree, Unroll, transition_mask


class Updated(NamedTuple):
    """What an update returns."""

    params: Tree
    opt_state: Tree
    metrics: dict[str, Array]  # scalars, means over executed transitions
    finite: Array  # bool; False: loss or gradient was not finite and nothing was changed


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
) -> Callable[[Tree, Tree, Unroll, Any, Any], Updated]:
    """The jitted update of an agent on a mesh; the same function on one device or many."""
    optimizer = make_optimizer(config)

    def update(
        params: Tree, opt_state: Tree, batch: Unroll, env_steps: Float[Array, ""], updates: Int[Array, ""]
    ) -> Updated:
        key = jax.random.fold_in(run_key(seed, Purpose.LOSS), updates)
        (loss, metrics), gradient = _summed(agent, params, batch, key, config.microbatches)
        count = jnp.maximum(transition_mask(batch.timestep.step_type).sum().astype(jnp.float32), 1.0)
        gradient = jax.tree.map(lambda g: g / count.astype(g.dtype), gradient)
        metrics = {name: value / count for name, value in metrics.items()}
        norm = optax.tree.norm(gradient)
        finite = jnp.isfinite(loss) & jnp.isfinite(norm)
        with jax.numpy_dtype_promotion("standard"):  # optax's Adam mixes dtypes
            direction, new_opt_state = optimizer.update(gradient, opt_state, params)
        rate = learning_rate(config, env_steps)
        new_params = jax.tree.map(lambda p, d: p - (rate * d).astype(p.dtype), params, direction)

        def keep_if_finite(new: Array, old: Array) -> Array:
            return jnp.where(finite, new, old)

        return Updated(
            params=jax.tree.map(keep_if_finite, new_params, params),
            opt_state=jax.tree.map(keep_if_finite, new_opt_state, opt_state),
            metrics={**metrics, "loss": loss / count, "grad_norm": norm, "learning_rate": rate},
            finite=finite,
        )

    whole = sharding.replicated(mesh)
    return jax.jit(
        update,
        in_shardings=(whole, whole, batch_shardings(mesh), whole, whole),
        out_shardings=whole,
        donate_argnums=1,
    )


def _summed(
    agent: Agent, params: Tree, batch: Unroll, key: jax.Array, microbatches: int
) -> tuple[tuple[Array, dict[str, Array]], Tree]:
    """Loss, metrics and gradient, summed over executed transitions of the whole batch."""

    def loss_and_metrics(params: Tree, part: Unroll, key: jax.Array) -> tuple[Array, dict[str, Array]]:
        loss, output = agent.loss(params, part, key)
        return loss, dict(output.metrics)

    value_and_grad = jax.value_and_grad(loss_and_metrics, has_aux=True)
    if microbatches == 1:
        return value_and_grad(params, batch, key)
    parts = Unroll(*[_split(leaf, microbatches, 1) for leaf in batch[:-1]], state=_split(batch.state, microbatches, 0))
    keys = jax.random.split(key, microbatches)

    def accumulate(total: Tree, part_and_key: tuple[Unroll, jax.Array]) -> tuple[Tree, None]:
        return jax.tree.map(jnp.add, total, value_and_grad(params, *part_and_key)), None

    zeros = jax.tree.map(
        lambda x: jnp.zeros(x.shape, x.dtype),
        jax.eval_shape(value_and_grad, params, jax.tree.map(lambda x: x[0], parts), keys[0]),
    )
    return jax.lax.scan(accumulate, zeros, (parts, keys))[0]


def _split(tree: Tree, parts: int, axis: int) -> Tree:
    """Leaves with axis `axis` cut into `parts` strided parts along a new leading axis.

    Strided, so that every device keeps its own share of every part and nothing moves between devices.
    """

    def split(leaf: Array) -> Array:
        shape = (*leaf.shape[:axis], leaf.shape[axis] // parts, parts, *leaf.shape[axis + 1 :])
        return jnp.moveaxis(leaf.reshape(shape), axis + 1, 0)

    return jax.tree.map(split, tree)

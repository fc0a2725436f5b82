"""The update of a language model as jitted functions: gradients of a part of a batch, their sum, and the step.

A batch is as many parts of one shape as it needs; gradients are sums, so that neither the number of parts nor that of
devices changes them. `step` donates the optimizer's state and the gradient, never params: the new params *are*
the published version. What is not finite changes nothing and is reported in `finite`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jaxtyping import Array, PyTree

from seedx import sharding
from seedx.grpo_config import TextLearnerConfig
from seedx.learner.zero import by_rows, split_further, summed, totals
from seedx.types import Tree

Loss = Callable[[PyTree, PyTree, Any], tuple[Array, dict[str, Array]]]  # (params, frozen, batch) -> loss, sums


class Sums(NamedTuple):
    """Of some parts of a batch."""

    gradient: Tree
    loss: Array
    metrics: dict[str, Array]  # sums, and greatest values where the name ends in "_max"


class Stepped(NamedTuple):
    """What a step returns."""

    params: Tree
    opt_state: Tree
    grad_norm: Array
    finite: Array  # bool; False: loss or gradient was not finite and nothing was changed


class TextUpdate(NamedTuple):
    """The programs of an update. Params are what is trained, the frozen ones what the loss reads beside them.

    Attributes:
        init: params -> the optimizer's state.
        gradient: (params, frozen, batch part) -> Sums.
        add: (Sums, Sums) -> Sums; donates the first.
        step: (params, opt_state, gradient, loss, learning rate) -> Stepped; donates the second and the third.
    """

    init: Callable[[Tree], Tree]
    gradient: Callable[[Tree, Tree, Any], Sums]
    add: Callable[[Sums, Sums], Sums]
    step: Callable[[Tree, Tree, Tree, Array, Any], Stepped]


def make_optimizer(config: TextLearnerConfig) -> optax.GradientTransformation:
    """Clipping, Adam and decay; the learning rate is applied by `step`."""
    clip = optax.clip_by_global_norm(config.max_grad_norm) if config.max_grad_norm else optax.identity()
    adam = optax.scale_by_adam(b1=config.beta1, b2=config.beta2, eps=config.epsilon)
    return optax.chain(clip, adam, optax.add_decayed_weights(config.weight_decay))


def make_update(
    loss: Loss, optimizer: optax.GradientTransformation, mesh: Mesh, params: Tree, frozen: Tree = None, zero: int = 3
) -> TextUpdate:
    """The programs of a loss.

    Args:
        loss: Sums over the tokens of a part; called in `zero.by_rows`, of a device's rows and its part of the weights.
        optimizer: Of `make_optimizer`.
        mesh: Rows are spread over its row groups.
        params: Like those that are trained, where they live.
        frozen: Like those that are not.
        zero: 1: only the optimizer's state is split over fsdp; 2: gradients too; 3: both, where parameters live split.
    """
    layout, frozen_layout = sharding.layout_of((params, frozen))
    split = split_further(layout, params) if zero < 3 else layout
    target = split if zero > 1 else layout
    rows, whole = sharding.split_rows(mesh), sharding.replicated(mesh)
    sums = Sums(target, whole, whole)  # type: ignore[arg-type]

    def gradient(params: Tree, frozen: Tree, batch: Any) -> Sums:
        (value, metrics), gradient = jax.value_and_grad(loss, has_aux=True)(params, frozen, batch)
        return Sums(summed(gradient, layout, target), jax.lax.psum(value, sharding.ROWS), totals(metrics))

    shapes = jax.eval_shape(optimizer.init, params)
    state = optax.tree_map_params(
        optimizer.init, lambda _, place: place, shapes, split, transform_non_params=lambda _: whole
    )
    return TextUpdate(
        jax.jit(optimizer.init, in_shardings=(layout,), out_shardings=state),
        jax.jit(by_rows(gradient, mesh, (layout, frozen_layout, rows), sums), out_shardings=sums),
        jax.jit(_add, in_shardings=(sums, sums), out_shardings=sums, donate_argnums=0),
        jax.jit(
            partial(_step, optimizer, split),
            in_shardings=(layout, state, target, whole, whole),
            out_shardings=Stepped(layout, state, whole, whole),  # type: ignore[arg-type]
            donate_argnums=(1, 2) if target == layout else 1,  # nothing that is made takes a part's place
        ),
    )


def _add(total: Sums, part: Sums) -> Sums:
    metrics = {
        name: (jnp.maximum if name.endswith("_max") else jnp.add)(value, part.metrics[name])
        for name, value in total.metrics.items()
    }
    return Sums(jax.tree.map(jnp.add, total.gradient, part.gradient), total.loss + part.loss, metrics)


def _step(
    optimizer: optax.GradientTransformation,
    split: Tree,
    params: Tree,
    opt_state: Tree,
    gradient: Tree,
    loss: Array,
    rate: Array,
) -> Stepped:
    # Each device computes what it keeps of the state; parameters that are whole on all are sent afterwards.
    params, gradient = jax.lax.with_sharding_constraint((params, gradient), (split, split))
    norm = optax.tree.norm(gradient)
    finite = jnp.isfinite(loss) & jnp.isfinite(norm)
    with jax.numpy_dtype_promotion("standard"):  # optax's Adam mixes dtypes
        direction, new_opt_state = optimizer.update(gradient, opt_state, params)
    new_params = jax.tree.map(lambda p, d: p - (rate * d).astype(p.dtype), params, direction)

    def keep_if_finite(new: Array, old: Array) -> Array:
        return jnp.where(finite, new, old)

    return Stepped(
        jax.tree.map(keep_if_finite, new_params, params),
        jax.tree.map(keep_if_finite, new_opt_state, opt_state),
        norm,
        finite,
    )

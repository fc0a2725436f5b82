"""A network of an agent: frame stack, torso, LSTM and heads, as pure functions over nested dicts."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Key, PyTree

from seedx.checks import ConfigError
from seedx.config import NetworkConfig
from seedx.networks import frame_stack
from seedx.networks.lstm import Carry, initial_carry
from seedx.networks.torso import as_float, is_image
from seedx.networks.trunk import Trunk
from seedx.types import ArraySpec, EnvSpec, StepType, TimeStep, Unroll


class NetworkState(NamedTuple):
    """What the network remembers of a row's past; a part that the config leaves out is None and has no leaves."""

    rings: tuple[Array, ...] | None  # the k-1 frames before, for each image leaf; None in unrolls, whose rows hold them
    carry: Carry | None  # of the LSTM
    action: PyTree  # the action before


class Network(NamedTuple):
    """Pure functions; parameters are nested dicts of arrays.

    The state after `step` still holds the previous action; once an action is chosen, `remember` puts it there.

    Attributes:
        init: key -> params.
        initial_state: batch size -> state of rows that have no past.
        step: (params, state, timestep `[B]`) -> (what the heads give `[B, ...]`, state).
        remember: (state, action `[B]`) -> state that the next row's core sees the action from.
        stacked: unroll -> the unroll with its frames stacked and without the k-1 rows that lead; `[T+1, B]` again.
        unroll: (params, state before row 0, timestep `[T+1, B]` with its frames stacked, action `[T+1, B]`) ->
            (what the heads give `[T+1, B, ...]`, state after the last row); the same as step by step.
    """

    init: Callable[[Array], PyTree]
    initial_state: Callable[[int], NetworkState]
    step: Callable[[PyTree, NetworkState, TimeStep], tuple[Any, NetworkState]]
    remember: Callable[[NetworkState, PyTree], NetworkState]
    stacked: Callable[[Unroll], Unroll]
    unroll: Callable[[PyTree, NetworkState, TimeStep, PyTree], tuple[Any, NetworkState]]


def build_network(config: NetworkConfig, spec: EnvSpec, model: type[Trunk]) -> Network:
    """The network of a config for an environment.

    Args:
        config: Of the network.
        spec: Of the environment.
        model: The trunk with heads, one of `seedx.networks.heads`.

    Raises:
        ConfigError: the torso or the heads cannot be built, or `frame_stack` is given without an image to stack.
    """
    images = [leaf for leaf in jax.tree.leaves(spec.observation) if is_image(leaf)]
    if config.frame_stack > 1 and not images:
        raise ConfigError(
            f"network.frame_stack ({config.frame_stack}) needs an image observation, [H, W] or [H, W, C]; "
            f"{spec.env} has {spec.observation}. Use --network.frame-stack 1."
        )
    graphdef = nnx.graphdef(nnx.eval_shape(lambda: model(config, spec, nnx.Rngs(0))))

    @jax.jit  # one program instead of many small ones: half the start-up time
    def init(key: Key[Array, ""]) -> PyTree:
        return nnx.to_pure_dict(nnx.state(model(config, spec, nnx.Rngs(key))))

    def initial_state(batch_size: int) -> NetworkState:
        rings = tuple(frame_stack.empty_ring(batch_size, leaf, config.frame_stack) for leaf in images)
        action = jax.tree.map(lambda leaf: jnp.asarray(leaf.zeros(batch_size)), spec.action)
        return NetworkState(
            rings=rings if config.frame_stack > 1 else None,
            carry=initial_carry(batch_size, config.lstm) if config.lstm else None,
            action=action if config.previous_action else None,
        )

    def step(params: PyTree, state: NetworkState, timestep: TimeStep) -> tuple[Any, NetworkState]:
        net = nnx.merge(graphdef, params)
        first = timestep.step_type == StepType.FIRST
        rings, observation = _push_images(state.rings, spec.observation, timestep.observation, first)
        x = net.torso(observation)
        if config.previous_action:
            x = jnp.concatenate([x, _previous(spec.action, state.action, timestep.reward, first)], axis=-1)
        carry = state.carry
        if net.core is not None:
            carry, x = net.core.step(carry, x, first)
        return net.heads(x), state._replace(rings=rings, carry=carry)

    def remember(state: NetworkState, action: PyTree) -> NetworkState:
        return state._replace(action=action) if config.previous_action else state

    def stacked(unroll: Unroll) -> Unroll:
        if not config.lead:
            return unroll
        first = unroll.timestep.step_type == StepType.FIRST
        rows = jax.tree.map(lambda leaf: leaf[config.lead :], unroll._replace(state=None))

        def stack(leaf: ArraySpec, frames: Array, rest: Array) -> Array:
            return frame_stack.stack_rows(frames, first, config.frame_stack) if is_image(leaf) else rest

        observation = jax.tree.map(stack, spec.observation, unroll.timestep.observation, rows.timestep.observation)
        return rows._replace(timestep=rows.timestep._replace(observation=observation), state=unroll.state)

    def unroll(params: PyTree, state: NetworkState, timestep: TimeStep, action: PyTree) -> tuple[Any, NetworkState]:
        net = nnx.merge(graphdef, params)
        first = timestep.step_type == StepType.FIRST
        x = net.torso(jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), timestep.observation))
        x = x.reshape(*first.shape, -1)
        if config.previous_action:
            before = jax.tree.map(lambda past, a: jnp.concatenate([past[None], a[:-1]]), state.action, action)
            x = jnp.concatenate([x, _previous(spec.action, before, timestep.reward, first)], axis=-1)
        carry = state.carry
        if net.core is not None:
            carry, x = net.core.unroll(carry, x, first)
        after = remember(state._replace(carry=carry), jax.tree.map(lambda a: a[-1], action))
        return net.heads(x), after

    return Network(init, initial_state, step, remember, stacked, unroll)


def _push_images(
    rings: tuple[Array, ...] | None, spec: PyTree, observation: PyTree, first: Bool[Array, "B"]
) -> tuple[tuple[Array, ...] | None, PyTree]:
    """Stacks the image leaves of an observation; without rings there is nothing to stack."""
    if rings is None:
        return None, observation
    leaves, treedef = jax.tree.flatten(observation)
    images = [i for i, leaf in enumerate(jax.tree.leaves(spec)) if is_image(leaf)]
    after = []
    for i, ring in zip(images, rings, strict=True):
        ring, leaves[i] = frame_stack.push(ring, leaves[i], first)
        after.append(ring)
    return tuple(after), treedef.unflatten(leaves)


def _previous(
    action_spec: PyTree, action: PyTree, reward: Float[Array, "*B"], first: Bool[Array, "*B"]
) -> Float[Array, "*B D"]:
    """The action and the reward (clipped to +-1) that led to a row, as features; zeros where an episode starts."""
    leaves = zip(jax.tree.leaves(action_spec), jax.tree.leaves(action), strict=True)
    parts = [as_float(spec, leaf).reshape(*first.shape, -1) for spec, leaf in leaves]
    features = jnp.concatenate([*parts, jnp.clip(reward, -1.0, 1.0)[..., None]], axis=-1)
    return jnp.where(first[..., None], 0.0, features)

"""Plays greedy episodes with the weights of a checkpoint; no learner, no server."""

from __future__ import annotations

from collections.abc import Callable

import jax
import numpy as np

from seedx.types import Agent, Env, Settings, StepType, Tree

_MAX_ENVS = 32


def evaluate(
    agent: Agent, params: Tree, make_envs: Callable[[np.ndarray], Env], episodes: int, seed: int
) -> np.ndarray:
    """Undiscounted returns of `episodes` greedy episodes, float64 `[episodes]`.

    Every environment plays a number of episodes that is fixed beforehand: the first ones to end, whoever plays them,
    would be the short ones.

    Args:
        agent: Whose `act` chooses.
        params: Of the agent.
        make_envs: Makes environments from their seeds.
        episodes: How many.
        seed: Of the environments and of what little the greedy policy may draw.
    """
    num_envs = min(episodes, _MAX_ENVS)
    quota = np.full(num_envs, episodes // num_envs)
    quota[: episodes % num_envs] += 1
    first = int(np.random.SeedSequence(seed, spawn_key=(2**31,)).generate_state(1)[0])
    env = make_envs(np.arange(first, first + num_envs, dtype=np.int64) % 2**31)
    try:
        return _play(agent, params, env, quota, jax.random.key(seed))
    finally:
        env.close()


def _play(agent: Agent, params: Tree, env: Env, quota: np.ndarray, key: jax.Array) -> np.ndarray:
    num_envs = len(quota)
    settings = Settings(
        env_id=np.arange(num_envs, dtype=np.int32),
        rank=np.zeros(num_envs, np.float32),
        greedy=np.ones(num_envs, bool),
    )

    @jax.jit
    def act(params: Tree, state: Tree, timestep: Tree, step: jax.Array) -> tuple[Tree, Tree]:
        keys = jax.random.split(jax.random.fold_in(key, step), num_envs)
        action, state, _ = agent.act(params, state, timestep, keys, settings)
        return action, state

    params = jax.device_put(params)  # once, not at every step
    dtypes = jax.tree.map(lambda leaf: np.dtype(leaf.dtype), env.spec.action)
    state, timestep, step = agent.initial_state(num_envs), env.reset(), 0
    current, returns = np.zeros(num_envs), []
    while quota.any():
        action, state = act(params, state, timestep, np.int32(step))
        timestep = env.step(jax.tree.map(lambda leaf, dtype: np.array(leaf, dtype), action, dtypes))
        current += np.where(timestep.step_type == StepType.FIRST, 0.0, timestep.reward)
        ended = timestep.step_type == StepType.LAST
        returns.extend(current[ended & (quota > 0)])
        quota[ended & (quota > 0)] -= 1
        current[ended] = 0.0
        step += 1
    return np.array(returns)

"""A time limit bootstraps, through the real adapter: CartPole cut at 5 steps, values of our choice, V-trace targets."""

import dataclasses

import jax.numpy as jnp
import numpy as np

from seedx.config import ActorConfig, Config
from seedx.envs.make import make_env
from seedx.learner.vtrace import vtrace
from seedx.types import StepType, transition_mask

LIMIT, ROWS, GAMMA = 5, 14, 0.9


def rollout(limit):
    """Rows `[T+1, N]` of CartPole where the pole is still up when the limit cuts the episode."""
    config = dataclasses.replace(Config(env="CartPole-v1"), actor=ActorConfig(max_episode_steps=limit))
    env = make_env(config, 3, [1, 2, 3])
    rows = [env.reset()]
    for t in range(ROWS - 1):
        rows.append(env.step(np.full(3, t % 2, np.int32)))
    env.close()
    step_type, reward, discount, observation = (np.stack(leaf) for leaf in zip(*rows, strict=True))
    return step_type, reward, discount, observation


def test_the_value_of_the_last_observation_bootstraps_a_truncated_episode():
    step_type, reward, discount, observation = rollout(LIMIT)
    last = step_type == StepType.LAST
    assert last[LIMIT].all()
    assert (discount[last] == 1.0).all()
    values = 10.0 + np.arange(ROWS, dtype=np.float32)[:, None] + np.zeros((1, 3), np.float32)
    targets = vtrace(
        jnp.zeros((ROWS - 1, 3)),
        jnp.asarray(GAMMA * discount[1:]),
        jnp.asarray(reward[1:]),
        jnp.asarray(values),
        jnp.asarray(transition_mask(step_type)),
        lambda_=1.0,
        clip_rho=1.0,
        clip_pg_rho=1.0,
    ).targets
    for start in (0, LIMIT + 1):  # two whole episodes
        for t in range(LIMIT):
            n = LIMIT - t
            expected = sum(GAMMA**k for k in range(n)) + GAMMA**n * values[start + LIMIT]
            np.testing.assert_allclose(targets[start + t], expected, rtol=1e-6)
    # The final observation is one of the old episode, not the next one's first: it lies near the row before it.
    moved = np.abs(observation[LIMIT] - observation[LIMIT - 1]).max(axis=-1)
    assert (moved < 0.5).all()
    assert (step_type[LIMIT + 1] == StepType.FIRST).all()
    assert (reward[LIMIT + 1] == 0).all()

"""Evaluation: a fixed number of greedy episodes for each environment, and weights that are arguments."""

import jax
import jax.numpy as jnp
import numpy as np
from fakes import Regression

from seedx.evaluate import evaluate
from seedx.types import ArraySpec, EnvSpec, StepType, TimeStep


class Lengths:
    """Episodes of environment i last i + 1 steps, each of which is rewarded with the action."""

    spec = EnvSpec("lengths", ArraySpec((), "float32"), ArraySpec((), "int32", num_values=9))

    def __init__(self, num_envs):
        self.num_envs, self.closed = num_envs, False

    def reset(self):
        self.t = np.zeros(self.num_envs, np.int64)
        return self._rows(np.full(self.num_envs, 99))

    def step(self, action):
        self.t = (self.t + 1) % (np.arange(self.num_envs) + 2)
        return self._rows(action)

    def close(self):
        self.closed = True

    def _rows(self, action):
        step_type = np.where(self.t == np.arange(self.num_envs) + 1, StepType.LAST, StepType.MID).astype(np.uint8)
        step_type[self.t == 0] = StepType.FIRST
        return TimeStep(step_type, action.astype(np.float32), np.ones(len(action), np.float32), np.float32(self.t))


class Constant(Regression):
    """Acts as its one weight says."""

    def act(self, params, state, timestep, keys, settings):
        assert isinstance(params["action"], jax.core.Tracer)  # a constant would be compiled into the program
        assert len(keys) == len(settings.greedy)
        return jnp.broadcast_to(params["action"], settings.greedy.shape), state, {}


def test_every_environment_plays_its_quota():
    env = Lengths(3)
    returns = evaluate(Constant(), {"action": np.int32(2)}, lambda seeds: env, episodes=3, seed=0)
    assert sorted(returns.tolist()) == [2, 4, 6]
    assert env.closed
    assert returns.dtype == np.float64

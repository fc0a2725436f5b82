"""dm_env environments as single environments. They are told by their methods: the dm_env package is not imported."""

from __future__ import annotations

from typing import Any

import numpy as np
import optree

from seedx.envs.specs import bounded, categorical
from seedx.types import ArraySpec, EnvSpec, StepType, TimeStep, Tree


def is_dm_env(env: Any) -> bool:
    """Whether `env` has dm_env's interface."""
    return all(callable(getattr(env, name, None)) for name in ("reset", "step", "observation_spec", "action_spec"))


class DmEnv:
    """One environment with dm_env's interface; see `seedx.envs.vectorize.SingleEnv`."""

    def __init__(self, env: Any, env_id: str) -> None:
        self._env = env
        self._action_spec = env.action_spec()
        observation = optree.tree_map(_leaf, env.observation_spec())
        self.spec = EnvSpec(env_id, observation, optree.tree_map(_leaf, self._action_spec))

    def reset(self) -> TimeStep:
        """Starts an episode and returns its FIRST row."""
        return TimeStep(StepType.FIRST, 0.0, 1.0, self._env.reset().observation)

    def step(self, action: Tree) -> TimeStep:
        """Takes one step."""
        action = optree.tree_map(lambda spec, leaf: np.asarray(leaf, spec.dtype), self._action_spec, action)
        row = self._env.step(action)
        return TimeStep(int(row.step_type), float(row.reward), float(row.discount), row.observation)

    def close(self) -> None:
        """Closes the environment, if it can be closed."""
        if hasattr(self._env, "close"):
            self._env.close()


def _leaf(spec: Any) -> ArraySpec:
    """The `ArraySpec` of a dm_env spec: Array, BoundedArray or DiscreteArray."""
    if hasattr(spec, "num_values"):
        return categorical(spec.num_values, np.int32)
    return bounded(tuple(spec.shape), spec.dtype, getattr(spec, "minimum", -np.inf), getattr(spec, "maximum", np.inf))

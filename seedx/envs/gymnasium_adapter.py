"""Gymnasium environments as single environments with dm_env semantics, and Gymnasium spaces as specs."""

from __future__ import annotations

from typing import Any, SupportsFloat

import gymnasium
import numpy as np
from gymnasium import spaces

from seedx.checks import ConfigError, require
from seedx.envs.specs import bounded, categorical
from seedx.specs import leaves
from seedx.types import ArraySpec, EnvSpec, StepType, TimeStep, Tree


class GymnasiumEnv:
    """One Gymnasium environment; see `seedx.envs.vectorize.SingleEnv`.

    `terminated` gives discount 0 and wins over `truncated`, which gives discount 1.
    """

    def __init__(self, env: gymnasium.Env, env_id: str, seed: int) -> None:
        """Takes the environment over; its first reset is seeded.

        Raises:
            ConfigError: a space cannot be described, or the observation's holds nothing.
        """
        self._env = env
        self._seed: int | None = seed
        observation = space_spec(env.observation_space, "observation_space")
        require(
            any(0 not in leaf.shape for _, leaf in leaves(observation)),
            f"observation_space of {env_id} is {env.observation_space}, which holds no values; the network needs at "
            "least one.",
        )
        self.spec = EnvSpec(env_id, observation, space_spec(env.action_space, "action_space"))

    def reset(self) -> TimeStep:
        """Starts an episode and returns its FIRST row."""
        observation, _ = self._env.reset(seed=self._seed)
        self._seed = None  # later episodes go on with the environment's own generator
        return self._timestep(StepType.FIRST, 0.0, 1.0, observation)

    def step(self, action: Tree) -> TimeStep:
        """Takes one step."""
        observation, reward, terminated, truncated, _ = self._env.step(to_space(self._env.action_space, action))
        step_type = StepType.LAST if terminated or truncated else StepType.MID
        return self._timestep(step_type, reward, 0.0 if terminated else 1.0, observation)

    def close(self) -> None:
        """Closes the environment."""
        self._env.close()

    def _timestep(self, step_type: StepType, reward: SupportsFloat, discount: float, observation: Any) -> TimeStep:
        observation = from_space(self._env.observation_space, observation)
        return TimeStep(step_type, float(reward), discount, observation)


def space_spec(space: gymnasium.Space, name: str) -> Tree:
    """The specs of a space: nested dicts and tuples of `ArraySpec`; integers always count from 0.

    Raises:
        ConfigError: a space is none of Box, Discrete, MultiDiscrete, MultiBinary, Dict, Tuple; `name` says which.
    """
    match space:
        case spaces.Box():
            return bounded(space.shape, space.dtype, space.low, space.high)
        case spaces.Discrete():
            return categorical(space.n, np.int32)
        case spaces.MultiDiscrete():
            return categorical(space.nvec, np.int32)
        case spaces.MultiBinary():
            return ArraySpec(space.shape, "int32", num_values=2)
        case spaces.Dict():
            return {key: space_spec(child, f"{name}[{key!r}]") for key, child in space.items()}
        case spaces.Tuple():
            return tuple(space_spec(child, f"{name}[{i}]") for i, child in enumerate(space))
        case _:
            raise ConfigError(
                f"{name} is {space}; seedx knows Box, Discrete, MultiDiscrete, MultiBinary, Dict and Tuple. "
                "Wrap the environment so that it has one of these."
            )


def from_space(space: gymnasium.Space, value: Any) -> Tree:
    """A value of `space` as a tree of `space_spec(space)`; shapes and dtypes are left to the caller to check."""
    match space:
        case spaces.Discrete() if space.start != 0:
            return value - space.start
        case spaces.MultiDiscrete():
            value = np.asarray(value)
            if value.shape != space.shape:  # left as it is, for the check to name the leaf
                return value
            value = value - space.start
            return value if _is_uniform(space) else tuple(value.flat)
        case spaces.Dict() if isinstance(value, dict):
            return {
                key: from_space(space[key], child) if key in space.spaces else child for key, child in value.items()
            }
        case spaces.Tuple() if isinstance(value, tuple | list) and len(value) == len(space):
            return tuple(from_space(child, part) for child, part in zip(space, value, strict=True))
        case _:
            return value


def to_space(space: gymnasium.Space, value: Tree) -> Any:
    """A tree of `space_spec(space)` as a value that lies in `space`: the inverse of `from_space`."""
    match space:
        case spaces.Discrete():
            return space.dtype.type(value + space.start)
        case spaces.MultiDiscrete():
            return (np.asarray(value).reshape(space.shape) + space.start).astype(space.dtype)
        case spaces.Dict():
            return {key: to_space(child, value[key]) for key, child in space.items()}
        case spaces.Tuple():
            return tuple(to_space(child, part) for child, part in zip(space, value, strict=True))
        case _:
            return np.array(value, space.dtype)  # a copy, which the environment may write to


def _is_uniform(space: spaces.MultiDiscrete) -> bool:
    return isinstance(space_spec(space, ""), ArraySpec)

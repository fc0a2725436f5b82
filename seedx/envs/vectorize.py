"""Single environments stepped one after the other as one vectorised `Env`, with next-step auto-reset."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
import optree

from seedx.types import ArraySpec, EnvSpec, StepType, TimeStep, Tree


class ObservationError(ValueError):
    """An environment returned an observation that its own spec does not describe; the message names the leaf."""


@runtime_checkable
class SingleEnv(Protocol):
    """One environment: rows without a leading axis, no auto-reset."""

    spec: EnvSpec

    def reset(self) -> TimeStep:
        """Starts an episode and returns its FIRST row."""
        ...

    def step(self, action: Tree) -> TimeStep:
        """Takes one step; never called on a LAST row."""
        ...

    def close(self) -> None:
        """Frees what the environment holds."""
        ...


class SerialEnv:
    """N single environments of one kind; see `seedx.types.Env`. What they raise is passed on."""

    def __init__(self, envs: Sequence[SingleEnv], max_episode_steps: int | None = None) -> None:
        """Takes the environments over; episodes longer than `max_episode_steps` are truncated.

        Raises:
            ValueError: the environments' specs differ.
        """
        self.spec = envs[0].spec
        for i, env in enumerate(envs):
            if env.spec != self.spec:
                raise ValueError(f"environments of one group must be alike: [0] is {self.spec}, [{i}] is {env.spec}.")
        self.num_envs = len(envs)
        self._envs = envs
        self._max_episode_steps = max_episode_steps
        self._steps = np.zeros(self.num_envs, np.int64)
        self._last = np.ones(self.num_envs, bool)
        self._paths, self._leaves, self._structure = optree.tree_flatten_with_path(self.spec.observation)

    def reset(self) -> TimeStep:
        """Starts an episode everywhere and returns the FIRST rows, `[N]`."""
        self._steps[:] = 0
        return self._stack([env.reset() for env in self._envs])

    def step(self, action: Tree) -> TimeStep:
        """Steps every environment with its row of `action` (`[N, ...]`), or resets it where the last row was LAST.

        Raises:
            ObservationError: an observation has another structure, shape or kind of dtype than the spec.
        """
        self._steps = np.where(self._last, 0, self._steps + 1)
        rows = [
            env.reset() if last else env.step(_row(action, i))
            for i, (env, last) in enumerate(zip(self._envs, self._last, strict=True))
        ]
        return self._stack(rows)

    def close(self) -> None:
        """Closes all environments."""
        for env in self._envs:
            env.close()

    def _stack(self, rows: Sequence[TimeStep]) -> TimeStep:
        step_type = np.array([row.step_type for row in rows], np.uint8)
        if self._max_episode_steps is not None:
            step_type[self._steps >= self._max_episode_steps] = StepType.LAST
        self._last = step_type == StepType.LAST
        reward = np.array([row.reward for row in rows], np.float32)
        discount = np.array([row.discount for row in rows], np.float32)
        return TimeStep(step_type, reward, discount, self._stack_observations([row.observation for row in rows]))

    def _stack_observations(self, observations: Sequence[Tree]) -> Tree:
        columns = zip(*map(self._flatten, observations), strict=True)
        stacked = []
        for path, spec, column in zip(self._paths, self._leaves, columns, strict=True):
            out = np.empty((self.num_envs, *spec.shape), spec.dtype)
            for i, value in enumerate(column):
                out[i] = _checked(value, spec, out.dtype, path)
            stacked.append(out)
        return optree.tree_unflatten(self._structure, stacked)

    def _flatten(self, observation: Tree) -> list[Any]:
        try:
            return self._structure.flatten_up_to(observation)
        except ValueError as error:
            raise ObservationError(f"an observation has another structure than the spec: {error}") from error


def _row(action: Tree, i: int) -> Tree:
    return optree.tree_map(lambda leaf: leaf[i], action)


def _checked(value: Any, spec: ArraySpec, dtype: np.dtype, path: tuple[Any, ...]) -> np.ndarray:
    array = np.asarray(value)
    if array.shape != spec.shape or not np.can_cast(array.dtype, dtype, "same_kind"):
        leaf = "".join(f"[{key!r}]" for key in path)
        raise ObservationError(
            f"observation{leaf} has shape {array.shape} and dtype {array.dtype}; the environment's own space says "
            f"{spec.shape} and {spec.dtype}. Correct the space or what reset() and step() return."
        )
    return array

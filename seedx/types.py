"""The nouns that cross a seam, and the legend of axis letters. NumPy only: actors import this without jax.

Axis letters, used in annotations and docstrings alike:
    T time        B batch (environments, time-major)   N items or environments of one group
    S slots       A actions of one categorical head    P parameters of the policy head
    D features    H W C image height, width, channels

Time (said once, here). A timestep row t holds the observation x_t together with the reward and discount that
*arrived with it*, so the outcome of action a_t sits in row t+1. An unroll has T+1 rows; the last row only
bootstraps and is the first row of the next unroll. Where k frames are stacked, k-1 rows lead it, of which nothing but
the frames is used; row numbers and [T+1] count from the one after them. Termination is LAST with discount 0,
truncation LAST with discount 1. Auto-reset is next-step: the action chosen on a LAST row is ignored and the row after
it is FIRST, so the transition LAST -> FIRST is masked out of every loss (`transition_mask`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

Tree = Any  # dict, tuple, list or NamedTuple of leaves, to any depth


class StepType(IntEnum):
    """dm_env's step types, stored as uint8."""

    FIRST = 0
    MID = 1
    LAST = 2


class TimeStep(NamedTuple):
    """One row for each environment of a group; every leaf has the same leading axes (`[N]`, `[T+1, B]`, ...)."""

    step_type: Any  # uint8
    reward: Any  # float32; arrived with this observation
    discount: Any  # float32; 0 where the episode terminated here, else 1
    observation: Tree


class Unroll(NamedTuple):
    """Consecutive rows of some environments. Time-major `[T+1, B, ...]`, except `state`: `[B, ...]`."""

    timestep: TimeStep
    action: Tree
    extras: Tree  # what `act` kept for the loss, for example the behaviour log-prob
    version: Any  # int32 [T+1, B]; version of the weights that chose the action
    state: Tree  # agent state before row 0, or the part of it that an `UnrollStateAgent` gives


class Settings(NamedTuple):
    """Per-slot settings, `[S]` on the server and `[B]` in `act`."""

    env_id: Any  # int32; the slot, unique in the server
    rank: Any  # float32; the place of the environment among those of the run's training actors, 0 to 1
    greedy: Any  # bool; evaluation slots act greedily and are kept out of training


@dataclass(frozen=True)
class ArraySpec:
    """Shape and dtype of one leaf, without leading axes. Discrete actions have `num_values`, others maybe bounds.

    Attributes:
        shape: Shape of one environment's leaf.
        dtype: NumPy dtype name, for example "float32".
        num_values: Number of values of a discrete leaf (0 .. num_values-1); None if it is not discrete.
        minimum: Lower bound of a continuous leaf (broadcasts to shape); None if unbounded.
        maximum: Upper bound of a continuous leaf (broadcasts to shape); None if unbounded.
    """

    shape: tuple[int, ...]
    dtype: str
    num_values: int | None = None
    minimum: tuple[float, ...] | float | None = None
    maximum: tuple[float, ...] | float | None = None

    def zeros(self, *leading: int) -> np.ndarray:
        """A zero array with the given leading axes."""
        return np.zeros((*leading, *self.shape), np.dtype(self.dtype))


@dataclass(frozen=True)
class EnvSpec:
    """What one environment looks like from outside.

    Attributes:
        env: The id it was made from.
        observation: Tree of `ArraySpec`.
        action: Tree of `ArraySpec`.
        frame_skip: Frames that one environment step advances (frames = steps * frame_skip).
    """

    env: str
    observation: Tree
    action: Tree
    frame_skip: int = 1


@runtime_checkable
class Env(Protocol):
    """A group of N environments stepped together, with next-step auto-reset."""

    spec: EnvSpec
    num_envs: int

    def reset(self) -> TimeStep:
        """Starts an episode everywhere and returns the FIRST rows, `[N]`."""
        ...

    def step(self, action: Tree) -> TimeStep:
        """Steps every environment with its row of `action` (`[N, ...]`); where the last row was LAST, resets."""
        ...

    def close(self) -> None:
        """Frees whatever the environments hold."""
        ...


class LossOutput(NamedTuple):
    """What a loss reports beside its value."""

    metrics: Mapping[str, Any]  # scalars, summed like the loss
    count: Any  # scalar, the number of transitions that loss and metrics are summed over
    priorities: Any = None  # float32 [B], new replay priorities, not negative; None where there are none


@runtime_checkable
class Agent(Protocol):
    """Pure functions over pytrees (nested dicts, tuples); the only thing an algorithm has to provide."""

    def init(self, key: Any) -> Tree:
        """Fresh parameters: nested dicts of arrays."""
        ...

    def initial_state(self, batch_size: int) -> Tree:
        """Agent state of `batch_size` environments before their first row, `[B, ...]` leaves; None if stateless."""
        ...

    def act(self, params: Tree, state: Tree, timestep: TimeStep, keys: Any, settings: Settings) -> tuple:
        """One row: `(action, state, extras)`, each `[B, ...]`; `keys` holds one PRNG key for each row."""
        ...

    def loss(self, params: Tree, target_params: Tree, unroll: Unroll, weights: Any, key: Any) -> tuple[Any, LossOutput]:
        """Loss of an unroll `[T+1, B]`, SUMMED over the transitions that are trained on (see `transition_mask`).

        The learner divides loss and metrics by the sum of `LossOutput.count` over the whole batch, so that gradients
        depend neither on microbatches nor on the number of devices.

        Args:
            params: Parameters.
            target_params: Older parameters (`learner.target_period`); None where the config asks for none.
            unroll: Time-major; where the network stacks frames, led by the rows of those before.
            weights: float32 `[B]`, importance weights of the items; 1 where the replay samples uniformly.
            key: For what the loss draws.
        """
        ...


@runtime_checkable
class UnrollStateAgent(Agent, Protocol):
    """An agent that keeps a part of its state out of unrolls, since their rows tell it."""

    def unroll_state(self, state: Tree) -> Tree:
        """The part of `[B, ...]` states that goes with unrolls; it alone is fetched from the device."""
        ...


@runtime_checkable
class PrioritizedAgent(Agent, Protocol):
    """An agent that learns from prioritized replay; the priorities after an update come with its loss."""

    def initial_priorities(self, unrolls: Unroll) -> Any:
        """float32 `[N]`, priorities of new unrolls from what `act` kept.

        Args:
            unrolls: NumPy, leaves `[N, T+1, ...]`, led like those that `loss` is given.
        """
        ...


def transition_mask(step_type: Any) -> Any:
    """m_t of `[T+1, ...]` step types, `[T, ...]` bool: True iff the action of row t was really executed."""
    return step_type[:-1] != StepType.LAST

"""A memory task: remember the cue of the first row until asked. Vectorised in NumPy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from seedx.envs.counter_rng import draw
from seedx.types import ArraySpec, EnvSpec, StepType, TimeStep

NUM_CUES = 4
DELAY = 6


class Memory:
    """N memory tasks; see `seedx.types.Env`.

    The observation is float32 `[5]`: the cue as one-hot of 4, on the first row only, and a flag that is 1 on the row
    that asks. Between them lie 6 blank rows. The action taken on the row that asks must be the cue: reward 1, else
    0, and the episode ends after 8 steps. Whoever has no memory answers by chance: mean return 1/4.
    """

    def __init__(self, num_envs: int, seeds: Sequence[int]) -> None:
        self.spec = EnvSpec(
            "memory",
            observation=ArraySpec((NUM_CUES + 1,), "float32", minimum=0.0, maximum=1.0),
            action=ArraySpec((), "int32", num_values=NUM_CUES),
        )
        self.num_envs = num_envs
        self._seeds = np.asarray(seeds, np.uint64)
        self._episode = np.zeros(num_envs, np.uint64)
        self._cue = np.zeros(num_envs, np.int64)
        self._t = np.zeros(num_envs, np.int64)

    def reset(self) -> TimeStep:
        """Shows a new cue everywhere and returns the FIRST rows, `[N]`."""
        self._start(np.ones(self.num_envs, bool))
        return self._timestep(np.zeros(self.num_envs, np.float32))

    def step(self, action: np.ndarray) -> TimeStep:
        """Lets one row pass (`action`: integers `[N]`); shows a new cue after LAST."""
        asked = self._t == DELAY + 1
        reward = (asked & (action == self._cue)).astype(np.float32)
        was_last = self._t == DELAY + 2
        self._t = self._t + 1
        self._start(was_last)
        return self._timestep(reward)

    def close(self) -> None:
        """Nothing to free."""

    def _start(self, where: np.ndarray) -> None:
        self._cue = np.where(where, draw(self._seeds, self._episode, NUM_CUES), self._cue)
        self._t = np.where(where, 0, self._t)
        self._episode += where.astype(np.uint64)

    def _timestep(self, reward: np.ndarray) -> TimeStep:
        first, last = self._t == 0, self._t == DELAY + 2
        step_type = np.where(last, StepType.LAST, np.where(first, StepType.FIRST, StepType.MID)).astype(np.uint8)
        observation = self.spec.observation.zeros(self.num_envs)
        observation[first, self._cue[first]] = 1.0
        observation[:, NUM_CUES] = self._t == DELAY + 1
        return TimeStep(step_type, reward, 1.0 - last.astype(np.float32), observation)

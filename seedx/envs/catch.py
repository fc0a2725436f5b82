"""Catch, as in bsuite (1908.03568): move a paddle under a falling ball. Vectorised in NumPy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from seedx.envs.counter_rng import draw
from seedx.types import ArraySpec, EnvSpec, StepType, TimeStep

ROWS, COLUMNS = 10, 5


class Catch:
    """N boards of 10x5; see `seedx.types.Env`.

    The observation is the board, float32 `[10, 5]`, with ones at the ball and the paddle. Actions 0, 1, 2 move the
    paddle left, not at all, right. An episode lasts 9 steps and ends with reward 1 (caught) or -1.
    """

    def __init__(self, num_envs: int, seeds: Sequence[int]) -> None:
        self.spec = EnvSpec(
            "catch",
            observation=ArraySpec((ROWS, COLUMNS), "float32", minimum=0.0, maximum=1.0),
            action=ArraySpec((), "int32", num_values=3),
        )
        self.num_envs = num_envs
        self._rows = np.arange(num_envs)
        self._seeds = np.asarray(seeds, np.uint64)
        self._episode = np.zeros(num_envs, np.uint64)
        self._ball_x = np.zeros(num_envs, np.int64)
        self._ball_y = np.zeros(num_envs, np.int64)
        self._paddle_x = np.zeros(num_envs, np.int64)

    def reset(self) -> TimeStep:
        """Drops a new ball everywhere and returns the FIRST rows, `[N]`."""
        self._start(np.ones(self.num_envs, bool))
        return self._timestep()

    def step(self, action: np.ndarray) -> TimeStep:
        """Moves paddles (`action`: integers `[N]`) and balls by one cell; drops a new ball after LAST."""
        was_last = self._ball_y == ROWS - 1
        self._paddle_x = np.clip(self._paddle_x + action - 1, 0, COLUMNS - 1)
        self._ball_y = self._ball_y + 1
        self._start(was_last)
        return self._timestep()

    def close(self) -> None:
        """Nothing to free."""

    def _start(self, where: np.ndarray) -> None:
        ball_x = draw(self._seeds, self._episode, COLUMNS)
        self._ball_x = np.where(where, ball_x, self._ball_x)
        self._ball_y = np.where(where, 0, self._ball_y)
        self._paddle_x = np.where(where, COLUMNS // 2, self._paddle_x)
        self._episode += where.astype(np.uint64)

    def _timestep(self) -> TimeStep:
        last = self._ball_y == ROWS - 1
        step_type = np.where(last, StepType.LAST, np.where(self._ball_y == 0, StepType.FIRST, StepType.MID))
        outcome = np.where(self._ball_x == self._paddle_x, 1.0, -1.0)
        board = self.spec.observation.zeros(self.num_envs)
        board[self._rows, self._ball_y, self._ball_x] = 1.0
        board[self._rows, ROWS - 1, self._paddle_x] = 1.0
        return TimeStep(
            step_type.astype(np.uint8), (outcome * last).astype(np.float32), 1.0 - last.astype(np.float32), board
        )

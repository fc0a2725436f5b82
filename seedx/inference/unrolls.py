"""Assembles the rows of one environment group into unrolls of T+1 rows that overlap by one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class FinishedUnroll(NamedTuple):
    """Leaves of a finished unroll; nobody else holds its memory."""

    rows: list[np.ndarray]  # each [T+1, N, ...]
    version: np.ndarray  # int32 [T+1, N]
    state: list[np.ndarray]  # each [N, ...]; agent state before row 0


class UnrollBuilder:
    """Collects the rows of one group; the environments of a group step together, so they share a row index.

    A builder lives as long as its stream: when an actor is lost, the half-built unroll goes with the builder.
    """

    def __init__(self, num_envs: int, unroll_length: int) -> None:
        self._num_envs = num_envs
        self._length = unroll_length
        self._rows: list[np.ndarray] = []
        self._version = np.empty((unroll_length + 1, num_envs), np.int32)
        self._state: list[np.ndarray] = []
        self._t = 0

    @property
    def wants_state(self) -> bool:
        """Whether the next row will be row 0 of an unroll, so that the state before it must be kept."""
        return self._t in (0, self._length)

    def add(self, row: Sequence[np.ndarray], version: int, state: Sequence[np.ndarray]) -> FinishedUnroll | None:
        """Adds a row; the unroll that it finishes, or None.

        Args:
            row: Leaves `[N, ...]` of timestep, action and extras; copied.
            version: Of the weights that chose the action.
            state: Leaves `[N, ...]` of the agent state before the row; read only where `wants_state`; copied.
        """
        if not self._rows:
            self._rows = [_like(leaf, self._length + 1) for leaf in row]
        kept_state = [np.array(leaf) for leaf in state] if self.wants_state else []
        for buffer, leaf in zip(self._rows, row, strict=True):
            buffer[self._t] = leaf
        self._version[self._t] = version
        if self._t < self._length:
            if self._t == 0:
                self._state = kept_state
            self._t += 1
            return None
        finished = FinishedUnroll(self._rows, self._version, self._state)
        self._start_over(finished, kept_state)
        return finished

    def _start_over(self, finished: FinishedUnroll, state: list[np.ndarray]) -> None:
        """Makes the last row of a finished unroll the first one of the next."""
        self._rows = [np.empty_like(buffer) for buffer in finished.rows]
        for buffer, old in zip(self._rows, finished.rows, strict=True):
            buffer[0] = old[-1]
        self._version = np.empty_like(finished.version)
        self._version[0] = finished.version[-1]
        self._state = state
        self._t = 1


def _like(row: np.ndarray, length: int) -> np.ndarray:
    return np.empty((length, *row.shape), row.dtype)

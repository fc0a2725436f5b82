"""Assembles rows into unrolls that overlap by one row or more, for all slots at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class FinishedUnrolls(NamedTuple):
    """The unrolls that one batch of rows finished; nobody else holds their memory."""

    groups: np.ndarray  # int; which groups of the batch finished theirs, ascending
    rows: list[np.ndarray]  # each [R, K, ...], K slots of these groups
    state: list[np.ndarray]  # each [K, ...]; agent state before the first row after those that lead
    sources: np.ndarray  # int64 [K]; unrolls with one number follow each other without a gap


class UnrollStore:
    """The half-built unroll of every slot.

    A batch holds rows of some groups, of one large one or of thousands of small ones; either way a leaf is written in
    one go. The environments of a group step together, so they share a row index, which lies at their first slot.

    Args:
        num_slots: S; slots are 0 .. S-1.
        num_rows: R, rows of an unroll.
        period: Rows from the start of one unroll to that of the next, 1 to R - lead - 1.
        lead: Rows of an unroll before the one that its state is of.
    """

    def __init__(self, num_slots: int, num_rows: int, period: int, lead: int = 0) -> None:
        self._num_slots = num_slots
        self._num_rows = num_rows
        self._period = period
        self._lead = lead
        self._num_states = (num_rows - 1 - lead) // period + 1
        self._t = np.zeros(num_slots, np.int64)  # where a group's next row goes
        self._sources = np.arange(num_slots)
        self._next_source = num_slots
        # Row t of slot s lies at t * S + s: one index is several times as fast as a pair.
        self._rows: list[np.ndarray] = []  # each [R * S, ...]
        # The states that go with this unroll and the next ones: entry j is of row lead + j * period, at j * S + s.
        self._state: list[np.ndarray] = []  # each [num_states * S, ...]

    def reset(self, slots: np.ndarray) -> None:
        """Drops the half-built unroll of a group, whose actor is new."""
        self._t[slots] = 0
        self._sources[slots] = np.arange(self._next_source, self._next_source + len(slots))
        self._next_source += len(slots)

    def finishing(self, firsts: np.ndarray) -> np.ndarray:
        """Which groups, named by their first slots, finish an unroll with their next row; bool `[G]`."""
        return self._t[firsts] == self._num_rows - 1

    def wants_state(self, firsts: np.ndarray) -> bool:
        """Whether any group, named by its first slot, comes to a row whose state goes with an unroll."""
        return bool(self._begins(self._t[firsts]).any())

    def add(
        self, slots: np.ndarray, bounds: np.ndarray, rows: Sequence[np.ndarray], state: Sequence[np.ndarray]
    ) -> FinishedUnrolls | None:
        """Adds a row to every slot of G groups; the unrolls that this finishes, or None.

        Args:
            slots: int `[N]`, group after group; those of a group are consecutive.
            bounds: int `[G+1]`; group g is rows `bounds[g]` to `bounds[g+1]`.
            rows: Leaves `[N, ...]`; copied.
            state: Leaves `[N, ...]` of the agent state before the rows; read only where `wants_state`; copied.
        """
        if not self._rows:
            self._rows = [_table(self._num_rows * self._num_slots, leaf) for leaf in rows]
        if not self._state:
            self._state = [_table(self._num_states * self._num_slots, leaf) for leaf in state]
        firsts = slots[bounds[:-1]]
        t = self._t[firsts]
        self._write(t, slots, bounds, rows)
        self._keep_state(t, slots, bounds, state)
        self._t[firsts] = t + 1
        ends = t == self._num_rows - 1
        return self._finish(ends, slots, bounds) if ends.any() else None

    def _begins(self, t: np.ndarray) -> np.ndarray:
        """Whether the state before a row goes with an unroll."""
        return (t >= self._lead) & ((t - self._lead) % self._period == 0)

    def _keep_state(self, t: np.ndarray, slots: np.ndarray, bounds: np.ndarray, state: Sequence[np.ndarray]) -> None:
        begins = self._begins(t)
        if not self._state or not begins.any():
            return
        members = _members(begins, bounds)
        entry = (t - self._lead) // self._period
        where = np.repeat(entry * self._num_slots, np.diff(bounds))[members] + slots[members]
        for table, leaf in zip(self._state, state, strict=True):
            table[where] = leaf[members]

    def _finish(self, ends: np.ndarray, slots: np.ndarray, bounds: np.ndarray) -> FinishedUnrolls:
        """Takes finished unrolls out; their last rows become the first ones of the next."""
        firsts, slots = slots[bounds[:-1]][ends], slots[_members(ends, bounds)]
        where = np.arange(self._num_rows)[:, None] * self._num_slots + slots
        rows = [table.take(where, axis=0) for table in self._rows]
        for table, leaf in zip(self._rows, rows, strict=True):
            table[where[: len(where) - self._period]] = leaf[self._period :]
        places = np.arange(self._num_states)[:, None] * self._num_slots + slots
        states = [table.take(places, axis=0) for table in self._state]
        for table, leaf in zip(self._state, states, strict=True):
            table[places[:-1]] = leaf[1:]
        self._t[firsts] = self._num_rows - self._period
        return FinishedUnrolls(np.flatnonzero(ends), rows, [leaf[0] for leaf in states], self._sources[slots])

    def _write(self, t: np.ndarray, slots: np.ndarray, bounds: np.ndarray, rows: Sequence[np.ndarray]) -> None:
        if len(t) == 1:  # a copy of one piece
            first = int(t[0] * self._num_slots + slots[0])
            where: slice | np.ndarray = slice(first, first + len(slots))
        else:
            where = np.repeat(t * self._num_slots, np.diff(bounds)) + slots
        for table, leaf in zip(self._rows, rows, strict=True):
            table[where] = leaf


def _members(groups: np.ndarray, bounds: np.ndarray) -> np.ndarray:
    """The rows of some groups, from a bool for each."""
    return np.flatnonzero(np.repeat(groups, np.diff(bounds)))


def _table(length: int, leaf: np.ndarray) -> np.ndarray:
    return np.empty((length, *leaf.shape[1:]), leaf.dtype)

"""What has come to the samples in slots, as arrays: a dispatch is booked for all of them at once."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from seedx.inference.requests import Tokens

_NO_TOKEN = -1


class Booked(NamedTuple):
    """What a dispatch brought to rows that have ended, or are watched and have new tokens; of length `m` each."""

    count: int  # tokens of all rows, also of those that are not here
    rows: list[int]
    start: list[int]  # tokens before
    end: list[int]  # tokens now
    stopped: list[bool]  # whether the last of them is a stop token
    full: list[bool]  # whether it has all that it may have
    new: Tokens  # `[m, K]` each, read-only; all K are the row's unless it has ended


class SampleTable:
    """A row for each sample that is in a slot or on its way from the device.

    A row gets a new serial number with each sample. Results carry the numbers of when they were launched, so that those
    of a sample that has left are dropped.

    Args:
        num_rows: Samples at a time.
        length: Tokens of a completion at most.
        steps: K, tokens that a dispatch brings to a row.
    """

    def __init__(self, num_rows: int, length: int, steps: int) -> None:
        # Columns are those of `Tokens`, as bits. What follows a row's count means nothing, so that all that a dispatch
        # brings is written without a look at where a row ends: hence the room for K more.
        self._bits = np.zeros((4, num_rows, length + steps), np.int32)
        self._steps = np.arange(steps)
        self.count = np.zeros(num_rows, np.int32)
        self.serial = np.zeros(num_rows, np.int64)
        self._watched = np.zeros(num_rows, bool)
        self._limit = np.zeros(num_rows, np.int32)
        self._stops = np.full((num_rows, 1), _NO_TOKEN, np.int32)
        self._free = list(range(num_rows))
        self._next_serial = 1

    def open(self, limit: int, stop_tokens: tuple[int, ...], watched: bool) -> int:
        """A row for a sample of at most `limit` tokens; `watched` if someone follows it token by token."""
        row = self._free.pop()
        self._watched[row] = watched
        missing = len(stop_tokens) - self._stops.shape[1]
        if missing > 0:
            self._stops = np.pad(self._stops, ((0, 0), (0, missing)), constant_values=_NO_TOKEN)
        self._stops[row] = _NO_TOKEN
        self._stops[row, : len(stop_tokens)] = stop_tokens
        self._limit[row], self.count[row], self.serial[row] = limit, 0, self._next_serial
        self._next_serial += 1
        return row

    def close(self, row: int) -> None:
        """Gives a row back; what is still on its way to it is dropped."""
        self.serial[row] = 0
        self._free.append(row)

    def read(self, row: int, start: int, end: int) -> Tokens:
        """A copy of some tokens of a row."""
        return _columns(self._bits[:, row, start:end].copy())

    def add(self, rows: np.ndarray, serials: np.ndarray, version: int, results: np.ndarray) -> Booked:
        """Books what a dispatch brought.

        Args:
            rows: int `[n]`, each once.
            serials: `serial[rows]` of when it was launched.
            version: Of the weights.
            results: int32 `[3, n, K]`: tokens, and the bits of both log-probabilities.
        """
        num_steps = len(self._steps)
        bits = np.empty((4, len(rows), num_steps), np.int32)
        bits[:3], bits[3] = results, version
        start = self.count[rows]
        self._bits[:, rows[:, None], start[:, None] + self._steps] = bits
        stops = (bits[0][:, :, None] == self._stops[rows][:, None]).any(axis=2)
        until_stop = np.where(stops.any(axis=1), stops.argmax(axis=1) + 1, num_steps + 1)
        left = self._limit[rows] - start
        taken = np.minimum(np.minimum(left, num_steps), until_stop) * (self.serial[rows] == serials)
        end = start + taken
        self.count[rows] = end
        stopped, full = until_stop <= taken, (taken > 0) & (taken == left)
        due = np.flatnonzero(stopped | full | (self._watched[rows] & (taken > 0)))
        new = bits[:, due]
        new.flags.writeable = False
        return Booked(
            count=int(taken.sum()),
            rows=rows[due].tolist(),
            start=start[due].tolist(),
            end=end[due].tolist(),
            stopped=stopped[due].tolist(),
            full=full[due].tolist(),
            new=_columns(new),
        )


def _columns(bits: np.ndarray) -> Tokens:
    """Tokens of int32 `[4, ...]`, the same memory."""
    floats = bits.view(np.float32)
    return Tokens(bits[0], floats[1], floats[2], bits[3])

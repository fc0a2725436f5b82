"""Which rows items have: each row knows the one after it, and an item its first row and how many it has.

Items that overlap begin at different rows of one chain, so that what they share is there once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np


class Chains(NamedTuple):
    """The rows of N items in a pool of which R places were used."""

    following: np.ndarray  # int32 [R]; the place of the row after each one, any of them where there is none
    firsts: np.ndarray  # int32 [N]; the place of each item's first row, any where it has none
    lengths: np.ndarray  # int32 [N]; how many rows each has

    def newest(self, count: int) -> Chains:
        """Those of the last `count` items."""
        first = len(self.firsts) - count
        return Chains(self.following, self.firsts[first:], self.lengths[first:])

    def places(self) -> np.ndarray:
        """Places of all items' rows, int64 `[longest, N]`; below the end of a shorter item stands anything."""
        places = np.empty((int(self.lengths.max(initial=0)), len(self.firsts)), np.int64)
        places[:1] = self.firsts
        for t in range(1, len(places)):
            places[t] = self.following[places[t - 1]]
        return places

    def flat(self) -> np.ndarray:
        """Places of all items' rows, one item after the other, int64 `[sum(lengths)]`."""
        places = self.places()
        return places.T[np.arange(len(places)) < self.lengths[:, None]]

    def last_users(self) -> np.ndarray:
        """The number of the last item that each row belongs to, int64 `[R]`; -1: to none."""
        users = np.full(len(self.following), -1)
        for items, rows in self._steps():
            users[rows] = np.maximum(users[rows], items)  # of equal rows the last counts, which is the largest
        return users

    def any_of(self, rows: np.ndarray) -> np.ndarray:
        """Which items have one of these rows, bool `[N]`, given a bool for each of the R."""
        found = np.zeros(len(self.firsts), bool)
        for items, places in self._steps():
            found[items] |= rows[places]
        return found

    def _steps(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """First the numbers of all items with their first rows, then of those that have a second with that, ..."""
        rows = self.firsts
        for t in range(int(self.lengths.max(initial=0))):
            items = np.flatnonzero(self.lengths > t)
            yield items, rows[items]
            rows = self.following[rows]

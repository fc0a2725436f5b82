"""The data of a table's items: their rows, each stored once, and what an item has beside them.

Invariant: a row is there as long as an item has it, or a source whose next item will begin with it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np

from seedx.replay.chains import Chains
from seedx.replay.items import Ragged, check_kind, choose, kind_of, lengths_of, split
from seedx.replay.pool import Pool
from seedx.replay.shelf import Shelf
from seedx.replay.slots import DROPPED
from seedx.types import Tree, Unroll


class StorageBooks(NamedTuple):
    """Copies of what a storage notes: made at once, to be looked at while it goes on."""

    firsts: np.ndarray  # int32 [max_items]; by slot, see `Chains`, as for `lengths`
    lengths: np.ndarray  # int32 [max_items]
    following: np.ndarray  # int32 [R]; by place, as the next two
    row_keys: np.ndarray  # uint64 [R]
    holders: np.ndarray  # int32 [R]

    def state(self, slots: np.ndarray) -> tuple[Chains, np.ndarray]:
        """The rows of the items in slots, and the key of each row, uint64 `[R]`; `DROPPED` at places without one."""
        chains = Chains(self.following, self.firsts[slots], self.lengths[slots])
        return chains, np.where(self.holders > 0, self.row_keys, DROPPED)


class Storage:
    """Room for items like some. Not for several threads at once.

    Args:
        items: Like all that will come.
        max_items: Slots for items.
        max_rows: Rows that are held at a time.
        overlap: Rows that an unroll has in common with the one before from its source.
        max_sources: Sources whose last rows are kept; the one that was silent for longest is forgotten.

    Attributes:
        rows: The rows' leaves.
        items: The other leaves of the items.
        longest: Rows of the longest item so far.
    """

    def __init__(self, items: Tree, max_items: int, max_rows: int, overlap: int, max_sources: int) -> None:
        rows, state = (jax.tree.leaves(part) for part in split(items))
        self._kind = kind_of(items)
        self.rows = Shelf(max_rows, rows, axes=1 if isinstance(items, Ragged) else 2)
        self.items = Shelf(max_items, state, axes=1)
        self.longest = 0
        self._pool = Pool(max_rows)
        self._firsts = np.zeros(max_items, np.int32)
        self._lengths = np.zeros(max_items, np.int32)
        self._overlap = overlap if isinstance(items, Unroll) else 0
        self._max_sources = max_sources
        self._tails: OrderedDict[int, np.ndarray] = OrderedDict()  # places of each source's last `overlap` rows

    @property
    def num_rows(self) -> int:
        """Rows held."""
        return self._pool.size

    @property
    def max_rows(self) -> int:
        """Rows that are held at most."""
        return self._pool.capacity

    def nbytes(self, num_items: int) -> int:
        """Bytes of the rows, and of what else so many items have."""
        return self._pool.size * self.rows.record.itemsize + num_items * self.items.record.itemsize

    def describe(self, num_items: int) -> str:
        """What so many items take, for an error."""
        rows = f" in {self._pool.size:,} of {self._pool.capacity:,} rows" if self._pool.capacity else ""
        return f"{self.nbytes(num_items):,} bytes{rows}"

    def check(self, items: Tree, count: int) -> None:
        """Raises ValueError unless these are `count` items of the kind that the storage was made for, and fit."""
        if count > self.items.capacity:
            raise ValueError(
                f"an insert of {count} items does not fit into a table of {self.items.capacity}; "
                "raise --table.max-size."
            )
        check_kind(items, self._kind, count)
        rows = int(lengths_of(items).sum())
        if rows > self.max_rows:
            raise ValueError(
                f"an insert of {count} items with {rows:,} rows ({rows * self.rows.record.itemsize:,} bytes) does not "
                f"fit into the {self.max_rows:,} rows that the table has memory for; raise --table.max-bytes."
            )

    # ---- room

    def lack(self, lengths: np.ndarray, stays: np.ndarray, sources: np.ndarray | None) -> int:
        """How many rows must go before those of N new items that stay find room; 0 or less: none.

        Args:
            lengths: int64 `[N]`; rows of each item.
            stays: bool `[N]`.
            sources: int64 `[N]`; None: no item goes on from another.
        """
        shared = self._overlap * np.count_nonzero(self._continues(stays, sources))
        return int(lengths[stays].sum() - shared) - self._pool.free

    def _continues(self, stays: np.ndarray, sources: np.ndarray | None) -> np.ndarray:
        """Which of N new items begin with rows that are there, bool `[N]`.

        An item that does not stay breaks the sequence of its source.
        """
        if sources is None or not self._overlap:
            return np.zeros(len(stays), bool)
        seen: dict[int, bool] = {}
        found = []
        for source, stay in zip(sources.tolist(), stays.tolist(), strict=True):
            found.append(stay and seen.get(source, source in self._tails))
            seen[source] = stay
        return np.array(found, bool)

    def forget_sources(self) -> None:
        """Lets go what is kept for next items; sources begin anew."""
        if self._tails:
            self._pool.let_go(np.concatenate(list(self._tails.values())))
            self._tails.clear()

    # ---- items

    def write(self, slots: np.ndarray, items: Tree, stays: np.ndarray, sources: np.ndarray | None) -> None:
        """Copies those of N items that stay into free slots, where `lack` says that there is room.

        Args:
            slots: One for each item that stays.
            items: All N, leaves `[N, ...]` or ragged.
            stays: bool `[N]`.
            sources: int64 `[N]`; None: no item goes on from another.
        """
        continues = self._continues(stays, sources)
        items = items if stays.all() else choose(items, stays)
        rows, state = (jax.tree.leaves(part) for part in split(items))
        self.items.write(slots, state)
        if not rows:
            return
        lengths, shared = lengths_of(items), self._overlap * continues[stays]
        starts = np.cumsum(lengths) - lengths
        fresh = np.arange(lengths.sum()) - np.repeat(starts + shared, lengths) >= 0
        places = np.empty(len(fresh), np.int64)
        places[fresh] = self._pool.take(int(np.count_nonzero(fresh)))
        kept, left = [], []
        if sources is not None and self._overlap:
            kept, left = self._follow(places.reshape(rows[0].shape[:2]), stays, sources, continues)
        self._pool.link(places, lengths)
        self._pool.hold(np.concatenate([places, *kept]))
        self._pool.let_go(np.concatenate([np.empty(0, np.int64), *left]))
        self._firsts[slots], self._lengths[slots] = places[starts], lengths
        self.longest = max(self.longest, int(lengths.max(initial=0)))
        if isinstance(items, Ragged):
            self.rows.write(places, rows)
        else:
            self._write_unrolls(places.reshape(rows[0].shape[:2]), rows, shared)

    def _follow(
        self, places: np.ndarray, stays: np.ndarray, sources: np.ndarray, continues: np.ndarray
    ) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Fills in where new unrolls go on from others, and remembers their own last rows instead.

        Args:
            places: int64 `[n, L]` of those that stay; the first `overlap` of those that continue are written.
            stays: bool `[N]`.
            sources: int64 `[N]`.
            continues: bool `[N]`.

        Returns:
            Places of the rows that are kept for next items now, and of those that were and are not any more.
        """
        kept, left = [], []
        rows = iter(places)
        for source, stay, goes_on in zip(sources.tolist(), stays.tolist(), continues.tolist(), strict=True):
            tail = self._tails.pop(source, None)
            if tail is not None:
                left.append(tail)
            if stay:
                own = next(rows)
                if goes_on:
                    own[: self._overlap] = tail
                self._tails[source] = own[len(own) - self._overlap :].copy()
                kept.append(self._tails[source])
        while len(self._tails) > self._max_sources:
            left.append(self._tails.popitem(last=False)[1])
        return kept, left

    def _write_unrolls(self, places: np.ndarray, rows: Sequence[np.ndarray], shared: np.ndarray) -> None:
        """Copies the rows `[N, L, ...]` to places `[N, L]` in the order in which they lie, but for those shared."""
        for skip in np.unique(shared):
            which = slice(None) if (shared == skip).all() else shared == skip
            leaves = [np.moveaxis(leaf[which, skip:], 1, 0) for leaf in rows]
            self.rows.write(places[which, skip:].T, leaves)

    def gather(self, slots: np.ndarray) -> Tree:
        """Copies of the items in slots, `[N, ...]`; of unrolls time-major in memory, as the learner wants them."""
        leaves = self.items.take(slots)
        if self.rows.arrays:
            chains = self._chains(slots)
            if isinstance(self._kind, Ragged):
                leaves = [*self.rows.take(chains.flat()), chains.lengths.astype(np.int64), *leaves]
            else:
                leaves = [np.moveaxis(leaf, 1, 0) for leaf in self.rows.take(chains.places())] + leaves
        return jax.tree.unflatten(jax.tree.structure(self._kind), leaves)

    def release(self, slots: np.ndarray) -> None:
        """Lets go the rows of items that left."""
        self._pool.let_go(self._chains(slots).flat())

    def _chains(self, slots: np.ndarray) -> Chains:
        return Chains(self._pool.following, self._firsts[slots], self._lengths[slots])

    # ---- snapshots

    def find_rows(self, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Which keys are those of rows that are there, bool `[N]`, and the places of these, int64."""
        return self._pool.find(keys)

    def books(self) -> StorageBooks:
        """Copies of what is noted of items and rows."""
        return StorageBooks(self._firsts.copy(), self._lengths.copy(), *self._pool.copies())

    def fitting(self, chains: Chains) -> int:
        """For how many of some items, the last ones, there are rows enough in an empty storage."""
        users = chains.last_users()
        rows = np.bincount(users[users >= 0], minlength=len(chains.firsts))
        return int(np.count_nonzero(np.cumsum(rows[::-1]) <= self._pool.capacity))

    def restore(self, chains: Chains, slots: np.ndarray) -> np.ndarray:
        """Makes places for the rows of items, which must fit, in slots of an empty storage.

        Returns:
            Keys of the rows, uint64 `[R]`; `DROPPED` for those that are of no item. Their leaves are to be written.
        """
        needed = np.flatnonzero(chains.last_users() >= 0)
        places = np.zeros(len(chains.following), np.int64)
        places[needed] = self._pool.take(len(needed))
        self._pool.following[places[needed]] = places[chains.following[needed]]
        self._firsts[slots] = places[chains.firsts] if len(needed) else 0
        self._lengths[slots] = chains.lengths
        self.longest = int(chains.lengths.max(initial=0))
        self._pool.hold(self._chains(slots).flat())
        keys = np.full(len(places), DROPPED)
        keys[needed] = self._pool.keys(places[needed])
        return keys

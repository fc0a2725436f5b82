"""Where on disk the data of a table are: rows and items alike, each kind in chunks of its own.

Invariant: a key is given out once, so that what is noted of a key that is gone never passes for the next one's.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from seedx.replay.chunks import Chunk
from seedx.replay.slots import DROPPED, slots_of
from seedx.replay.table_state import Kind, TableState


class Ledger:
    """Where the records of one kind are.

    Args:
        capacity: Places of the table for them.
        record: One of them.
    """

    def __init__(self, capacity: int, record: np.dtype) -> None:
        self.capacity = capacity
        self.record = record
        # By place: what was written last, and where; chunks count from 1. Memory is claimed as they are written.
        self._keys = np.zeros(capacity, np.uint64)
        self._chunks = np.zeros(capacity, np.int32)
        self._rows = np.zeros(capacity, np.int32)

    def note(self, keys: np.ndarray, chunk: int, rows: np.ndarray) -> None:
        """Notes that these records `[N]` are at these rows of a chunk."""
        places = slots_of(keys, self.capacity)
        self._keys[places], self._chunks[places], self._rows[places] = keys, chunk, rows

    def find(self, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Chunk and row of records `[N]`, int32; chunk 0: not written."""
        places = slots_of(keys, self.capacity)
        return np.where(self._keys[places] == keys, self._chunks[places], 0), self._rows[places]

    def missing(self, keys: np.ndarray) -> np.ndarray:
        """Those keys whose records are not written; `DROPPED` is none."""
        return keys[(self.find(keys)[0] == 0) & (keys != DROPPED)]


def keys_of(state: TableState, kind: Kind) -> np.ndarray:
    """Keys of all records in a state: of items in the roster's order; of rows by place, `DROPPED` where none is."""
    return state.row_keys if kind == "rows" else state.roster.keys[state.roster.order]


def size_of(keys: Mapping[Kind, np.ndarray], ledgers: Mapping[Kind, Ledger]) -> int:
    """Bytes of some records."""
    return sum(len(some) * ledgers[kind].record.itemsize for kind, some in keys.items())


def newest(
    state: TableState, missing: dict[Kind, np.ndarray], ledgers: Mapping[Kind, Ledger], room: int
) -> dict[Kind, np.ndarray]:
    """Those of some records that the newest items need, as many items as fit into so many bytes with all of theirs."""
    if size_of(missing, ledgers) <= room:
        return missing
    order = state.roster.order
    number = np.full(len(state.roster.slots), -1)  # of the item in each slot
    number[order] = np.arange(len(order))
    users = {"rows": state.chains.last_users(), "items": number}
    item = {kind: users[kind][slots_of(keys, ledgers[kind].capacity)] for kind, keys in missing.items()}
    every = np.concatenate(list(item.values()))
    sizes = np.repeat([ledgers[kind].record.itemsize for kind in item], [len(some) for some in item.values()])
    by_age = np.argsort(-every, kind="stable")
    too_many = np.cumsum(sizes[by_age]) > room
    last_out = every[by_age][too_many].max()
    return {kind: keys[item[kind] > last_out] for kind, keys in missing.items()}


def worth_moving(
    state: TableState, chunks: Mapping[int, Chunk], ledgers: Mapping[Kind, Ledger], wanted: int, room: int
) -> dict[Kind, np.ndarray]:
    """What to write anew so that its chunks can go: keys of records of at most `room` bytes, whose chunks also hold
    `wanted` bytes of what left, or as many as there are; chunks with least of what lives first."""
    keys = {kind: keys_of(state, kind) for kind in ledgers}
    where = {kind: ledger.find(keys[kind])[0] for kind, ledger in ledgers.items()}
    numbers, held, gone = [], [], []
    for kind, ledger in ledgers.items():
        found, counts = np.unique(where[kind][where[kind] > 0], return_counts=True)
        rows = np.array([chunks[number].rows for number in found.tolist()], np.int64)
        numbers.append(found)
        held.append(counts * ledger.record.itemsize)
        gone.append((rows - counts) * ledger.record.itemsize)
    numbers, held, gone = (np.concatenate(parts) for parts in (numbers, held, gone))
    order = np.argsort(held / (held + gone))
    before = np.cumsum(gone[order]) - gone[order]
    useful = (gone[order] > 0) & (before < wanted) & (np.cumsum(held[order]) <= room)
    return {kind: keys[kind][np.isin(where[kind], numbers[order][useful])] for kind in ledgers}

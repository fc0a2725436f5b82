"""Snapshots of the embedded replay on disk, so that a learner that was killed goes on with what it had gathered.

Each row is written once, and so is what an item has beside its rows, to chunks of such records; a snapshot writes those
that are new and an index of all. It is the table at one moment, when the books that the index is made of were copied:
for that others are held off, and for a few megabytes of records at a time, but for nothing that is computed or written.
Items are absent only where they had left before their records were copied, or the disk has no room for these, or a
chunk was damaged; the table is then as if they had been deleted.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from seedx.checks import require
from seedx.replay.chains import Chains
from seedx.replay.chunks import (
    Chunk,
    DamagedError,
    chunk_sizes,
    read_chunk,
    read_index,
    remove_chunks,
    write_chunk,
    write_index,
)
from seedx.replay.items import leaves_of
from seedx.replay.ledger import Ledger, keys_of, newest, size_of, worth_moving
from seedx.replay.rate_limiter import Limits
from seedx.replay.roster import RosterState
from seedx.replay.slots import DROPPED
from seedx.replay.table import Table
from seedx.replay.table_state import Keys, Kind, TableState
from seedx.types import Tree

log = logging.getLogger(__name__)

_FORMAT = 2  # of the index
_PIECE_BYTES = 2**22  # copied at a time, while the table stands still for a millisecond or two
_CHUNK_BYTES = 2**26  # of a chunk, and no more than this share of all: what one flipped bit costs
_CHUNK_SHARE = 16
_ROUNDS = 4  # in which new records are written before the books are copied that the last few are written for
_ROSTER = RosterState._fields[:-1]  # what of a roster is arrays


class Snapshots:
    """The snapshots of one table. Not for several threads at once; others may use the table meanwhile.

    Args:
        directory: Theirs alone; made at the first save.
        max_bytes: Of the chunks on disk, at any time.
        table: What is saved and restored.
        example: An item like those in the table, leaves `[1, ...]`.
    """

    def __init__(self, directory: Path, max_bytes: int, table: Table, example: Tree) -> None:
        self._directory = directory
        self._max_bytes = max_bytes
        self._chunk_bytes = min(_CHUNK_BYTES, max_bytes // _CHUNK_SHARE)
        self._table = table
        self._example = example
        self._ledgers: dict[Kind, Ledger] = {}  # made when the table knows its shapes
        self._chunks: dict[int, Chunk] = {}  # those that hold something of the table
        self._last = max(chunk_sizes(directory), default=0)  # number of the newest chunk
        self._warned: set[str] = set()

    def save(self) -> bool:
        """Writes a snapshot; returns whether there is a new one. A failure is logged, once, and the last one stays."""
        if not self._open():
            return False
        try:
            return self._save()
        except OSError as error:
            self._warn_once(
                "failed",
                f"the replay could not be saved to {self._directory} ({error}); a resume goes on with its last "
                "snapshot, if there is one. Make room there, or give --checkpoint.replay-max-bytes 0: no snapshots.",
            )
            return False

    def load(self) -> int:
        """Brings the table, which must be fresh, to the last snapshot; returns how many items it has then.

        What is damaged is logged, and the items that need it are left out. The table's settings may differ from those
        of then; see `Table.restore`. A snapshot of another format is logged and left out as a whole.

        Raises:
            ConfigError: the items have other leaves than this run's, or do not fit into memory.
        """
        try:
            values, arrays = read_index(self._directory)
        except FileNotFoundError:
            return 0
        except DamagedError as error:
            log.warning("%s; the replay starts empty.", error)
            return 0
        if (found := values.get("format", 1)) != _FORMAT:
            log.warning(
                "the replay's snapshot in %s has format %s, but this program reads %s; the replay starts empty, and "
                "the next snapshot takes its place.",
                self._directory,
                found,
                _FORMAT,
            )
            return 0
        self._check(values)
        state = _state(values, arrays)
        keys = self._table.restore(state, self._example)
        self._open()
        chunks = {int(number): Chunk(*chunk) for number, chunk in values["chunks"].items()}
        self._last = max(self._last, *chunks, 0)
        good = self._read(chunks, keys, state, arrays)
        self._table.delete(keys.items[~good])
        return int(np.count_nonzero(good))

    def _open(self) -> bool:
        """Makes the ledgers; whether the table has shapes to make them for."""
        shelves = self._table.shelves()
        if not self._ledgers:
            self._ledgers = {kind: Ledger(shelf.capacity, shelf.record) for kind, shelf in shelves.items()}
        return bool(shelves)

    def _check(self, values: dict[str, Any]) -> None:
        """Raises ConfigError unless the items of a snapshot are like those of this run."""
        then, now = values["leaves"], leaves_of(self._example)
        require(
            then == now,
            f"the replay's snapshot in {self._directory} holds {', '.join(x for x in then if x not in now) or then}, "
            f"where this run makes {', '.join(x for x in now if x not in then) or now}. Drop the flags that differ, or "
            "remove that directory to go on with an empty replay; if no flag differs, an earlier version made it.",
        )

    def _read(
        self, chunks: dict[int, Chunk], keys: Keys, state: TableState, arrays: dict[str, np.ndarray]
    ) -> np.ndarray:
        """Reads the leaves of what was restored; which items are whole, bool `[N]`."""
        good, chains = np.ones(len(keys.items), bool), state.chains.newest(len(keys.items))
        for kind in self._ledgers:
            wanted: np.ndarray = getattr(keys, kind)
            chunk, row = (arrays[f"{kind}_{name}"] for name in ("chunk", "row"))
            chunk, row = chunk[len(chunk) - len(wanted) :], row[len(row) - len(wanted) :]
            for number in np.unique(chunk[wanted != DROPPED]).tolist():
                here = (chunk == number) & (wanted != DROPPED)
                damage = self._read_chunk(kind, number, chunks, wanted[here], row[here]) if number else None
                if number and damage is None:
                    continue
                lost = good & (here if kind == "items" else chains.any_of(here))
                good &= ~lost
                if damage is not None:
                    log.warning("%s; %s items of the replay are lost.", damage, f"{np.count_nonzero(lost):,}")
        return good

    def _read_chunk(
        self, kind: Kind, number: int, chunks: dict[int, Chunk], keys: np.ndarray, rows: np.ndarray
    ) -> DamagedError | None:
        """Reads what has these keys `[N]` from rows of a chunk; what is wrong with the chunk, if anything is."""
        try:
            records = read_chunk(self._directory, number, chunks[number], self._ledgers[kind].record)
        except DamagedError as error:
            return error
        self._table.write(kind, keys, records[rows])
        self._note(kind, keys, number, chunks[number], rows)
        return None

    def _save(self) -> bool:
        piece_bytes = max(_PIECE_BYTES, sum(leaf.nbytes for leaf in jax.tree.leaves(self._example)))
        for _ in range(_ROUNDS):
            state = self._table.state()
            if state is None:  # closed meanwhile
                return False
            missing = self._missing(state)
            size = size_of(missing, self._ledgers)
            room = self._make_room(size)
            if size <= min(room, piece_bytes):
                break
            self._write(newest(state, missing, self._ledgers, room))
            if size > room:
                self._warn_once(
                    "room",
                    f"snapshots of the replay lack {size - room:,} of its bytes: they do not fit into "
                    f"checkpoint.replay_max_bytes ({self._max_bytes:,}). Raise --checkpoint.replay-max-bytes, best to "
                    "twice the bytes of the table, or lower --table.max-size.",
                )
                break
        state = self._table.state()
        if state is None:
            return False
        room = min(self._room(self._chunk_bytes), piece_bytes)
        self._write(newest(state, self._missing(state), self._ledgers, room))
        if not self._table.shelves():  # closed meanwhile: what could not be read is not what had left
            return False
        self._commit(state)
        return True

    def _missing(self, state: TableState) -> dict[Kind, np.ndarray]:
        """Keys of what is not written; items oldest first."""
        return {kind: ledger.missing(keys_of(state, kind)) for kind, ledger in self._ledgers.items()}

    def _write(self, keys: dict[Kind, np.ndarray]) -> None:
        """Writes records, but for those that leave meanwhile."""
        for kind, some in keys.items():
            size = self._ledgers[kind].record.itemsize
            rows = max(1, self._chunk_bytes // size)
            for start in range(0, len(some), rows):
                self._store(kind, self._copies(kind, some[start : start + rows], max(1, _PIECE_BYTES // size)))

    def _copies(self, kind: Kind, keys: np.ndarray, count: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Keys and records of what is still there, in pieces of so many at most, which share their memory."""
        buffer = np.empty(min(count, len(keys)), self._ledgers[kind].record)
        for start in range(0, len(keys), count):
            piece = keys[start : start + count]
            lives = self._table.read(kind, piece, buffer)
            yield piece[lives], buffer[: np.count_nonzero(lives)]

    def _store(self, kind: Kind, pieces: Iterable[tuple[np.ndarray, np.ndarray]]) -> None:
        """Writes pieces as a chunk, and notes where the records are."""
        written = []

        def records() -> Iterator[np.ndarray]:
            for keys, piece in pieces:
                written.append(keys)
                yield piece

        self._last += 1
        chunk = write_chunk(self._directory, self._last, records())
        self._note(kind, np.concatenate(written), self._last, chunk, np.arange(chunk.rows))

    def _note(self, kind: Kind, keys: np.ndarray, number: int, chunk: Chunk, rows: np.ndarray) -> None:
        self._ledgers[kind].note(keys, number, rows)
        self._chunks[number] = chunk

    def _commit(self, state: TableState) -> None:
        """Makes a state the snapshot; then the chunks go that hold nothing of it."""
        roster, arrays = state.roster, {}
        for kind, ledger in self._ledgers.items():
            arrays[f"{kind}_chunk"], arrays[f"{kind}_row"] = ledger.find(keys_of(state, kind))
        used = np.unique(np.concatenate([arrays[f"{kind}_chunk"] for kind in self._ledgers]))
        self._chunks = {number: self._chunks[number] for number in used[used > 0].tolist()}
        counters = (state.inserted, state.deleted, state.sampled)
        values = {"format": _FORMAT, "leaves": leaves_of(self._example), "chunks": self._chunks}
        values |= {"limits": state.limits, "counters": counters, "rng": roster.rng}
        arrays |= {name: getattr(roster, name) for name in _ROSTER} | state.chains._asdict()
        write_index(self._directory, values, arrays)
        remove_chunks(self._directory, keep=self._chunks)

    def _room(self, reserve: int) -> int:
        """How many bytes there still are on disk beside so many."""
        return max(self._max_bytes - reserve - sum(chunk_sizes(self._directory).values()), 0)

    def _make_room(self, wanted: int) -> int:
        """Tries to make room for so many bytes; returns for how many there is.

        First the chunks go that hold nothing any more; then what those chunks hold that have little is written anew.
        For that a chunk's room is kept free, without which no room could be made.
        """
        moving: dict[Kind, np.ndarray] = {}
        while (room := self._room(self._chunk_bytes)) < wanted:
            self._write(moving)
            state = self._table.state()
            if state is None:
                return 0
            self._commit(state)
            room = self._room(self._chunk_bytes)
            moving = worth_moving(state, self._chunks, self._ledgers, wanted - room, self._room(0))
            if not size_of(moving, self._ledgers):
                return room
        return room

    def _warn_once(self, kind: str, message: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            log.warning(message)


def _state(values: dict[str, Any], arrays: dict[str, np.ndarray]) -> TableState:
    roster = RosterState(*(arrays[name] for name in _ROSTER), rng=values["rng"])
    chains = Chains(*(arrays[name] for name in Chains._fields))
    inserted, deleted, sampled = values["counters"]
    unknown = np.empty(0, np.uint64)
    return TableState(roster, Limits(*values["limits"]), inserted, deleted, sampled, chains, unknown)

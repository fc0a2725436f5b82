"""Snapshots of the embedded replay on disk, so that a learner that was killed goes on with what it had gathered.

Each item is written once, to a chunk; a snapshot writes those that are new and an index of all. It is the table at one
moment, when the last new items and the table's books were copied. Items are absent only where the disk was slower than
they came, or has no room for them, or a chunk was damaged; the table is then as if they had been deleted.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from seedx.config import require
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
from seedx.replay.rate_limiter import Limits
from seedx.replay.roster import DROPPED, RosterState
from seedx.replay.slots import slots_of
from seedx.replay.storage import leaves_of
from seedx.replay.table import Table, TableState
from seedx.types import Tree

log = logging.getLogger(__name__)

_PIECE_BYTES = 2**22  # copied at a time, while the table stands still for a millisecond or two
_CHUNK_BYTES = 2**26  # of a chunk, and no more than this share of all: what one flipped bit costs
_CHUNK_SHARE = 16
_ROUNDS = 4  # in which new items are written before the last few are copied together with the books
_ARRAYS = RosterState._fields[:-1]  # what of a roster is arrays


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
        self._chunks: dict[int, Chunk] = {}  # those that hold items of the table
        self._last = max(chunk_sizes(directory), default=0)  # number of the newest chunk
        # By slot of the table: the item that was written last, and where.
        self._keys = np.full(table.capacity, DROPPED)
        self._chunk = np.zeros(table.capacity, np.int64)
        self._row = np.zeros(table.capacity, np.int64)
        self._warned: set[str] = set()

    def save(self) -> bool:
        """Writes a snapshot; returns whether there is a new one. A failure is logged, once, and the last one stays."""
        record = self._table.record()
        if record is None:
            return False
        try:
            return self._save(np.empty(max(1, _PIECE_BYTES // record.itemsize), record))
        except OSError as error:
            self._warn_once(
                "failed",
                f"the replay could not be saved to {self._directory} ({error}); a resume goes on with its last "
                "snapshot, if there is one. Make room there, or give --checkpoint.replay-max-bytes 0: no snapshots.",
            )
            return False

    def load(self) -> int:
        """Brings the table, which must be fresh, to the last snapshot; returns how many items it has then.

        What is damaged is logged, and its items are left out. The table's settings may differ from those of then; see
        `Table.restore`.

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
        self._check(values)
        keys = self._table.restore(_state(values, arrays), self._example)
        first = len(arrays["chunk"]) - len(keys)
        chunks = {int(number): Chunk(*chunk) for number, chunk in values["chunks"].items()}
        read = self._read(chunks, keys, arrays["chunk"][first:], arrays["row"][first:])
        self._table.delete(keys[~read])
        return int(np.count_nonzero(read))

    def _check(self, values: dict[str, Any]) -> None:
        """Raises ConfigError unless the items of a snapshot are like those of this run."""
        then, now = values["leaves"], leaves_of(self._example)
        require(
            then == now,
            f"the replay's snapshot in {self._directory} holds {', '.join(x for x in then if x not in now) or then}, "
            f"where this run makes {', '.join(x for x in now if x not in then) or now}. Drop the flags that differ, or "
            "remove that directory to go on with an empty replay.",
        )

    def _read(self, chunks: dict[int, Chunk], keys: np.ndarray, chunk: np.ndarray, row: np.ndarray) -> np.ndarray:
        """Reads the leaves of restored items, given where each is; which of them are good, bool `[N]`."""
        record, read = self._table.record(), np.zeros(len(keys), bool)
        assert record is not None
        self._last = max(self._last, *chunks, 0)
        for number, written in chunks.items():
            here = np.flatnonzero(chunk == number)
            if not len(here):
                continue
            try:
                records = read_chunk(self._directory, number, written, record)
            except DamagedError as error:
                log.warning("%s; %s items of the replay are lost.", error, f"{len(here):,}")
                continue
            self._table.write(keys[here], records[row[here]])
            self._note(keys[here], number, written, row[here])
            read[here] = True
        return read

    def _save(self, buffer: np.ndarray) -> bool:
        for _ in range(_ROUNDS):
            missing = self._missing(self._table.state())
            room = self._make_room(len(missing), buffer)
            if len(missing) <= min(room, len(buffer)):
                break
            self._write(missing[max(len(missing) - room, 0) :], buffer)
            if len(missing) > room:
                self._warn_once(
                    "room",
                    f"snapshots of the replay lack {len(missing) - room:,} of its items: they do not fit into "
                    f"checkpoint.replay_max_bytes ({self._max_bytes:,}). Raise --checkpoint.replay-max-bytes, best to "
                    "twice the bytes of the table, or lower --table.max-size.",
                )
                break
        room = self._room(buffer, self._chunk_bytes)
        with self._table.pause():
            state = self._table.state()
            missing = self._missing(state)
            last = list(self._copies(missing[max(len(missing) - min(room, len(buffer)), 0) :], buffer))
        if state is None:  # closed meanwhile
            return False
        if last:
            self._store(last)
        self._commit(state)
        return True

    def _missing(self, state: TableState | None) -> np.ndarray:
        """Keys of the items that are not written, oldest first."""
        if state is None:
            return np.empty(0, np.uint64)
        order, keys = state.roster.order, state.roster.keys
        return keys[order][self._keys[order] != keys[order]]

    def _write(self, keys: np.ndarray, buffer: np.ndarray) -> None:
        """Writes items, but for those that leave meanwhile."""
        rows = max(1, self._chunk_bytes // buffer.dtype.itemsize)
        for start in range(0, len(keys), rows):
            self._store(self._copies(keys[start : start + rows], buffer))

    def _copies(self, keys: np.ndarray, buffer: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Keys and records of items that are still there, in pieces that share the buffer."""
        for start in range(0, len(keys), len(buffer)):
            piece = keys[start : start + len(buffer)]
            lives = self._table.read(piece, buffer)
            yield piece[lives], buffer[: np.count_nonzero(lives)]

    def _store(self, pieces: Iterable[tuple[np.ndarray, np.ndarray]]) -> None:
        """Writes pieces as a chunk, and notes where the items are."""
        written = []

        def records() -> Iterator[np.ndarray]:
            for keys, piece in pieces:
                written.append(keys)
                yield piece

        self._last += 1
        chunk = write_chunk(self._directory, self._last, records())
        self._note(np.concatenate(written), self._last, chunk, np.arange(chunk.rows))

    def _note(self, keys: np.ndarray, number: int, chunk: Chunk, rows: np.ndarray) -> None:
        slots = slots_of(keys, self._table.capacity)
        self._keys[slots], self._chunk[slots], self._row[slots] = keys, number, rows
        self._chunks[number] = chunk

    def _commit(self, state: TableState) -> None:
        """Makes a state the snapshot; then the chunks go that it has no items in."""
        roster = state.roster
        chunk = self._chunks_of(roster)
        self._chunks = {number: self._chunks[number] for number in np.unique(chunk[chunk >= 0]).tolist()}
        values = {"leaves": leaves_of(self._example), "chunks": self._chunks, "table": state[1:], "rng": roster.rng}
        arrays = {name: getattr(roster, name) for name in _ARRAYS}
        write_index(self._directory, values, {**arrays, "chunk": chunk, "row": self._row[roster.order]})
        remove_chunks(self._directory, keep=self._chunks)

    def _chunks_of(self, roster: RosterState) -> np.ndarray:
        """The number of each item's chunk, int64 `[N]`; -1 where it is not written."""
        written = self._keys[roster.order] == roster.keys[roster.order]
        return np.where(written, self._chunk[roster.order], -1)

    def _room(self, buffer: np.ndarray, reserve: int) -> int:
        """How many items still fit on disk beside so many bytes."""
        free = self._max_bytes - reserve - sum(chunk_sizes(self._directory).values())
        return max(free, 0) // buffer.dtype.itemsize

    def _make_room(self, wanted: int, buffer: np.ndarray) -> int:
        """Tries to make room for so many items; returns for how many there is.

        First the chunks go that no item is in any more; then items of those chunks that have few are written anew. For
        these a chunk's room is kept free, without which no room could be made.
        """
        moving = np.empty(0, np.uint64)
        while (room := self._room(buffer, self._chunk_bytes)) < wanted:
            self._write(moving, buffer)
            state = self._table.state()
            if state is None:
                return 0
            self._commit(state)
            room = self._room(buffer, self._chunk_bytes)
            moving = self._worth_moving(state.roster, wanted - room, self._room(buffer, 0))
            if not len(moving):
                return room
        return room

    def _worth_moving(self, roster: RosterState, wanted: int, room: int) -> np.ndarray:
        """Keys of the items, at most `room`, whose chunks also hold `wanted` that left, or as many as there are."""
        chunk = self._chunks_of(roster)
        numbers, held = np.unique(chunk[chunk >= 0], return_counts=True)
        rows = np.array([self._chunks[number].rows for number in numbers.tolist()], np.int64)
        order = np.argsort(held / rows)
        gained = np.cumsum((rows - held)[order])
        useful = (rows > held)[order] & (gained - (rows - held)[order] < wanted) & (np.cumsum(held[order]) <= room)
        return roster.keys[roster.order][np.isin(chunk, numbers[order][useful])]

    def _warn_once(self, kind: str, message: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            log.warning(message)


def _state(values: dict[str, Any], arrays: dict[str, np.ndarray]) -> TableState:
    limits, *counters = values["table"]
    roster = RosterState(*(arrays[name] for name in _ARRAYS), rng=values["rng"])
    return TableState(roster, Limits(*limits), *counters)

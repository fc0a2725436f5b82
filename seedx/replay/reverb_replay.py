"""A replay kept by one or several Reverb servers (2102.04736), which need neither this process nor its environment.

Differences to the embedded tables: delivery is at least once, so after a server was lost some items of a queue may come
twice or, with what the server had not written to its checkpoint, not at all; `info` counts both. An insert that timed
out may be let in later: call again with the same arrays to go on waiting for it.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from seedx.replay.items import number_of
from seedx.replay.priorities import checked
from seedx.replay.replay import ReplayGoneError, ReplayTimeoutError, Sample
from seedx.replay.reverb_checkpoints import Checkpoints
from seedx.replay.reverb_client import ReverbClient, ReverbLostError
from seedx.replay.reverb_codec import ReverbDataError
from seedx.replay.reverb_decoder import Received, decode
from seedx.replay.reverb_encoder import Encoder
from seedx.replay.reverb_layout import Layout, check_layout, layout_of, split
from seedx.replay.reverb_probation import Probation
from seedx.replay.reverb_sampler import Samples
from seedx.replay.reverb_tables import REMEDY, Tables
from seedx.replay.reverb_writer import Insertion, Item, Writer
from seedx.reverb_address import parse_address
from seedx.types import Tree

_MAX_TIMED_OUT = 8
_PRIORITIES_S = 3.0  # a signal gives the learner 8 s to come to its last checkpoint


class _Insert(NamedTuple):
    """An insert, which can be resumed when it timed out."""

    leaves: list[np.ndarray]
    keys: np.ndarray
    to_send: Iterator[tuple[int, Item]]  # the rest, with the number of the server of each
    insertions: list[Insertion]  # one for each server


class ReverbReplay:
    """A table of the same name on every server; inserts are spread over the servers, samples of all are merged.

    Each server gives an equal share of the samples, whose probabilities and table sizes are those of all servers' items
    together. A table's max_size, min_size and rate limiter hold on each server for itself.

    Args:
        address: reverb://host:port, or several host:port with commas between.
        table: Its name.
        overlap: Rows that an item has in common with the next one of its source; 0: none. They are sent once.
        max_sources: Sources whose last rows are remembered for that, here and by the servers; with more, those that
            were silent for longest send theirs again.
        prefetch: Whether samples are fetched ahead, as many as the last call took.
        example: Items `[N, ...]` like those in the table, for a process that samples before it inserts. What the table
            holds is then compared with it at once, by an item that the first sample gives.
        give_up_s: How long a lost server is waited for.
        connect_s: How long the servers are waited for now; None: as long.

    Raises:
        ValueError: no such address or table, or its signature admits no items like the example.
        ReverbDataError: the table holds items unlike the example; they are all still there.
        ReverbLostError: no server was there in time.
    """

    def __init__(
        self,
        address: str,
        table: str,
        *,
        overlap: int = 0,
        max_sources: int = 1024,
        prefetch: bool = True,
        example: Tree = None,
        give_up_s: float = 120.0,
        connect_s: float | None = None,
    ) -> None:
        self._name = table
        self._overlap = overlap
        self._prefetch = prefetch
        self._layout = None if example is None else layout_of(example)
        self._clients = [ReverbClient(host, give_up_s) for host in parse_address(address)]
        self._closed = False
        try:
            self._tables = Tables(self._clients, table, give_up_s if connect_s is None else connect_s)
            found: list[Received | None] = [None] * len(self._clients)
            if self._layout is not None:
                self._tables.check_signatures(self._layout)
                found = self._tables.check_items(self._layout)
        except BaseException:
            self._close_clients()
            raise
        self._encoder = Encoder(table, overlap, max_sources)
        state_ids = self._tables.state_ids
        self._writers = [
            Writer(client, state_id, max_sources) for client, state_id in zip(self._clients, state_ids, strict=True)
        ]
        self._samples = Samples(self._clients, state_ids, table, self._tables.is_queue, self._was_resent)
        self._samples.give(found)
        unseen = [bool(n) and sample is None for n, sample in zip(self.held.values(), found, strict=True)]
        self._probation = Probation(self._clients, table, example is not None and any(unseen))
        self._checkpoints = Checkpoints(self._clients, self._writers, self._samples)
        self._turn = itertools.count()  # which server gets the next item that has no source
        self._lock = threading.Lock()  # guards `_layout` and `_timed_out`
        self._timed_out: deque[_Insert] = deque(maxlen=_MAX_TIMED_OUT)

    def insert(
        self, items: Tree, priorities: np.ndarray, timeout_s: float, sources: np.ndarray | None = None
    ) -> np.ndarray:
        """Adds N items and waits until all are in the table; see `Replay.insert`.

        Raises:
            ReplayTimeoutError: not all are there within the timeout; insert the same arrays again. It is a
                ReplayGoneError while a server does not answer.
            ReverbLostError: a server has been gone for too long.
            ValueError: a priority is negative or not finite, or items are unlike those before, or the signature;
                nothing was sent.
        """
        deadline = time.monotonic() + timeout_s
        insert = self._resume(jax.tree.leaves(items)) or self._start(items, priorities, sources)
        if not self._send(insert, deadline):
            with self._lock:
                self._timed_out.append(insert)
            raise self._timeout_error(f"{len(insert.keys)} items were not all let in within {timeout_s} s")
        return insert.keys

    def sample(self, batch_size: int, timeout_s: float) -> Sample:
        """Samples items; see `Replay.sample`.

        Raises:
            ReplayTimeoutError: there were not so many within the timeout; those that came are kept for the next call.
                It is a ReplayGoneError while a server does not answer.
            ReverbLostError: a server has been gone for too long.
            ReverbDataError: an item is damaged, or not like those that are inserted here.
        """
        received = self._samples.take(batch_size, timeout_s, self._prefetch and not self._closed)
        if received is None:
            raise self._timeout_error(f"no {batch_size} items within {timeout_s} s")
        if self._layout is None:
            raise ValueError("what the items look like is not known before the first insert; give an `example`.")
        try:
            items = decode(received, self._layout, self._name)
        except ReverbDataError as error:
            servers = ", ".join(client.address for client in self._clients)
            undone = " What this run had added was deleted." if self._probation.undo() else ""
            raise ReverbDataError(
                f"{error} If the table at {servers} holds items of another run or settings, {REMEDY}{undone}"
            ) from None
        infos = [sample.info for sample in received]
        self._probation.sampled(info.item.key for info in infos)
        return Sample(
            items,
            np.array([info.item.key for info in infos], np.uint64),
            np.array([info.probability for info in infos], np.float64),
            np.array([info.item.times_sampled for info in infos], np.int32),
            np.array([info.table_size for info in infos], np.int64),
        )

    def update_priorities(self, keys: np.ndarray, priorities: np.ndarray) -> None:
        """Changes priorities; see `Replay.update_priorities`. Every server is told, and knows its own keys.

        One that stays away for a few seconds is passed over: it comes back with the priorities of its checkpoint, and
        whoever learns has to see the end of its run meanwhile.

        Raises:
            ReverbLostError: a server has been gone for too long.
        """
        updates = dict(zip(keys.tolist(), checked(priorities, len(keys)).tolist(), strict=True))
        for client in self._clients:
            try:
                client.mutate_priorities(self._name, updates, [], min(_PRIORITIES_S, client.give_up_in_s))
            except ReverbLostError:
                if not client.give_up_in_s:
                    raise

    def delete(self, keys: np.ndarray) -> None:
        """Removes items; keys that are not there are passed over."""
        for client in self._clients:
            client.mutate_priorities(self._name, {}, keys.tolist())

    def reset(self) -> None:
        """Removes every item and sets the rate limiters' counters to 0."""
        for client in self._clients:
            client.reset(self._name)
        self._samples.clear()

    def checkpoint(self) -> list[str]:
        """Has every server write a checkpoint of all its tables; their directories, on the servers' machines.

        Raises what `Checkpoints.take` raises.
        """
        return self._checkpoints.take()

    def try_checkpoint(self) -> None:
        """As `checkpoint`, but a failure is only said, once, and counted."""
        self._checkpoints.try_take()

    def info(self) -> dict[str, float]:
        """See `Tables.info`; also what came twice, and what may have got lost."""
        return {
            **self._tables.info(),
            "replay/duplicates": self._samples.duplicates,
            "replay/restored": self._samples.restored,
            "replay/lost_upper_bound": self._samples.lost_upper_bound
            + sum(writer.lost_upper_bound for writer in self._writers),
            "replay/failed_checkpoints": self._checkpoints.failed,
        }

    @property
    def held(self) -> Mapping[str, int]:
        """Items that each server's table held already when this was made, by address."""
        return self._tables.held

    def differences(self, wanted: Mapping[str, Any]) -> list[str]:
        """What the servers' tables have otherwise than a description, see `table_description`; a line for each."""
        return self._tables.differences(wanted)

    def close(self) -> None:
        """Ends the streams within seconds; calls that wait end with ReplayTimeoutError."""
        self._closed = True
        self._samples.close()
        for writer in self._writers:
            writer.close()
        self._close_clients()

    # ---- inserting

    def _start(self, items: Tree, priorities: np.ndarray, sources: np.ndarray | None) -> _Insert:
        layout = self._check_layout(items)
        # A negative one would end its table's thread for good.
        values = checked(priorities, number_of(items)).tolist()
        keys = self._encoder.keys(len(values))
        self._probation.inserting(keys)
        names = [None] * len(values) if sources is None else sources.tolist()
        to_send = self._encode(layout, items, keys, values, names)
        return _Insert(jax.tree.leaves(items), np.array(keys, np.uint64), to_send, [Insertion() for _ in self._writers])

    def _encode(
        self, layout: Layout, items: Tree, keys: list[int], priorities: list[float], sources: list[Any]
    ) -> Iterator[tuple[int, Item]]:
        """Items, and which server gets each: one of the same source always the same, those without one in turn."""
        for parts, key, priority, source in zip(split(items, layout), keys, priorities, sources, strict=True):
            server = (next(self._turn) if source is None else source) % len(self._writers)
            yield server, self._encoder.encode(layout, parts, key, priority, source)

    def _send(self, insert: _Insert, deadline: float) -> bool:
        """Sends what is not sent yet and waits for the servers; whether all is in the table before the deadline."""
        while all(writer.wait_for_room(deadline - time.monotonic()) for writer in self._writers):
            server, item = next(insert.to_send, (0, None))
            if item is None:
                break
            self._writers[server].put(item, insert.insertions[server])
        else:
            return False
        return all(
            writer.wait(insertion, deadline - time.monotonic())
            for writer, insertion in zip(self._writers, insert.insertions, strict=True)
        )

    def _resume(self, leaves: list[np.ndarray]) -> _Insert | None:
        """The insert of the very same arrays that timed out before."""
        with self._lock:
            for insert in self._timed_out:
                same = len(insert.leaves) == len(leaves)
                if same and all(a is b for a, b in zip(insert.leaves, leaves, strict=True)):
                    self._timed_out.remove(insert)
                    return insert
        return None

    def _check_layout(self, items: Tree) -> Layout:
        layout = layout_of(items)
        with self._lock:
            if self._layout is None:
                if layout.rows and not 0 <= self._overlap < layout.rows:
                    raise ValueError(f"overlap ({self._overlap}) must be less than an item's {layout.rows} rows.")
                self._tables.check_signatures(layout)
                self._layout = layout
            check_layout(layout, self._layout)
        return layout

    def _timeout_error(self, what: str) -> ReplayTimeoutError:
        """The error of a call that took too long. Raises ReverbLostError if a server has been gone for too long."""
        try:
            state = self._tables.describe()
        except Exception:
            if not self._closed:
                raise
            state = "the replay is closed"
        gone = any(client.gone_s for client in self._clients)
        return (ReplayGoneError if gone else ReplayTimeoutError)(f"{what}: {state}.")

    def _was_resent(self, key: int) -> bool:
        return any(writer.was_resent(key) for writer in self._writers)

    def _close_clients(self) -> None:
        for client in self._clients:
            client.close()

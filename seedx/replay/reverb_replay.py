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
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from seedx.replay import reverb_pb2 as pb
from seedx.replay.replay import ReplayTimeoutError, Sample
from seedx.replay.reverb_client import ReverbClient, describe_table, find_table
from seedx.replay.reverb_codec import Layout, check_layout, layout_of
from seedx.replay.reverb_encoder import Encoder
from seedx.replay.reverb_sampler import Samples, decode
from seedx.replay.reverb_writer import Insertion, Item, Writer
from seedx.types import Tree

SCHEME = "reverb://"
_MAX_TIMED_OUT = 8
_INFO_S = 1.0


class _Insert(NamedTuple):
    """An insert, which can be resumed when it timed out."""

    leaves: list[np.ndarray]
    keys: np.ndarray
    to_send: Iterator[tuple[int, Item]]  # the rest, with the number of the server of each
    insertions: list[Insertion]  # one for each server


class ReverbReplay:
    """A table of the same name on every server; inserts are spread over the servers, samples of all are merged.

    Args:
        address: reverb://host:port, or several host:port with commas between.
        table: Its name.
        overlap: Rows that an item has in common with the next one of its source; 0: none. They are sent once.
        prefetch: Whether samples are fetched ahead, as many as the last call took.
        example: Items `[N, ...]` like those in the table, for a process that samples before it inserts.
        give_up_s: How long a lost server is waited for.

    Raises:
        ValueError: no such address or table.
        ReverbLostError: no server was there within `give_up_s`.
    """

    def __init__(
        self,
        address: str,
        table: str,
        *,
        overlap: int = 0,
        prefetch: bool = True,
        example: Tree = None,
        give_up_s: float = 120.0,
    ) -> None:
        self._table = table
        self._overlap = overlap
        self._prefetch = prefetch
        self._layout = None if example is None else layout_of(example)
        self._clients = [ReverbClient(host, give_up_s) for host in parse_address(address)]
        self._closed = False
        try:
            infos = [client.server_info() for client in self._clients]
            tables = [find_table(i, table, c.address) for i, c in zip(infos, self._clients, strict=True)]
        except BaseException:
            self._close_clients()
            raise
        self._encoder = Encoder(table, overlap)
        self._writers = [
            Writer(client, info.tables_state_id) for client, info in zip(self._clients, infos, strict=True)
        ]
        self._samples = Samples(self._clients, table, once=all(info.max_times_sampled == 1 for info in tables))
        self._turn = itertools.count()  # which server gets the next item that has no source
        self._lock = threading.Lock()  # guards `_layout` and `_timed_out`
        self._timed_out: deque[_Insert] = deque(maxlen=_MAX_TIMED_OUT)
        self._last_tables = tables

    def insert(
        self, items: Tree, priorities: np.ndarray, timeout_s: float, sources: np.ndarray | None = None
    ) -> np.ndarray:
        """Adds N items and waits until all are in the table; see `Replay.insert`.

        Raises:
            ReplayTimeoutError: not all are there within the timeout; insert the same arrays again.
            ReverbLostError: a server has been gone for too long.
            ValueError: a priority is negative or not finite, or items are not like those before; nothing was sent.
        """
        deadline = time.monotonic() + timeout_s
        insert = self._resume(jax.tree.leaves(items)) or self._start(items, priorities, sources)
        if not self._send(insert, deadline):
            with self._lock:
                self._timed_out.append(insert)
            raise ReplayTimeoutError(
                f"{len(insert.keys)} items were not all let in within {timeout_s} s: {self._describe()}."
            )
        return insert.keys

    def sample(self, batch_size: int, timeout_s: float) -> Sample:
        """Samples items; see `Replay.sample`.

        Raises:
            ReplayTimeoutError: there were not so many within the timeout; those that came are kept for the next call.
            ReverbLostError: a server has been gone for too long.
            ReverbDataError: an item is damaged, or not like those inserted.
        """
        received = self._samples.take(batch_size, timeout_s, self._prefetch and not self._closed)
        if received is None:
            raise ReplayTimeoutError(f"no {batch_size} items within {timeout_s} s: {self._describe()}.")
        if self._layout is None:
            raise ValueError("what the items look like is not known before the first insert; give an `example`.")
        leaves = decode(received, self._layout, self._table)
        infos = [sample.info for sample in received]
        return Sample(
            jax.tree.unflatten(self._layout.structure, leaves),
            np.array([info.item.key for info in infos], np.uint64),
            np.array([info.probability for info in infos], np.float64),
            np.array([info.item.times_sampled for info in infos], np.int32),
            np.array([info.table_size for info in infos], np.int64),
        )

    def update_priorities(self, keys: np.ndarray, priorities: np.ndarray) -> None:
        """Changes priorities; see `Replay.update_priorities`. Every server is told, and knows its own keys."""
        values = _checked(priorities, len(keys))
        for client in self._clients:
            client.mutate_priorities(self._table, dict(zip(keys.tolist(), values, strict=True)), [])

    def delete(self, keys: np.ndarray) -> None:
        """Removes items; keys that are not there are passed over."""
        for client in self._clients:
            client.mutate_priorities(self._table, {}, keys.tolist())

    def reset(self) -> None:
        """Removes every item and sets the rate limiters' counters to 0."""
        for client in self._clients:
            client.reset(self._table)
        self._samples.clear()

    def checkpoint(self) -> list[str]:
        """Has every server write a checkpoint of all its tables; their directories, on the servers' machines."""
        paths = []
        for client, writer in zip(self._clients, self._writers, strict=True):
            before = writer.since_checkpoint
            paths.append(client.checkpoint())
            writer.checkpointed(before)
        return paths

    def info(self) -> dict[str, float]:
        """Items held, and inserted and sampled since the last reset; what came twice, and what may have got lost.

        The servers' own counts; of one that does not answer, the last that it gave.
        """
        for i, table in enumerate(self._ask_tables()):
            self._last_tables[i] = self._last_tables[i] if table is None else table
        limiters = [table.rate_limiter_info for table in self._last_tables]
        lost = self._samples.lost_upper_bound + sum(writer.lost_upper_bound for writer in self._writers)
        inserted = sum(limiter.insert_stats.completed for limiter in limiters)
        sampled = sum(limiter.sample_stats.completed for limiter in limiters)
        return {
            "replay/items": sum(table.current_size for table in self._last_tables),
            "replay/inserted": inserted,
            "replay/sampled": sampled,
            "replay/samples_per_insert": sampled / max(inserted, 1),
            "replay/duplicates": self._samples.duplicates,
            "replay/lost_upper_bound": lost,
        }

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
        leaves = jax.tree.leaves(items)
        values = _checked(priorities, len(leaves[0]))
        keys = self._encoder.keys(len(values))
        names = [None] * len(values) if sources is None else sources.tolist()
        to_send = self._encode(layout, [np.asarray(leaf) for leaf in leaves], keys, values, names)
        return _Insert(leaves, np.array(keys, np.uint64), to_send, [Insertion() for _ in self._writers])

    def _encode(
        self, layout: Layout, leaves: list[np.ndarray], keys: list[int], priorities: list[float], sources: list[Any]
    ) -> Iterator[tuple[int, Item]]:
        """Items, and which server gets each: one of the same source always the same, those without one in turn."""
        for n, (key, priority, source) in enumerate(zip(keys, priorities, sources, strict=True)):
            server = (next(self._turn) if source is None else source) % len(self._writers)
            yield server, self._encoder.encode(layout, leaves, n, key, priority, source)

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
                self._layout = layout
            check_layout(layout, self._layout)
        return layout

    # ---- the servers

    def _ask_tables(self) -> list[pb.TableInfo | None]:
        infos = [client.ask_server_info(_INFO_S) for client in self._clients]
        return [
            None if info is None else find_table(info, self._table, client.address)
            for info, client in zip(infos, self._clients, strict=True)
        ]

    def _describe(self) -> str:
        if self._closed:
            return "the replay is closed"
        return "; ".join(
            f"at {client.address}, " + (describe_table(table) if table else "the server does not answer")
            for client, table in zip(self._clients, self._ask_tables(), strict=True)
        )

    def _close_clients(self) -> None:
        for client in self._clients:
            client.close()


def parse_address(address: str) -> list[str]:
    """The servers of `reverb://host:port,host:port`.

    Raises:
        ValueError: it is not of this form.
    """
    hosts = address.removeprefix(SCHEME).split(",")
    if not address.startswith(SCHEME) or not all(host.rpartition(":")[2].isdigit() for host in hosts):
        raise ValueError(f"{address!r} must be {SCHEME}host:port, or {SCHEME}host:port,host:port,... of several.")
    return hosts


def _checked(priorities: np.ndarray, count: int) -> list[float]:
    """Priorities that a server can live with: a negative one ends its table's thread for good."""
    values = np.asarray(priorities, np.float64)
    if values.shape != (count,):
        raise ValueError(f"priorities have shape {values.shape}; {count} items need ({count},).")
    wrong = ~(np.isfinite(values) & (values >= 0))
    if wrong.any():
        raise ValueError(f"priority {values[wrong][0]} of item {np.flatnonzero(wrong)[0]} must be finite and >= 0.")
    return values.tolist()

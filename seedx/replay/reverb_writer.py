"""Inserts into one table of one Reverb server, over a stream that outlives the server.

Threading: any thread may insert. gRPC's thread takes requests from `_requests`; a thread of ours reads what the server
acknowledges and opens the stream again when it broke. Invariants: at most `MAX_UNACKED` items, and one for each further
thread, are not acknowledged; after a break they are sent again, in order and with the same keys, so that the table
holds each once.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import grpc

from seedx.replay import reverb_pb2 as pb
from seedx.replay.reverb_client import ReverbClient, is_lost
from seedx.replay.reverb_codec import Chunk

MAX_UNACKED = 25  # as Reverb's own writers; also a bound on what may be sampled twice after a break
_MAX_RESENT = 2**16  # keys; those of a server that was lost thousands of times are forgotten
_UNSENT_BYTES = 2**20  # more than that is encoded only when it is sent
_CLOSE_S = 2.0
_PAUSE_S = 0.1
_IDLE_S = 1.0
_SILENCE_S = 5.0  # without an acknowledgement, after which the server is asked whether it is there; it has as long


class Item(NamedTuple):
    """An item on its way."""

    key: int
    request: bytes  # an InsertStreamRequest that holds it
    chunks: tuple[Chunk, ...]  # that it refers to
    source: int | None = None
    tail: tuple[Chunk, ...] = ()  # those of its chunks that the next item of its source refers to

    @property
    def size(self) -> int:
        """Bytes of its chunks."""
        return sum(len(piece) for chunk in self.chunks for piece in chunk.pieces)


class Kept(NamedTuple):
    """Chunks that the server keeps for the next item of a source."""

    keys: tuple[int, ...]
    request: bytes  # an InsertStreamRequest that names them


class Progress(NamedTuple):
    """How many items were inserted into a server's tables since their last checkpoint."""

    state_id: pb.Uint128
    inserted: int


@dataclass
class Insertion:
    """Items that are inserted together; of those put so far, how many are left to be acknowledged."""

    left: int = 0


def remember(tails: OrderedDict[int, Any], source: int, tail: Any, max_sources: int) -> None:
    """Puts a source's tail in the place of the one before; the source that was silent for longest may be forgotten."""
    tails[source] = tail
    tails.move_to_end(source)
    if len(tails) > max_sources:
        tails.popitem(last=False)


class Writer:
    """Sends items and learns which of them are in the table.

    Args:
        client: The server.
        state_id: Of the server's tables; another one says that it was started again.
        max_sources: Sources whose last rows are kept, here and by the server.

    Attributes:
        lost_upper_bound: Items that may have got lost with the server, which loads its last checkpoint.
    """

    def __init__(self, client: ReverbClient, state_id: pb.Uint128, max_sources: int) -> None:
        self._client = client
        self._state_id = state_id
        self._max_sources = max_sources
        self._unsent: list[tuple[Item, Insertion]] = []
        self._unsent_bytes = 0
        self._unacked: dict[int, tuple[Item, Insertion]] = {}
        self._resent: set[int] = set()  # keys that were sent again and have not been sampled twice
        self._kept: OrderedDict[int, Kept] = OrderedDict()  # of sources, by the server for this stream
        self._call: Any = None  # the stream
        self._heard_at = 0.0  # an acknowledgement, an answer or the beginning of a stream
        self._stream = 0  # which one; the requests of those before end
        self._since_checkpoint = 0
        self._changed = threading.Condition()
        self._closed = False
        self._failure: Exception | None = None
        self.lost_upper_bound = 0
        self._threads = [
            threading.Thread(target=target, name=f"reverb-writer-{client.address}", daemon=True)
            for target in (self._run, self._watch)
        ]
        for thread in self._threads:
            thread.start()

    def wait_for_room(self, timeout_s: float) -> bool:
        """Waits until another item may be put; whether that was so within the timeout. Raises what `wait` raises."""
        with self._changed:
            self._changed.wait_for(lambda: self._has_room() or self._is_over(), timeout_s)
            self._raise_failure()
            return self._has_room() and not self._closed

    def put(self, item: Item, insertion: Insertion) -> None:
        """Sends an item, after `wait_for_room`."""
        with self._changed:
            insertion.left += 1
            self._unsent.append((item, insertion))
            self._unsent_bytes += item.size
            self._changed.notify_all()

    def wait(self, insertion: Insertion, timeout_s: float) -> bool:
        """Waits until all of an insertion is in the table; whether that was so within the timeout.

        Raises:
            ReverbLostError: the server has been gone for too long.
            grpc.RpcError: the server refused.
        """
        with self._changed:
            self._changed.wait_for(lambda: not insertion.left or self._is_over(), timeout_s)
            if insertion.left:
                self._raise_failure()
            return not insertion.left

    def was_resent(self, key: int) -> bool:
        """Whether an item that was sampled twice may have been so because it was sent again; once for each key."""
        with self._changed:
            found = key in self._resent
            self._resent.discard(key)
            return found

    def progress(self) -> Progress:
        """What a checkpoint that is begun now will hold, if the server lives to write it."""
        with self._changed:
            return Progress(self._state_id, self._since_checkpoint)

    def checkpointed(self, before: Progress) -> None:
        """A checkpoint holds what had been inserted before it, as long as the tables are still those of then."""
        with self._changed:
            if self._state_id == before.state_id:
                self._since_checkpoint -= before.inserted

    def close(self) -> None:
        """Waits a little for what is on its way and ends the stream; calls that wait end."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        deadline = time.monotonic() + _CLOSE_S
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    # ---- the stream

    def _run(self) -> None:
        try:
            while not self._closed:
                self._use_stream()
        except Exception as error:
            with self._changed:
                self._failure = error
                self._changed.notify_all()

    def _use_stream(self) -> None:
        """Opens a stream and uses it until it breaks or is closed."""
        with self._changed:
            self._kept.clear()
            if len(self._resent) > _MAX_RESENT:
                self._resent.clear()
            self._resent.update(self._unacked)
            self._unsent = [*self._unacked.values(), *self._unsent]
            self._unacked.clear()
            self._heard_at = time.monotonic()
            self._call = self._client.insert_stream(self._requests(self._stream))
        try:
            for response in self._call:
                self._acknowledge(response.keys)
        except grpc.RpcError as error:
            if not is_lost(error):
                raise
        finally:
            with self._changed:
                self._stream += 1  # ends the requests
                self._changed.notify_all()
        if not self._closed:
            self._reconnect()

    def _reconnect(self) -> None:
        state_id = self._client.server_info().tables_state_id
        with self._changed:
            if state_id != self._state_id:
                self._state_id = state_id
                self.lost_upper_bound += self._since_checkpoint
                self._since_checkpoint = 0
            self._changed.wait_for(lambda: self._closed, _PAUSE_S)

    def _watch(self) -> None:
        """Breaks the stream of a server that vanished without a word: nothing else on it has a deadline."""
        while True:
            with self._changed:
                if self._changed.wait_for(self._is_over, _IDLE_S):
                    return
                call, heard_at = self._call, self._heard_at
                if not self._unacked or time.monotonic() - heard_at < _SILENCE_S:
                    continue
            if self._client.ask_server_info(_SILENCE_S) is None:
                call.cancel()
            with self._changed:
                self._heard_at = time.monotonic()

    def _acknowledge(self, keys: Sequence[int]) -> None:
        self._client.heard()
        with self._changed:
            self._heard_at = time.monotonic()
            for key in keys:
                if key in self._unacked:
                    _, insertion = self._unacked.pop(key)
                    insertion.left -= 1
                    self._since_checkpoint += 1
            self._changed.notify_all()

    def _requests(self, stream: int) -> Iterator[bytes]:
        """Requests of one stream; ends it only when everything is acknowledged, or else acknowledgements get lost."""
        while True:
            with self._changed:
                while not self._changed.wait_for(
                    lambda: stream != self._stream or self._unsent or self._is_done(), _IDLE_S
                ):
                    continue  # nothing to send
                if stream != self._stream or not self._unsent:
                    return
                request = self._next_request()
            yield request

    def _has_room(self) -> bool:
        return len(self._unsent) + len(self._unacked) < MAX_UNACKED and self._unsent_bytes < _UNSENT_BYTES

    def _is_over(self) -> bool:
        return self._closed or self._failure is not None

    def _raise_failure(self) -> None:
        if self._failure is not None and not self._closed:  # closing lets calls fail that wait for a lost server
            raise self._failure

    def _is_done(self) -> bool:
        return self._closed and not self._unacked

    def _next_request(self) -> bytes:
        """Items with those of their chunks that the server does not hold; it drops all that are not named as kept.

        It must be told all of these in each request with items, so what names them is made once, for each source.
        """
        pieces: list[bytes] = []
        for item, insertion in self._unsent:
            self._unacked[item.key] = item, insertion
            kept = self._kept.get(item.source) if item.source is not None else None
            for chunk in item.chunks:
                if kept is None or chunk.key not in kept.keys:
                    pieces += chunk.pieces
            pieces.append(item.request)
            if item.source is not None:
                keys = tuple(chunk.key for chunk in item.tail)
                names = pb.InsertStreamRequest(keep_chunk_keys=keys).SerializeToString()
                remember(self._kept, item.source, Kept(keys, names), self._max_sources)
        self._unsent.clear()
        self._unsent_bytes = 0
        pieces += (kept.request for kept in self._kept.values())
        return b"".join(pieces)

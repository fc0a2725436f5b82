"""Samples from one table, which may be spread over several Reverb servers.

Threading: a thread for each server asks for samples over a stream; one thread at a time takes them. Invariants: no more
is asked for than is wanted and not here; a request is never cancelled, since the server would go on serving it and the
next item of a queue would be lost; so each has a short rate limiter timeout, and closing waits for it.
"""

from __future__ import annotations

import itertools
import math
import queue
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import grpc
import numpy as np

from seedx.replay import reverb_pb2 as pb
from seedx.replay.reverb_client import ReverbClient, is_lost
from seedx.replay.reverb_codec import Layout, ReverbDataError, read_item

_LIMITER_S = 1.0  # a request waits so long for the rate limiter, then comes another
_STREAM_S = 30.0  # age at which a stream is replaced
_STALL_S = 30.0  # a server that is silent for so long during a request is gone
_PAUSE_S = 0.1  # before a broken stream is opened again
_WINDOW = 16_384  # keys of a queue that are remembered


class Received(NamedTuple):
    """A sample as it came."""

    info: pb.SampleInfo
    chunks: dict[int, pb.ChunkData]


@dataclass
class _Server:
    client: ReverbClient
    asked: int = 0  # samples
    here: int = 0  # of those received, how many are not taken
    dry: bool = False  # the rate limiter's timeout ended the last request


class Samples:
    """Samples on their way.

    Args:
        clients: The servers.
        table: The table's name, the same on all.
        once: Whether it is a queue, whose items must be sampled once: what comes again after a break is passed over.

    Attributes:
        duplicates: Samples passed over.
        lost_upper_bound: Samples that were asked for when a server was lost, and may have been taken from a queue.
    """

    def __init__(self, clients: Sequence[ReverbClient], table: str, once: bool) -> None:
        self._table = table
        self._once = once
        self._servers = [_Server(client) for client in clients]
        self._wanted = 0
        self._until = 0.0  # when what is wanted is no longer
        self._here: deque[tuple[Received, _Server]] = deque()
        self._seen: OrderedDict[int, None] = OrderedDict()
        self._taking = threading.Lock()
        self._changed = threading.Condition()
        self._closed = False
        self._failure: Exception | None = None
        self.duplicates = 0
        self.lost_upper_bound = 0
        self._threads = [
            threading.Thread(
                target=self._run, args=(server,), name=f"reverb-sampler-{server.client.address}", daemon=True
            )
            for server in self._servers
        ]
        for thread in self._threads:
            thread.start()

    def take(self, count: int, timeout_s: float, prefetch: bool) -> list[Received] | None:
        """Takes samples, all or none; None if there are not so many within the timeout.

        Args:
            count: How many.
            timeout_s: How long to wait.
            prefetch: Whether to go on asking for as many afterwards.

        Raises:
            ReverbLostError: a server has been gone for too long.
            grpc.RpcError: a server refused.
        """
        deadline = time.monotonic() + timeout_s
        if not self._taking.acquire(timeout=timeout_s):
            return None
        try:
            with self._changed:
                self._wanted, self._until = count, math.inf if prefetch else deadline
                self._changed.notify_all()
                self._changed.wait_for(
                    lambda: len(self._here) >= count or self._closed or self._failure is not None,
                    deadline - time.monotonic(),
                )
                self._wanted = count if prefetch else 0
                if self._failure is not None:
                    raise self._failure
                if len(self._here) < count or self._closed:
                    return None
                self._changed.notify_all()
                return [self._pop() for _ in range(count)]
        finally:
            self._taking.release()

    def clear(self) -> None:
        """Forgets what was received and not taken."""
        with self._changed:
            while self._here:
                self._pop()
            self._changed.notify_all()

    def close(self) -> None:
        """Waits for the requests that the servers hold; calls that wait end."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        deadline = time.monotonic() + 2 * _LIMITER_S
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    # ---- streams

    def _run(self, server: _Server) -> None:
        try:
            while not self._closed:
                self._use_stream(server)
        except Exception as error:
            with self._changed:
                self._failure = error
                self._changed.notify_all()

    def _use_stream(self, server: _Server) -> None:
        """Asks over one stream until it is old, the rate limiter's timeout ended it, or it broke."""
        requests: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        replaced_at = time.monotonic() + _STREAM_S
        call = server.client.sample_stream(iter(requests.get, None), timeout=_STREAM_S + _STALL_S)
        samples = complete_samples(call)
        left = 0  # of the current request
        try:
            while request := self._next_request(server, replaced_at):
                left = request.num_samples
                requests.put(request.SerializeToString())
                for sample in itertools.islice(samples, left):
                    left -= 1
                    self._receive(server, sample)
                if left:  # a server that stops may end its streams in good order
                    self._lose(server.client, left)
                    return
        except grpc.RpcError as error:
            server.dry = "Rate Limiter" in (error.details() or "")
            if server.dry:
                return
            if not is_lost(error):
                raise
            self._lose(server.client, left)
        finally:
            requests.put(None)
            with self._changed:
                server.asked -= left
                self._changed.notify_all()

    def _next_request(self, server: _Server, replaced_at: float) -> pb.SampleStreamRequest | None:
        """Waits until more is wanted of a server than it was asked for. None: the stream ends here."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._missing(server) > 0, replaced_at - time.monotonic())
            count = self._missing(server)
            now = time.monotonic()
            if self._closed or count <= 0 or now >= replaced_at:
                return None
            server.asked += count
        limiter_s = min(_LIMITER_S, self._until - now)
        timeout = pb.SampleStreamRequest.Timeout(milliseconds=max(1, int(1000 * limiter_s)))
        return pb.SampleStreamRequest(table=self._table, num_samples=count, rate_limiter_timeout=timeout)

    def _missing(self, server: _Server) -> int:
        """What a server is to be asked for: its share, so that all items count alike, or more where another is dry."""
        wanted = self._wanted if time.monotonic() < self._until else 0
        missing = wanted - len(self._here) - sum(each.asked for each in self._servers)
        share = math.ceil(wanted / len(self._servers))
        others_dry = any(each.dry for each in self._servers if each is not server)
        return min(missing, share if others_dry else share - server.asked - server.here)

    def _pop(self) -> Received:
        sample, server = self._here.popleft()
        server.here -= 1
        return sample

    def _receive(self, server: _Server, sample: Received) -> None:
        with self._changed:
            server.asked -= 1
            server.dry = False
            key = sample.info.item.key
            if self._once and key in self._seen:
                self.duplicates += 1
            else:
                self._here.append((sample, server))
                server.here += 1
            if self._once:
                self._seen[key] = None
                if len(self._seen) > _WINDOW:
                    self._seen.popitem(last=False)
            self._changed.notify_all()

    def _lose(self, client: ReverbClient, left: int) -> None:
        """Waits for a server to come back that broke a stream with so many samples left."""
        with self._changed:
            self.lost_upper_bound += left
        if not self._closed:
            client.server_info()
        with self._changed:
            self._changed.wait_for(lambda: self._closed, _PAUSE_S)


def complete_samples(responses: Iterable[pb.SampleStreamResponse]) -> Iterator[Received]:
    """Puts samples together, which come in one or more entries, these in one or more messages.

    Raises:
        ReverbDataError: a sample came without saying which item it is.
    """
    info, chunks = None, {}
    for response in responses:
        for entry in response.entries:
            if entry.HasField("info"):
                info, chunks = entry.info, {}
            chunks.update((chunk.chunk_key, chunk) for chunk in entry.data)
            if entry.end_of_sequence:
                if info is None:
                    raise ReverbDataError("a sample came without its item.")
                yield Received(info, chunks)
                info = None


def decode(samples: Sequence[Received], layout: Layout, table: str) -> list[np.ndarray]:
    """Leaves `[N, ...]` of samples.

    Raises:
        ReverbDataError: an item is damaged, or not of this layout.
    """
    leaves = [np.empty((len(samples), *column.shape), column.dtype) for column in layout.columns]
    for n, sample in enumerate(samples):
        try:
            read_item(sample.info.item.flat_trajectory, sample.chunks, layout, leaves, n)
        except ReverbDataError as error:
            raise ReverbDataError(f"item {sample.info.item.key} of table {table!r}: {error}") from None
    return leaves

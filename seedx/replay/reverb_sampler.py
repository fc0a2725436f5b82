"""Samples from one table, which may be spread over several Reverb servers.

Threading: a thread for each server asks for samples over a stream; one thread at a time takes them. Invariants: no more
is asked for than is wanted and not here, but of a server that may not have as many; a request is never cancelled, since
the server would go on serving it and the next item of a queue would be lost; so each has a short rate limiter timeout,
and closing waits for it.
"""

from __future__ import annotations

import itertools
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import grpc

from seedx.replay import reverb_pb2 as pb
from seedx.replay.reverb_client import ReverbClient, is_lost
from seedx.replay.reverb_decoder import Received, complete_samples
from seedx.replay.reverb_seen import Seen

_LIMITER_S = 1.0  # a request waits so long for the rate limiter, then comes another
_STREAM_S = 30.0  # age at which a stream is replaced
_STALL_S = 30.0  # a server that is silent for so long during a request is gone
_PAUSE_S = 0.1  # before a broken stream is opened again


@dataclass
class _Server:
    client: ReverbClient
    state_id: pb.Uint128  # of its tables; another one says that it was started again
    asked: int = 0  # samples
    here: int = 0  # of those received, how many are not taken
    dry: bool = False  # the rate limiter's timeout ended the last request
    table_size: int = 0  # when its last sample was taken


class Samples:
    """Samples on their way.

    Args:
        clients: The servers.
        state_ids: Of their tables.
        table: The table's name, the same on all.
        once: Whether it is a queue, whose items must be sampled once: what comes again after a break is passed over.
        was_resent: Whether an item of this key was sent again after a break.

    Attributes:
        duplicates: Samples passed over, of items that were sent again.
        restored: The same, of items that a server's checkpoint gave back.
        lost_upper_bound: Samples that were asked for when a server was lost, and may have been taken from a queue.
    """

    def __init__(
        self,
        clients: Sequence[ReverbClient],
        state_ids: Sequence[pb.Uint128],
        table: str,
        once: bool,
        was_resent: Callable[[int], bool],
    ) -> None:
        self._table = table
        self._once = once
        self._was_resent = was_resent
        self._servers = [_Server(*each) for each in zip(clients, state_ids, strict=True)]
        self._wanted = 0
        self._until = 0.0  # when what is wanted is no longer
        self._here: deque[tuple[Received, _Server]] = deque()
        self._seen = Seen()
        self._taking = threading.Lock()
        self._changed = threading.Condition()
        self._closed = False
        self._failure: Exception | None = None
        self.duplicates = 0
        self.restored = 0
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
                if self._closed:
                    return None
                if self._failure is not None:
                    raise self._failure
                if len(self._here) < count:
                    return None
                self._changed.notify_all()
                return [self._pop() for _ in range(count)]
        finally:
            self._taking.release()

    def give(self, found: Sequence[Received | None]) -> None:
        """Adds samples that were taken otherwise, at most one from each server."""
        for server, sample in zip(self._servers, found, strict=True):
            if sample is not None:
                with self._changed:
                    server.asked += 1
                self._receive(server, sample)

    def clear(self) -> None:
        """Forgets what was received and not taken."""
        with self._changed:
            while self._here:
                self._pop()
            self._changed.notify_all()

    def checkpointed(self, state_ids: Sequence[pb.Uint128]) -> None:
        """Every server has written a checkpoint, and its tables have these ids since."""
        with self._changed:
            restarted = [self._note(*each) for each in zip(self._servers, state_ids, strict=True)]
            if not any(restarted):
                self._seen.rotate()

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
                    self._lose(server, left)
                    return
        except grpc.RpcError as error:
            server.dry = "Rate Limiter" in (error.details() or "")
            if server.dry:
                return
            if not is_lost(error):
                raise
            self._lose(server, left)
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
        # What a dry one was asked for does not count for the others, which would wait for its rate limiter.
        asked = sum(each.asked for each in self._servers if each is server or not each.dry)
        missing = wanted - len(self._here) - asked
        share = math.ceil(wanted / len(self._servers))
        others_dry = any(each.dry for each in self._servers if each is not server)
        return min(missing, share if others_dry else share - server.asked - server.here)

    def _pop(self) -> Received:
        """The oldest sample, as one of the merged table: servers are sampled in equal shares."""
        sample, server = self._here.popleft()
        server.here -= 1
        sample.info.probability /= len(self._servers)
        sample.info.table_size += sum(each.table_size for each in self._servers if each is not server)
        return sample

    def _receive(self, server: _Server, sample: Received) -> None:
        server.client.heard()
        with self._changed:
            server.asked -= 1
            server.dry = False
            server.table_size = sample.info.table_size
            key = sample.info.item.key
            if self._once and not self._seen.add(key):
                resent = self._was_resent(key)
                self.duplicates += resent
                self.restored += not resent
            else:
                self._here.append((sample, server))
                server.here += 1
            self._changed.notify_all()

    def _note(self, server: _Server, state_id: pb.Uint128) -> bool:
        """Whether a server was started again since the last time; what is in its checkpoint then comes again."""
        if state_id == server.state_id:
            return False
        server.state_id = state_id
        self._seen.restored()
        return True

    def _lose(self, server: _Server, left: int) -> None:
        """Waits for a server to come back that broke a stream with so many samples left."""
        with self._changed:
            self.lost_upper_bound += left
        if not self._closed:
            state_id = server.client.server_info().tables_state_id
            with self._changed:
                self._note(server, state_id)
        with self._changed:
            self._changed.wait_for(lambda: self._closed, _PAUSE_S)

"""Requests that a scheduler works on, and those of them that still wait for slots."""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from seedx.inference.completion_text import CompletionText
from seedx.inference.engine import Prefix
from seedx.inference.requests import Completion, Handle, Listener, QueueFullError, Request

_FIRST_GUESS_S = 1.0
_RETRY_RANGE_S = (0.05, 60.0)


@dataclass(eq=False)
class Sample:
    """One completion on its way; `row` and `slot` are -1 while it has none."""

    group: Group
    index: int
    seed: int
    row: int = -1
    slot: int = -1
    text: CompletionText | None = None


@dataclass(eq=False)
class Group:
    """A request with its samples; ordered as they are served."""

    handle: Handle
    request: Request
    prompt: np.ndarray  # int32 [n]
    listener: Listener | None
    order: tuple[int, int]  # priority, then age
    deadline: float  # time.monotonic
    samples: list[Sample] = field(default_factory=list)
    unplaced: deque[Sample] = field(default_factory=deque)
    results: dict[int, Completion] = field(default_factory=dict)
    prefix: Prefix | None = None

    def __lt__(self, other: Group) -> bool:
        return self.order < other.order

    @property
    def done(self) -> bool:
        """Whether all samples are complete."""
        return len(self.results) == len(self.samples)


class Waiting:
    """Groups with samples that have no slot, highest priority first, then oldest.

    Threading: `admit` may be called by any thread, all else by the scheduler's.

    Args:
        max_samples: Completions that may wait.
        max_tokens: Prompt tokens that may wait, those of a request counted once.
    """

    def __init__(self, max_samples: int, max_tokens: int) -> None:
        self._max_samples, self._max_tokens = max_samples, max_tokens
        self._heap: list[Group] = []
        self._ages = itertools.count()
        self._lock = threading.Lock()
        self._samples = self._tokens = 0
        self._interval_s = _FIRST_GUESS_S  # between completions while others wait, a running mean
        self._last = time.monotonic()  # a completion, or when work began

    def admit(self, request: Request) -> tuple[int, int]:
        """Reserves room for a request; its order.

        Raises:
            QueueFullError: there is none now.
            ValueError: there never will be.
        """
        samples, tokens = request.num_samples, len(request.prompt)
        if samples > self._max_samples or tokens > self._max_tokens:
            raise ValueError(
                f"num_samples ({samples}) or the prompt ({tokens} tokens) is more than may ever wait "
                f"({self._max_samples} samples, {self._max_tokens} tokens)."
            )
        with self._lock:
            over = max(self._samples + samples - self._max_samples, 0)
            if over or self._tokens + tokens > self._max_tokens:
                retry_s = float(np.clip(max(over, 1) * self._interval_s, *_RETRY_RANGE_S))
                raise QueueFullError(
                    f"{self._samples} completions ({self._tokens} prompt tokens) wait already, of at most "
                    f"{self._max_samples} ({self._max_tokens}); try again in {retry_s:.2g} s.",
                    retry_s,
                )
            self._samples += samples
            self._tokens += tokens
            return -request.priority, next(self._ages)

    def push(self, group: Group) -> None:
        """Adds a group that was admitted, or one whose samples begin anew."""
        if group not in self._heap:
            heapq.heappush(self._heap, group)
        if len(self._heap) > 2 * self._samples:  # most of them need no slots any more
            self._heap = [group for group in self._heap if group.unplaced]
            heapq.heapify(self._heap)

    def first(self) -> Group | None:
        """The next group; those without unplaced samples are taken out."""
        while self._heap and not self._heap[0].unplaced:
            heapq.heappop(self._heap)
        return self._heap[0] if self._heap else None

    def placed(self, group: Group, count: int) -> None:
        """Gives back the room of samples that have a slot, or need none any more."""
        with self._lock:
            self._samples -= count
            if not group.unplaced:
                self._tokens -= len(group.prompt)

    def returned(self, group: Group, count: int) -> None:
        """Takes room for samples that begin anew, also where there is none: they were admitted once."""
        with self._lock:
            self._samples += count
            if len(group.unplaced) == count:
                self._tokens += len(group.prompt)

    def resume(self) -> None:
        """Notes that there is work again: no time before it is one between completions."""
        self._last = time.monotonic()

    def completed(self) -> None:
        """Notes that a completion left its slot; while others wait, `retry_after_s` is estimated from it."""
        now = time.monotonic()
        if self._samples:  # else most slots may be idle, and a full queue would see more completions than these
            self._interval_s += 0.1 * (now - self._last - self._interval_s)
        self._last = now

    @property
    def groups(self) -> int:
        """Groups that wait."""
        return len(self._heap)

    @property
    def samples(self) -> int:
        """Completions that wait, those that were just admitted too."""
        return self._samples

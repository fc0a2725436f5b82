"""The decode scheduler: continuous batching of requests over an engine's slots, with weights that change meanwhile.

A turn of its thread takes what was submitted, cancelled or published, fills free slots, launches the next dispatch and
only then delivers what the one before brought; so the device computes while the host works. Nothing a request does
changes another one's tokens.

Threading: `submit`, `publish`, `close` and handles are for any thread. Listeners are called on the scheduler's, once a
turn for each sample, and must be quick.
"""

from __future__ import annotations

import contextlib
import heapq
import threading
import time
from collections import deque
from collections.abc import Generator
from dataclasses import dataclass

import numpy as np

from seedx.checks import positive
from seedx.inference.completion_text import CompletionText
from seedx.inference.completions import Completions
from seedx.inference.engine import Engine
from seedx.inference.live_weights import LiveWeights
from seedx.inference.logprob_gap import LogprobGap
from seedx.inference.requests import Handle, Listener, Request
from seedx.inference.slots import InFlight, Slots
from seedx.inference.waiting import Group, Sample, Waiting
from seedx.metrics import Metrics, Number
from seedx.threads import Crew
from seedx.tokenizer import Tokenizer
from seedx.types import Tree
from seedx.weights import Weights

_POLL_S = 0.1


@dataclass(frozen=True)
class Limits:
    """What may wait; beyond it requests are refused.

    Attributes:
        max_waiting: Completions without a slot.
        max_waiting_tokens: Tokens of their prompts.
    """

    max_waiting: int = 1024
    max_waiting_tokens: int = 1 << 20

    def __post_init__(self) -> None:
        positive(self, "max_waiting", "max_waiting_tokens")


class Scheduler:
    """Serves requests until it is closed.

    Args:
        engine: Warmed up, and used by nobody else.
        weights: The first version.
        tokenizer: For texts and stop texts; None: tokens alone.
        limits: Of what waits.
        crew: Its thread joins it, and a failure stops it; None: one of its own.

    Raises:
        ValueError: the weights are not finite, or the version is not from 0 to 2**31 - 1.
    """

    def __init__(
        self,
        engine: Engine,
        weights: Weights,
        *,
        tokenizer: Tokenizer | None = None,
        limits: Limits | None = None,
        crew: Crew | None = None,
    ) -> None:
        limits = limits or Limits()
        self._engine, self._tokenizer = engine, tokenizer
        self._crew = crew or Crew()
        self._metrics = Metrics(totals={"decode/tokens": 0, "decode/swaps": 0})  # shown before the first, too
        self._weights = LiveWeights(engine, weights)
        self._waiting = Waiting(limits.max_waiting, limits.max_waiting_tokens)
        self._slots = Slots(engine, self._waiting)
        self._completions = Completions(self._slots, self._waiting, tokenizer)
        self._in_flight: list[InFlight] = []
        self._changed = threading.Condition()
        self._submitted: deque[Group] = deque()
        self._cancelled: deque[Handle] = deque()
        self._deadlines: list[tuple[float, int, Group]] = []
        self._started = self._closing = self._draining = False
        self._ended = threading.Event()

    def start(self) -> None:
        """Starts to serve."""
        self._started = True
        self._crew.spawn("scheduler", self._loop)

    def close(self, drain: bool = True, timeout_s: float | None = None) -> None:
        """Refuses new requests and ends; those at work are finished if `drain`, else "interrupted".

        Raises:
            TimeoutError: it has not ended in time.
            RuntimeError: the scheduler failed.
        """
        with self._changed:
            self._closing, self._draining = True, drain
            self._changed.notify()
        if not self._started:
            self._interrupt()
            self._ended.set()
        if not self._ended.wait(timeout_s):
            raise TimeoutError(f"the scheduler did not end within {timeout_s} s.")
        self._raise_failure()

    @property
    def version(self) -> int:
        """Of the weights that new tokens are made with."""
        return self._weights.current.version

    @property
    def logprob_gap(self) -> LogprobGap | None:
        """What quantisation changes in the weights that new tokens are made with; None: they are not quantised."""
        return self._weights.gap

    @property
    def num_slots(self) -> int:
        """Completions that are generated at a time, at most."""
        return self._engine.plan.num_slots

    @property
    def healthy(self) -> bool:
        """Whether requests are served."""
        return not (self._closing or self._ended.is_set() or self._crew.stop.is_set())

    def figures(self) -> dict[str, Number]:
        """What it does; `decode/occupancy` is the mean since this was last asked for."""
        self._metrics.gauge("decode/version", self.version)
        self._metrics.gauge("decode/waiting", self._waiting.samples - self._void())
        self._metrics.gauge("decode/compilations", self._engine.compilations)
        if (gap := self.logprob_gap) is not None:
            self._metrics.gauge("decode/int8_logprob_gap_mean", gap.mean)
            self._metrics.gauge("decode/int8_logprob_gap_max", gap.greatest)
        return self._metrics.snapshot()

    def _void(self) -> int:
        """Completions that wait though they are cancelled: a turn, which may take seconds, has yet to take them out."""
        with self._changed:
            groups = {group.handle: group for group in self._submitted}
            found = (groups.get(handle) or self._completions.groups.get(handle) for handle in set(self._cancelled))
            return sum(len(group.unplaced) for group in found if group is not None)

    def submit(self, request: Request, listener: Listener | None = None) -> Handle:
        """Takes a request.

        Args:
            request: What is asked for.
            listener: Called with every piece of every sample; if it raises, its request fails.

        Raises:
            ValueError: the request cannot be done; names the field.
            QueueFullError: too much waits; has `retry_after_s`.
            RuntimeError: the scheduler is closed or failed.
        """
        plan = self._engine.plan
        request.check(self._engine.config.vocab_size, plan.length, self._tokenizer is not None)
        self._refuse_if_ended()
        order = self._waiting.admit(request)
        deadline = time.monotonic() + (request.deadline_s or np.inf)
        prompt = np.asarray(request.prompt, np.int32)
        group = Group(Handle(self._cancel), request, prompt, listener, order, deadline)
        group.samples = [Sample(group, i, request.sample_seed(i)) for i in range(request.num_samples)]
        if self._tokenizer is not None and (listener or request.stop):
            for sample in group.samples:
                sample.text = CompletionText(self._tokenizer, request.stop)
        group.unplaced.extend(group.samples)
        with self._changed:
            self._refuse_if_ended()
            self._submitted.append(group)
            self._changed.notify()
        return group.handle

    @contextlib.contextmanager
    def together(self) -> Generator[None]:
        """Requests that are submitted inside are taken at one turn, so that the same ones are always batched alike."""
        with self._changed:
            yield

    def publish(self, version: int, params: Tree) -> None:
        """New weights, which decoding swaps to before its next dispatch.

        Raises:
            ValueError: they are not the model's, not finite or not newer, or the version is above 2**31 - 1; the old
                ones stay.
            RuntimeError: the scheduler is closed or failed.
        """
        self._refuse_if_ended()
        self._weights.publish(Weights(version, params))
        with self._changed:
            self._refuse_if_ended()
            self._changed.notify()

    def _cancel(self, handle: Handle) -> None:
        with self._changed:
            self._cancelled.append(handle)
            self._changed.notify()

    def _refuse_if_ended(self) -> None:
        self._raise_failure()
        if not self.healthy:
            raise RuntimeError("the scheduler is closed.")

    def _raise_failure(self) -> None:
        if self._crew.failure is not None:
            raise RuntimeError("the scheduler failed.") from self._crew.failure

    # ---- the thread

    def _loop(self) -> None:
        try:
            while not self._finished():
                self._turn()
            self._interrupt()
        except BaseException as error:
            self._crew.fail(error)  # before handles say so, so that who asks next learns why
            with self._changed:
                self._completions.groups.update({group.handle: group for group in self._submitted})
            self._completions.fail(error)
            raise
        finally:
            self._ended.set()

    def _finished(self) -> bool:
        """Waits for work; whether there will be none."""
        with self._changed:
            while not self._crew.stop.is_set() and (self._draining or not self._closing):
                if self._busy():
                    return False
                if self._closing:
                    return True
                due = self._deadlines[0][0] - time.monotonic() if self._deadlines else _POLL_S
                if due <= 0:
                    return False
                self._changed.wait(min(due, _POLL_S))
            return True

    def _busy(self) -> bool:
        waiting = self._submitted or self._cancelled or self._completions.groups
        return bool(waiting) or bool(self._in_flight) or not self._weights.settled

    def _turn(self) -> None:
        self._take_requests()
        self._expire()
        self._swap()
        self._slots.fill(self._weights.current)
        live = self._slots.live
        before, self._in_flight = self._in_flight, self._slots.launch(self._weights)
        for flight in before:
            self._metrics.count("decode/tokens", self._completions.deliver(flight))
        if self._in_flight:
            self._metrics.average("decode/occupancy", live / self._engine.plan.num_slots)

    def _take_requests(self) -> None:
        with self._changed:  # both at once: what is cancelled was submitted before
            submitted, self._submitted = self._submitted, deque()
            cancelled, self._cancelled = self._cancelled, deque()
        if submitted and not self._completions.groups:
            self._waiting.resume()
        for group in submitted:
            self._completions.groups[group.handle] = group
            self._waiting.push(group)
            if group.deadline < np.inf:
                heapq.heappush(self._deadlines, (group.deadline, group.order[1], group))
        if len(self._deadlines) > 2 * len(self._completions.groups):  # most of them are of requests that are done
            self._deadlines = [entry for entry in self._deadlines if not entry[2].done]
            heapq.heapify(self._deadlines)
        for handle in cancelled:
            group = self._completions.groups.get(handle)
            if group is not None:
                self._completions.end(group, "cancelled")

    def _expire(self) -> None:
        while self._deadlines and (self._deadlines[0][0] <= time.monotonic() or self._deadlines[0][2].done):
            self._completions.end(heapq.heappop(self._deadlines)[2], "deadline")

    def _swap(self) -> None:
        if not self._weights.swap():
            return
        for sample in self._slots.restarting():
            self._completions.restart(sample)
        if not self._slots.keep_on_old():
            self._weights.release()
        self._engine.prefixes.clear()
        self._metrics.count("decode/swaps")

    def _interrupt(self) -> None:
        self._take_requests()
        for group in list(self._completions.groups.values()):
            self._completions.end(group, "interrupted")

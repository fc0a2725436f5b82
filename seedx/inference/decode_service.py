"""What the decode server's protocols share: requests go to a scheduler, what comes of them to one asyncio loop.

Threading: all methods are called on the loop, but for `begin`, `drain`, `fail` and the listeners, which any thread may
call. Invariant: a stream that is open has at least one request with the scheduler.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections import deque
from collections.abc import AsyncGenerator, Generator, Sequence
from typing import Protocol, runtime_checkable

import numpy as np

from seedx.chat import ChatTemplate, Message
from seedx.inference.decode_metrics import DecodeMetrics
from seedx.inference.requests import Delta, Handle, Listener, QueueFullError, Request
from seedx.tokenizer import Tokenizer

RETRY_AFTER_S = 1.0  # while the server loads or ends: the next one may be there by then


class UnavailableError(Exception):
    """The server takes no requests now; the message says why."""


@runtime_checkable
class Scheduler(Protocol):
    """What is needed of `scheduler.Scheduler`."""

    @property
    def healthy(self) -> bool: ...  # noqa: D102

    def submit(self, request: Request, listener: Listener | None = None) -> Handle: ...  # noqa: D102


class DecodeStream:
    """What comes of some requests; closing it ends those that still run.

    Deltas of a completion that came while nobody took them are joined, so no more is held than the completions
    themselves.
    """

    def __init__(self, num_choices: int) -> None:
        self.handles: list[Handle] = []
        self.started = time.monotonic()
        self.first_token_s: float | None = None
        self.outcome = "cancelled"  # the last finish reason
        self.tokens = 0
        self._running = num_choices
        self._pending: dict[int, list[Delta]] = {}
        self._arrived = asyncio.Event()
        self._failure: BaseException | None = None

    def put(self, choice: int, delta: Delta) -> None:
        """Adds what came of a choice."""
        if delta.restarted:
            self._pending.pop(choice, None)
        self._pending.setdefault(choice, []).append(delta)
        self._arrived.set()

    def fail(self, error: BaseException) -> None:
        """Has `parts` raise."""
        self._failure = error
        self._arrived.set()

    async def parts(self) -> AsyncGenerator[tuple[int, Delta]]:
        """Choices and what came of them, until all have finished."""
        while self._running:
            await self._arrived.wait()
            self._arrived.clear()
            if self._failure is not None:
                self.outcome = "unavailable"
                raise self._failure
            pending, self._pending = self._pending, {}
            for choice, deltas in pending.items():
                part = joined(deltas)
                self.tokens += len(part.tokens)
                if self.first_token_s is None and len(part.tokens):
                    self.first_token_s = time.monotonic() - self.started
                if part.finish_reason is not None:
                    self._running -= 1
                    self.outcome = part.finish_reason
                yield choice, part


def _outcome_of(error: BaseException) -> str:
    """How a request that did not end by itself is counted."""
    match error:
        case asyncio.CancelledError() | GeneratorExit():
            return "cancelled"
        case ValueError():
            return "invalid"
        case QueueFullError():
            return "queue_full"
        case UnavailableError():
            return "unavailable"
    return "failed"


def joined(deltas: list[Delta]) -> Delta:
    """One delta for several that follow each other."""
    if len(deltas) == 1:
        return deltas[0]
    last = deltas[-1]
    return last._replace(
        tokens=np.concatenate([delta.tokens for delta in deltas]),
        logprobs=np.concatenate([delta.logprobs for delta in deltas]),
        raw_logprobs=np.concatenate([delta.raw_logprobs for delta in deltas]),
        versions=np.concatenate([delta.versions for delta in deltas]),
        text=None if last.text is None else "".join(delta.text or "" for delta in deltas),
        restarted=deltas[0].restarted,
    )


class DecodeService:
    """A model and its scheduler, for the protocols' servers.

    Args:
        metrics: Where requests are counted.
    """

    def __init__(self, metrics: DecodeMetrics) -> None:
        self.metrics = metrics
        self.name = ""
        self.failure: BaseException | None = None
        self._scheduler: Scheduler | None = None
        self._tokenizer: Tokenizer | None = None
        self._chat_template: ChatTemplate | None = None
        self._why_not = "the model is still being loaded, warmed up or compiled; come again"
        self._streams: set[DecodeStream] = set()
        self._inbox: deque[tuple[DecodeStream, int, Delta]] = deque()
        self._is_called = False  # whether the loop will look into the inbox
        self._loop: asyncio.AbstractEventLoop | None = None

    # ---- any thread

    def begin(self, scheduler: Scheduler, name: str, tokenizer: Tokenizer, chat_template: ChatTemplate | None) -> None:
        """Takes requests from now on."""
        self.name, self._tokenizer, self._chat_template = name, tokenizer, chat_template
        self._scheduler = scheduler
        self._why_not = ""

    def drain(self) -> None:
        """Takes no more requests."""
        if self.failure is None:  # which says more
            self._why_not = "the server is about to end; try another one, or come again"

    def fail(self, error: BaseException) -> None:
        """The scheduler is dead: nothing that was asked will be answered."""
        self.failure = error
        self._why_not = "the decode engine has failed; see the server's log"
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # closed meanwhile
                self._loop.call_soon_threadsafe(self._fail_streams)

    def _receive(self, stream: DecodeStream, first: int, delta: Delta) -> None:
        self._inbox.append((stream, first + delta.index, delta))
        if not self._is_called:  # one call for all that a dispatch brings
            self._is_called = True
            assert self._loop is not None
            with contextlib.suppress(RuntimeError):  # closed meanwhile
                self._loop.call_soon_threadsafe(self._deliver)

    # ---- the loop's thread

    @property
    def is_serving(self) -> bool:
        """Whether requests are taken."""
        return not self._why_not

    @property
    def is_live(self) -> bool:
        """Whether requests are taken, and somebody works on them."""
        return self.is_serving and self._scheduler is not None and self._scheduler.healthy

    @property
    def num_open(self) -> int:
        """Streams that are being answered."""
        return len(self._streams)

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's.

        Raises:
            UnavailableError: it is not loaded yet.
        """
        self.check_serving()
        assert self._tokenizer is not None
        return self._tokenizer

    def check_serving(self) -> None:
        """Raises UnavailableError unless requests are taken."""
        if self._why_not:
            raise UnavailableError(f"{self._why_not}.")

    async def encode(self, text: str) -> tuple[int, ...]:
        """A prompt's tokens, with a BOS if the model has one; beside the loop, which long texts would hold up."""
        return tuple(await asyncio.to_thread(self.tokenizer.encode, text))

    async def encode_chat(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """The tokens of a chat so far, up to where the assistant begins.

        Raises:
            ValueError: the model has no chat template, or it refuses the messages.
        """
        template, tokenizer = self._chat_template, self.tokenizer
        if template is None:
            raise ValueError(f"messages: {self.name} has no chat template; use /v1/completions.")
        return tuple(await asyncio.to_thread(template.encode, tokenizer, list(messages)))

    @contextlib.contextmanager
    def reading(self, protocol: str, *refusals: type[Exception]) -> Generator[None]:
        """Counts a request that does not come as far as `open`.

        Args:
            protocol: For the metrics.
            refusals: The protocol's own exceptions for what is invalid.
        """
        try:
            yield
        except BaseException as error:
            self.metrics.ended(protocol, "invalid" if isinstance(error, refusals) else _outcome_of(error))
            raise

    @contextlib.asynccontextmanager
    async def open(self, protocol: str, requests: Sequence[Request]) -> AsyncGenerator[DecodeStream]:
        """Submits requests; leaving the block ends what still runs of them.

        Args:
            protocol: For the metrics.
            requests: Their completions are numbered through.

        Raises:
            UnavailableError: no requests are taken now.
            ValueError: a request cannot be done; its field is named.
            QueueFullError: there is no room for one of them.
        """
        self._loop = asyncio.get_running_loop()
        stream = DecodeStream(sum(request.num_samples for request in requests))
        self._streams.add(stream)
        try:
            self.check_serving()
            first = 0
            for request in requests:
                stream.handles.append(self._submit(request, functools.partial(self._receive, stream, first)))
                first += request.num_samples
            self.metrics.opened(sum(len(request.prompt) for request in requests), protocol)
            try:
                yield stream
            finally:
                self.metrics.closed(protocol, stream.tokens, stream.first_token_s, time.monotonic() - stream.started)
        except BaseException as error:
            stream.outcome = _outcome_of(error)
            raise
        finally:
            self._streams.discard(stream)
            self.metrics.ended(protocol, stream.outcome)
            for handle in stream.handles:
                handle.cancel()  # nothing to one that is done

    def _submit(self, request: Request, listener: Listener) -> Handle:
        assert self._scheduler is not None
        try:
            return self._scheduler.submit(request, listener)
        except RuntimeError as error:
            raise UnavailableError(f"{error}") from error

    def _deliver(self) -> None:
        self._is_called = False  # before the inbox is emptied: what comes now calls again
        while self._inbox:
            stream, choice, delta = self._inbox.popleft()
            stream.put(choice, delta)

    def _fail_streams(self) -> None:
        for stream in self._streams:
            stream.fail(UnavailableError(f"{self._why_not}."))

    def interrupt(self) -> None:
        """Ends all streams, whose time is over."""
        for stream in self._streams:
            stream.fail(UnavailableError("the server ended before this was finished."))

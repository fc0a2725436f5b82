"""What is asked of a decode scheduler, and what comes back. NumPy only."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import numpy as np

OnSwap = Literal["continue", "finish", "restart"]
FinishReason = Literal["stop", "length", "cancelled", "deadline", "interrupted"]


@dataclass(frozen=True)
class Request:
    """A prompt and how to continue it.

    Attributes:
        prompt: Token ids, at least one; a BOS only if it holds one.
        max_tokens: Of a completion; the slot's length ends it too.
        temperature: Of the sampling distribution; 0: the likeliest token.
        top_k: Only so many likeliest tokens; 0: all.
        top_p: Only the likeliest tokens that hold this probability; 1: all.
        seed: A completion depends on seed, sample index and weights alone; None: a random one.
        stop_tokens: Each ends a completion, and is its last token.
        stop: Texts that end a completion; its text ends before them. Needs a tokenizer.
        num_samples: Completions of the prompt.
        priority: Higher ones go first; among equals the older.
        deadline_s: Seconds from submission after which what there is comes back; None: never.
        on_swap: When new weights come: "continue" on them, "finish" on the old ones, "restart" the completion.
    """

    prompt: tuple[int, ...]
    max_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    stop_tokens: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    num_samples: int = 1
    priority: int = 0
    deadline_s: float | None = None
    on_swap: str = "continue"

    def check(self, vocab_size: int, length: int, has_tokenizer: bool) -> None:
        """Refuses what cannot be done.

        Args:
            vocab_size: Token ids are below it.
            length: Tokens of a slot.
            has_tokenizer: Whether there is text.

        Raises:
            ValueError: names the field, its value and what is allowed.
        """
        count = len(self.prompt)
        _require(0 < count < length, f"prompt has {count} tokens; 1 to {length - 1} are allowed.")
        for name, tokens in (("prompt", self.prompt), ("stop_tokens", self.stop_tokens)):
            for token in (min(tokens, default=0), max(tokens, default=0)):
                allowed = f"ids are from 0 to {vocab_size - 1}."
                _require(0 <= token < vocab_size, f"{name} has token id {token}; {allowed}")
        _require(self.max_tokens >= 1, f"max_tokens ({self.max_tokens}) must be at least 1.")
        _require(0 <= self.temperature < np.inf, f"temperature ({self.temperature}) must be finite and not negative.")
        _require(0 <= self.top_k < 2**31, f"top_k ({self.top_k}) must not be negative; 0 means all tokens.")
        _require(0 < self.top_p <= 1, f"top_p ({self.top_p}) must be above 0 and at most 1.")
        _require(self.seed is None or 0 <= self.seed < 2**64, f"seed ({self.seed}) must be from 0 to 2**64 - 1.")
        _require(self.num_samples >= 1, f"num_samples ({self.num_samples}) must be at least 1.")
        _require(all(self.stop), "stop has an empty text, which every completion would begin with.")
        _require(has_tokenizer or not self.stop, "stop needs a tokenizer, and this scheduler has none.")
        _require(self.deadline_s is None or self.deadline_s > 0, f"deadline_s ({self.deadline_s}) must be positive.")
        allowed = get_args(OnSwap)
        _require(self.on_swap in allowed, f"on_swap ({self.on_swap}) must be one of {', '.join(allowed)}.")

    def sample_seed(self, index: int) -> int:
        """The uint32 seed of a sample; that of the first is the request's, if it fits."""
        if self.seed is None:
            return secrets.randbits(32)
        return (self.seed ^ (self.seed >> 32) ^ (index * 0x9E3779B1)) & 0xFFFFFFFF


def _require(ok: bool, message: str) -> None:
    if not ok:
        raise ValueError(message)


class Tokens(NamedTuple):
    """Some tokens of a completion and what is known of each, `[n]`."""

    tokens: np.ndarray  # int32
    logprobs: np.ndarray  # float32, natural, under the sampling distribution
    raw_logprobs: np.ndarray  # float32, under softmax(logits)
    versions: np.ndarray  # int32, of the weights


class Completion(NamedTuple):
    """One continuation of a prompt; arrays are `[n]`, one entry for each token."""

    tokens: np.ndarray  # int32, the stop token included
    logprobs: np.ndarray  # float32, natural, under the sampling distribution
    raw_logprobs: np.ndarray  # float32, under softmax(logits)
    versions: np.ndarray  # int32, the weights' version that each token was made with
    finish_reason: FinishReason
    text: str | None  # None without a tokenizer; ends before the stop token or text


class Delta(NamedTuple):
    """What came to a completion since the last one; arrays are `[n]`, n >= 0, and read-only."""

    index: int  # of the sample
    tokens: np.ndarray
    logprobs: np.ndarray
    raw_logprobs: np.ndarray
    versions: np.ndarray
    text: str | None  # what is final: neither half a character nor the beginning of a stop text
    finish_reason: FinishReason | None
    restarted: bool = False  # whatever came before this is void


Listener = Callable[[Delta], None]


class QueueFullError(Exception):
    """There is no room for a request now.

    Attributes:
        retry_after_s: When there may be.
    """

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Handle:
    """A request that was taken; any thread may use it.

    Attributes:
        num_done: Samples that are complete; the scheduler sets it.
    """

    def __init__(self, cancel: Callable[[Handle], None]) -> None:
        self.num_done = 0
        self._cancel = cancel
        self._finished = threading.Event()
        self._completions: list[Completion] = []
        self._failure: BaseException | None = None
        self._lock = threading.Lock()  # of the next
        self._callbacks: list[Callable[[Handle], None]] = []

    def add_done_callback(self, callback: Callable[[Handle], None]) -> None:
        """Calls it once `result` returns at once: now, or on the scheduler's thread, where it must be quick."""
        with self._lock:
            if not self.done:
                self._callbacks.append(callback)
                return
        callback(self)

    @property
    def done(self) -> bool:
        """Whether `result` returns at once."""
        return self._finished.is_set()

    def cancel(self) -> None:
        """Ends the request before the next dispatch; what there is comes back as "cancelled"."""
        self._cancel(self)

    def result(self, timeout_s: float | None = None) -> list[Completion]:
        """Waits for all samples, in the order of their indices.

        Raises:
            TimeoutError: they are not done in time.
            RuntimeError: the scheduler or the request's listener failed.
        """
        if not self._finished.wait(timeout_s):
            raise TimeoutError(f"the request was not done within {timeout_s} s.")
        if self._failure is not None:
            raise RuntimeError("the request failed.") from self._failure
        return self._completions

    def finish(self, completions: list[Completion]) -> None:
        """Sets the result; for the scheduler."""
        self._completions = completions
        self._end()

    def fail(self, error: BaseException) -> None:
        """Has `result` raise; for the scheduler."""
        self._failure = error
        self._end()

    def _end(self) -> None:
        with self._lock:
            self._finished.set()
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback(self)

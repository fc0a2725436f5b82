"""Generation of groups over the small model, with a reward pool whose order the test decides."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace

from decode_harness import make_params, warm_engine
from processes import until

from seedx.envs.text.generation import Generation, Settings
from seedx.envs.text.rewards import Reply, RewardPool
from seedx.envs.text.task import Prompt
from seedx.inference.scheduler import Limits, Scheduler
from seedx.metrics import Metrics
from seedx.threads import Crew
from seedx.weights import Weights

S = 100.0  # bounds hanging alone


_BYTES = {60: "€".encode(), 61: b"\xe2", 62: b"\x82", 63: b"\xac"}


class Alphabet:
    """Token n is a byte: letters, and the three bytes of a euro sign as 61, 62, 63. Whole euro signs are one token, 60.

    So what was decoded is encoded otherwise than it was. Token 0 ends a completion and is the padding too.
    """

    vocab_size, bos_id, eos_ids, pad_id = 64, None, (0,), 0

    def encode(self, text, add_bos=True, parse_special=False):
        return [60 if letter == "€" else 1 if letter == "\ufffd" else ord(letter) - 64 for letter in text]

    def literal(self, text):
        return text

    def decode(self, tokens):
        return b"".join(map(self.token_bytes, tokens)).decode("utf-8", "replace")

    def token_bytes(self, token):
        return b"" if token == 0 else _BYTES.get(token, bytes([64 + token]))


class Ending(Alphabet):
    """Many of the tokens end a completion."""

    eos_ids = tuple(range(20))


class Words:
    """A task whose prompts are given; scores are the pool's."""

    def __init__(self, *texts):
        self._prompts = [Prompt(text) for text in texts]

    def prompts(self, split):
        return self._prompts

    def reward(self, prompt, completion):
        raise NotImplementedError


class Talk(Words):
    """Answers each of the first turns with the next of some texts, and keeps what was said."""

    def __init__(self, *replies, texts=("AB",)):
        super().__init__(*texts)
        self.replies, self.heard = replies, []

    def reply(self, prompt, turns):
        self.heard.append(list(turns))
        return self.replies[len(turns) - 1] if len(turns) <= len(self.replies) else None


class HandPool(RewardPool):
    """Scores with a function at once, or when the test says so.

    Attributes:
        asked: Prompt, completion and future of each call.
    """

    def __init__(self, score: Callable | None = None) -> None:
        self._score, self.asked, self._added = score, [], threading.Condition()

    def submit(self, prompt, completion):
        future = Future()
        with self._added:
            self.asked.append((prompt, completion, future))
            self._added.notify_all()
        if self._score is not None:
            future.set_result(self._score(prompt, completion))
        return future

    def reply(self, prompt, turns):
        future = Future()
        future.set_result(self.replies(prompt, turns))
        return future

    def wait_for(self, count):
        """The first so many calls."""
        with self._added:
            assert self._added.wait_for(lambda: len(self.asked) >= count, S), f"{len(self.asked)} of {count} asked for"
            return self.asked[:count]


def length(prompt, completion):
    return {"length": float(len(completion))}


@contextlib.contextmanager
def generating(task=None, pool=None, tokenizer=None, start=True, weights=None, **settings):
    """A generation at work on a scheduler of its own; with `start=False` the scheduler takes requests and is silent.

    Gives them, with their crew and metrics and the requests and handles of the scheduler, in their order.
    """
    crew, metrics, tokenizer = Crew(), Metrics(), tokenizer or Alphabet()
    limits = Limits(max_waiting=4096)
    scheduler = Scheduler(
        warm_engine(), weights or Weights(0, make_params(0)), tokenizer=tokenizer, limits=limits, crew=crew
    )
    task, pool = task or Words("AB"), pool or HandPool(length)
    pool.replies = lambda prompt, turns: Reply(task.reply(prompt, turns))
    settings = Settings(**{"group_size": 2, "max_tokens": 8} | settings)
    generation = Generation(scheduler, task, tokenizer, pool, settings, metrics, crew)
    requests, handles, submit = [], [], scheduler.submit

    def noted(request, listener=None):
        handle = submit(request, listener)
        requests.append(request)
        handles.append(handle)
        return handle

    scheduler.submit = noted
    if start:
        scheduler.start()
    generation.start()
    try:
        yield SimpleNamespace(**locals())
    finally:
        left = crew.join(S)
        assert not left, left


def failure(crew: Crew) -> BaseException:
    """What stopped the crew."""
    assert crew.stop.wait(S)
    assert crew.failure is not None
    return crew.failure


def expire(generation: Generation, position: int) -> None:
    """Has the time of a group be over."""
    job = until(
        lambda: next((job for job in list(generation._generating) if job.position == position), None), "the group", S
    )
    job.asked_at = generation._heard_at = -math.inf

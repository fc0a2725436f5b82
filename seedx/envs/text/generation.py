"""Turns prompts into scored groups: the model's turns, the environment's replies between them, the rewards.

Tokens go in as they came out: what a model said is never decoded and encoded again, and what was sampled is known from
where it came, never from token ids.

Threading: `begin` is for any thread. What comes back from the scheduler and the reward workers is handled on a thread
of its own, which alone touches jobs.
"""

from __future__ import annotations

import math
import queue
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from seedx.envs.text.group import REASONS, Group
from seedx.envs.text.rewards import Reply, RewardPool
from seedx.envs.text.task import MultiTurnTask, Prompt, Scores, Task
from seedx.envs.text.track import Track
from seedx.inference.requests import Handle, QueueFullError, Request
from seedx.inference.scheduler import Scheduler
from seedx.learner.advantages import overlong_penalty
from seedx.metrics import Metrics
from seedx.threads import Crew
from seedx.tokenizer import Tokenizer

_POLL_S = 0.1
_GREATEST = float(np.finfo(np.float32).max)  # reward that an item can hold


@dataclass(frozen=True)
class Settings:
    """How completions are made.

    Attributes:
        group_size: Completions of a prompt.
        max_tokens: Of a completion, replies included.
        temperature: That tokens are drawn at.
        timeout_s: A group that is not complete after so long is asked for again.
        retries: How often.
        overlong_tokens: Tokens before `max_tokens` over which the reward falls by up to 1; 0: none.
    """

    group_size: int
    max_tokens: int
    temperature: float = 1.0
    timeout_s: float = 600.0
    retries: int = 2
    overlong_tokens: int = 0


@dataclass(eq=False)
class _Job:
    position: int
    prompt: Prompt
    tokens: tuple[int, ...]
    group_size: int
    seed: int
    shaped: bool
    future: Future[Group]
    tracks: list[Track] = field(default_factory=list)
    handles: set[Handle] = field(default_factory=set)  # of this attempt; those of earlier ones are ignored
    postponed: int = 0  # turns of this attempt that the scheduler has had no room for
    unanswered: int = 0  # turns of this attempt that the environment has not replied to
    unscored: int = 0  # rewards that are still computed
    attempt: int = 0
    asked_at: float = math.inf


class _Postponed(NamedTuple):
    """A turn that the scheduler had no room for: what else asks it, with --serve-port, has filled its queue."""

    due: float
    job: _Job
    attempt: int
    prompt: tuple[int, ...]
    seed: int
    tracks: list[Track]


class Generation:
    """Makes groups.

    Args:
        scheduler: At work.
        task: Of the prompts.
        tokenizer: Of the model.
        pool: Computes rewards and replies.
        settings: How completions are made.
        metrics: Counts what was lost.
        crew: Runs the thread.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        task: Task,
        tokenizer: Tokenizer,
        pool: RewardPool,
        settings: Settings,
        metrics: Metrics,
        crew: Crew,
    ) -> None:
        self._scheduler, self._tokenizer, self._pool = scheduler, tokenizer, pool
        self._replies = isinstance(task, MultiTurnTask)
        self._weights: Mapping[str, float] = getattr(task, "reward_weights", {})
        self._settings, self._metrics, self._crew = settings, metrics, crew
        self._events: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()  # a few for each job
        self._generating: set[_Job] = set()
        self._heard_at = -math.inf  # the end of a turn
        self._postponed: list[_Postponed] = []

    def start(self) -> None:
        """Begins to handle what comes back."""
        self._crew.spawn("generation", self._loop)

    def begin(
        self,
        position: int,
        prompt: Prompt,
        tokens: tuple[int, ...],
        seed: int,
        group_size: int | None = None,
        *,
        shaped: bool = True,
    ) -> Future[Group]:
        """Asks for a group.

        Args:
            position: Names it.
            prompt: Of the task.
            tokens: The prompt as the model reads it.
            seed: Of the whole group, 0 to 2**64 - 1.
            group_size: Completions; None: those of the settings.
            shaped: Whether long completions are punished, as the settings say.

        Raises:
            What `Scheduler.submit` raises, but for QueueFullError: then the group waits for room.
        """
        job = _Job(position, prompt, tokens, group_size or self._settings.group_size, seed, shaped, Future())
        self._events.put(lambda: self._generating.add(job))  # before anything can come back
        self._ask(job)
        return job.future

    def _loop(self) -> None:
        due = time.monotonic()
        while not self._crew.stop.is_set():
            try:
                event = self._events.get(timeout=_POLL_S)
            except queue.Empty:
                event = None
            if event is not None:
                event()
            if time.monotonic() >= due:  # however much there is to do
                due = time.monotonic() + _POLL_S
                self._ask_postponed()
                self._expire()

    # ---- generating

    def _ask(self, job: _Job) -> None:
        """Asks for the first turn of all completions."""
        job.tracks = [Track() for _ in range(job.group_size)]
        job.handles, job.postponed, job.unanswered, job.asked_at = set(), 0, 0, math.inf
        self._submit(job, job.tokens, job.seed, job.tracks)
        job.asked_at = time.monotonic()  # not before it is asked for, perhaps by our caller

    def _submit(self, job: _Job, prompt: tuple[int, ...], seed: int, tracks: list[Track]) -> None:
        request = Request(
            prompt,
            self._settings.max_tokens - tracks[0].length,
            temperature=self._settings.temperature,
            seed=seed,
            stop_tokens=self._tokenizer.eos_ids,
            num_samples=len(tracks),
            on_swap="continue",
        )
        try:
            handle = self._scheduler.submit(request)
        except QueueFullError as error:
            job.postponed += 1
            again = _Postponed(time.monotonic() + error.retry_after_s, job, job.attempt, prompt, seed, tracks)
            self._events.put(lambda: self._postponed.append(again))
            return
        job.handles.add(handle)
        handle.add_done_callback(lambda _: self._events.put(lambda: self._said(job, handle, tracks)))

    def _ask_postponed(self) -> None:
        now = time.monotonic()
        due = [again for again in self._postponed if again.due <= now]
        self._postponed = [again for again in self._postponed if again.due > now]
        for again in due:
            if again.attempt == again.job.attempt:
                again.job.postponed -= 1
                self._submit(again.job, again.prompt, again.seed, again.tracks)

    def _said(self, job: _Job, handle: Handle, tracks: list[Track]) -> None:
        """The model's turn of some completions is over."""
        if handle not in job.handles:
            return
        job.handles.remove(handle)
        self._heard_at = time.monotonic()
        completions = handle.result(0.0)
        cut = [completion.finish_reason for completion in completions if completion.finish_reason not in REASONS]
        if cut:
            if not self._crew.stop.is_set():
                self._lost(job, f"ended with {cut[0]!r}")
            return
        for track, completion in zip(tracks, completions, strict=True):
            track.add(completion)
            track.finish_reason = completion.finish_reason
            if self._replies and completion.finish_reason == "stop":
                self._ask_environment(job, track)
        self._end_if_over(job)

    def _ask_environment(self, job: _Job, track: Track) -> None:
        job.unanswered += 1
        attempt, future = job.attempt, self._pool.reply(job.prompt, track.turns)
        future.add_done_callback(lambda _: self._events.put(lambda: self._replied(job, attempt, track, future)))

    def _replied(self, job: _Job, attempt: int, track: Track, future: Future[Reply | None]) -> None:
        """The environment's turn is over."""
        if attempt != job.attempt:
            return
        job.unanswered -= 1
        self._heard_at = time.monotonic()
        reply = future.result(0.0)
        track.is_broken = reply is None
        if reply is not None and reply.text is not None:
            self._go_on(job, track, reply.text)
        self._end_if_over(job)

    def _end_if_over(self, job: _Job) -> None:
        if not job.handles and not job.postponed and not job.unanswered:
            self._generating.discard(job)
            self._score(job)

    def _go_on(self, job: _Job, track: Track, reply: str) -> None:
        """The model's next turn, or the end if there is no room for one."""
        tokens = self._tokenizer.encode(reply, add_bos=False)
        if track.length + len(tokens) >= self._settings.max_tokens:
            track.finish_reason = "length"
            return
        track.reply(reply, tokens)
        text = (*job.tokens, *np.concatenate(track.tokens).tolist())
        self._submit(job, text, seed_of(job.seed, job.tracks.index(track), len(track.turns)), [track])

    def _lost(self, job: _Job, why: str) -> None:
        name = f"the group of prompt {job.position}"
        if job.attempt == self._settings.retries:
            raise RuntimeError(
                f"{name} {why}, after {job.attempt + 1} attempts: the decode engine does not answer, or "
                f"--rollout.timeout-s ({self._settings.timeout_s:g}) is too short for {self._settings.max_tokens} "
                "tokens."
            )
        job.attempt += 1
        print(f"{name} {why}; it is asked for again ({job.attempt} of {self._settings.retries}).", flush=True)
        self._metrics.count("rollout/lost_groups")
        for handle in job.handles:
            handle.cancel()
        self._ask(job)

    def _expire(self) -> None:
        """Asks again for groups that are overdue, counted from when a turn was over last: others go first."""
        before = time.monotonic() - self._settings.timeout_s
        if self._heard_at < before:
            for job in [job for job in self._generating if job.asked_at < before]:
                self._lost(job, f"was not complete after {self._settings.timeout_s:g} s")

    # ---- scoring

    def _score(self, job: _Job) -> None:
        whole = [track for track in job.tracks if not track.is_broken]  # others get no reward
        job.unscored = len(whole)
        for track in whole:
            future = self._pool.submit(job.prompt, track.text)
            future.add_done_callback(
                lambda future, track=track: self._events.put(lambda: self._scored(job, track, future))
            )
        if not whole:
            self._finish(job)

    def _scored(self, job: _Job, track: Track, future: Future[Scores | None]) -> None:
        track.scores = future.result(0.0)
        job.unscored -= 1
        if not job.unscored:
            self._finish(job)

    def _finish(self, job: _Job) -> None:
        samples = [track.sample(self._reward(track, job.shaped)) for track in job.tracks]
        job.future.set_result(Group(job.position, np.array(job.tokens, np.int32), samples))

    def _reward(self, track: Track, shaped: bool) -> float:
        """The weighted sum of its scores; NaN if there are none, or it is nothing that a float32 can hold."""
        if track.scores is None:
            return math.nan
        reward = sum(self._weights.get(name, 1.0) * score for name, score in track.scores.items())
        reward += self._overlong(track.length) if shaped else 0.0
        if abs(reward) > _GREATEST:
            self._metrics.count("rollout/unusable_rewards")
            return math.nan
        return reward

    def _overlong(self, length: int) -> float:
        settings = self._settings
        if not settings.overlong_tokens:
            return 0.0
        return float(overlong_penalty(np.array([length]), settings.max_tokens, settings.overlong_tokens)[0])


def seed_of(*numbers: int) -> int:
    """A seed for what some numbers name, each from 0 to 2**64 - 1."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0])

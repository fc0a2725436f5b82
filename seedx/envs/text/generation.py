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
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from seedx.envs.text.group import REASONS, Group
from seedx.envs.text.job import Job
from seedx.envs.text.rewards import Reply, RewardPool
from seedx.envs.text.task import MultiTurnTask, Prompt, Scores, Task
from seedx.envs.text.track import Track
from seedx.inference.decoder import Decoder
from seedx.inference.requests import Handle, QueueFullError, Request
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
        redundant: Completions beyond `group_size`, that stand by for those that are lost, late or without a reward.
        late_s: When a completion is late, counted from when its group was asked for; 0: never.
        overlong_tokens: Tokens before `max_tokens` over which the reward falls by up to 1; 0: none.
    """

    group_size: int
    max_tokens: int
    temperature: float = 1.0
    timeout_s: float = 600.0
    retries: int = 2
    redundant: int = 0
    late_s: float = 0.0
    overlong_tokens: int = 0


class _Postponed(NamedTuple):
    """A turn that the scheduler had no room for: what else asks it, with --serve-port, has filled its queue."""

    due: float
    job: Job
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
        scheduler: Decoder,
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
        self._generating: set[Job] = set()
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
            group_size: Completions; None: those of the settings, with redundant ones.
            shaped: Whether long completions are punished, as the settings say.

        Raises:
            What `Decoder.submit` raises, but for QueueFullError: then the group waits for room.
        """
        settings, redundant = self._settings, 0 if group_size else self._settings.redundant
        job = Job(position, prompt, tokens, group_size or settings.group_size, redundant, seed, shaped, Future())
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

    def _ask(self, job: Job) -> None:
        """Asks for the first turn of all completions; for redundant ones singly, each with a seed of its own."""
        job.reset()
        with self._scheduler.together():  # nothing comes back meanwhile
            self._submit(job, job.tokens, job.seed, job.tracks[: job.group_size])
            for i in range(job.group_size, len(job.tracks)):
                self._submit(job, job.tokens, seed_of(job.seed, i), job.tracks[i : i + 1])
        job.asked_at = time.monotonic()  # not before it is asked for, perhaps by our caller

    def _submit(self, job: Job, prompt: tuple[int, ...], seed: int, tracks: list[Track]) -> None:
        if job.is_cut:
            for track in tracks:  # of a further turn, or one that there was no room for
                track.is_lost = True
            return
        request = Request(
            prompt,
            self._settings.max_tokens - tracks[0].length,
            temperature=self._settings.temperature,
            seed=seed,
            stop_tokens=self._tokenizer.eos_ids,
            num_samples=len(tracks),
            priority=-1 if tracks[0].is_redundant else 0,  # in slots that nothing else wants
            on_swap="continue",
        )
        try:
            handle = self._scheduler.submit(request)
        except QueueFullError as error:
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
            if again.attempt == again.job.attempt and not again.job.future.done():
                self._submit(again.job, again.prompt, again.seed, again.tracks)
                self._advance(again.job)

    def _said(self, job: Job, handle: Handle, tracks: list[Track]) -> None:
        """The model's turn of some completions is over."""
        if handle not in job.handles:
            return
        job.handles.remove(handle)
        self._heard_at = time.monotonic()
        completions = handle.result(0.0)
        reasons = [completion.finish_reason for completion in completions if completion.finish_reason not in REASONS]
        if reasons and self._crew.stop.is_set():
            return
        for track, completion in zip(tracks, completions, strict=True):
            track.is_lost = completion.finish_reason not in REASONS
        if not job.has_enough:
            self._lost(job, f"ended with {reasons[0]!r}")
            return
        for track, completion in zip(tracks, completions, strict=True):
            if not track.is_lost:
                track.add(completion)
                if self._replies and completion.finish_reason == "stop":
                    self._ask_environment(job, track)
                else:
                    track.finish_reason = completion.finish_reason
        self._advance(job)

    def _ask_environment(self, job: Job, track: Track) -> None:
        attempt, future = job.attempt, self._pool.reply(job.prompt, track.turns)
        future.add_done_callback(lambda _: self._events.put(lambda: self._replied(job, attempt, track, future)))

    def _replied(self, job: Job, attempt: int, track: Track, future: Future[Reply | None]) -> None:
        """The environment's turn is over."""
        if attempt != job.attempt or job.future.done():
            return
        self._heard_at = time.monotonic()
        reply = future.result(0.0)
        if reply is not None and reply.text is not None:
            self._go_on(job, track, reply.text)
        else:
            track.finish_reason = "stop"
        if reply is None:  # what cannot be gone on with has no reward either
            track.is_asked = track.is_settled = True
        self._advance(job)

    def _go_on(self, job: Job, track: Track, reply: str) -> None:
        """The model's next turn, or the end if there is no room for one."""
        tokens = self._tokenizer.encode(reply, add_bos=False)
        if track.length + len(tokens) >= self._settings.max_tokens:
            track.finish_reason = "length"
            return
        track.reply(reply, tokens)
        text = (*job.tokens, *np.concatenate(track.tokens).tolist())
        self._submit(job, text, seed_of(job.seed, job.tracks.index(track), len(track.turns)), [track])

    def _lost(self, job: Job, why: str) -> None:
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
        job.drop_handles()
        self._ask(job)

    def _expire(self) -> None:
        """Deals with groups that are late, or overdue while no turn was over for as long: else others go first.

        Those of which enough is there make do with it. The others are asked for again if they are overdue.
        """
        now, settings = time.monotonic(), self._settings
        is_silent = now - self._heard_at > settings.timeout_s
        for job in list(self._generating):
            is_overdue = is_silent and now - job.asked_at > settings.timeout_s
            is_late = is_overdue or 0 < settings.late_s < now - job.asked_at
            if is_late and job.redundant and not job.is_cut and self._num_done(job) >= job.group_size:
                job.is_cut, job.asked_at = True, now  # the engine has as long to give up what is under way
                job.drop_handles()
            elif is_overdue and self._wants_turns(job):
                self._lost(job, f"was not complete after {settings.timeout_s:g} s")

    def _wants_turns(self, job: Job) -> bool:
        """Whether the engine has something to do for it; replies have deadlines of their own."""
        return bool(job.handles) or any(again.job is job for again in self._postponed)

    def _num_done(self, job: Job) -> int:
        """Completions of which all is there; the scheduler has some of them while others of the same request go on."""
        done = sum(bool(track.finish_reason) for track in job.tracks)
        return done if self._replies else done + sum(handle.num_done for handle in job.handles)

    # ---- scoring

    def _advance(self, job: Job) -> None:
        """Has rewards computed once there are completions enough, and ends the job once there are rewards enough."""
        wanted = job.wanted()
        if not all(track.finish_reason for track in wanted):
            self._generating.add(job)  # again, where a reward could not be computed
            return
        self._generating.discard(job)
        for track in wanted:
            if not track.is_asked:
                track.is_asked = True
                self._ask_reward(job, track)
        if all(track.is_settled for track in wanted):
            self._finish(job, wanted)

    def _ask_reward(self, job: Job, track: Track) -> None:
        attempt, future = job.attempt, self._pool.submit(job.prompt, track.text)
        future.add_done_callback(lambda _: self._events.put(lambda: self._scored(job, attempt, track, future)))

    def _scored(self, job: Job, attempt: int, track: Track, future: Future[Scores | None]) -> None:
        if attempt != job.attempt or job.future.done():
            return
        track.scores, track.is_settled = future.result(0.0), True
        self._advance(job)

    def _finish(self, job: Job, tracks: list[Track]) -> None:
        job.drop_handles()
        job.handles.clear()
        if job.redundant:
            self._metrics.count("rollout/redundant_used", sum(track.is_redundant for track in tracks))
        samples = [track.sample(self._reward(track, job.shaped)) for track in tracks]
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

"""The rollout loop: prompts in their order to groups in a queue, not further ahead of the learner than allowed.

Admission bounds staleness (2505.24298, section 4.1): with B groups a batch, a group is begun only while fewer than
(max_staleness + updates + 1) B were begun and not discarded. Groups enter the queue in the order of their prompts,
however long each takes. So batch u holds groups B u to B (u + 1) - 1, none of which was begun before version
u - max_staleness: the bound is exact, no finished work is dropped, long completions are trained on as often as they are
made, and what was learned from is all prompts before one position.

Threading: the loop has a thread, and so has inserting, which waits for room.
"""

from __future__ import annotations

import math
import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import NamedTuple

import numpy as np

from seedx.checks import ConfigError
from seedx.envs.text.curriculum import Curriculum
from seedx.envs.text.generation import Generation, seed_of
from seedx.envs.text.group import Group
from seedx.envs.text.group_queue import GroupQueue
from seedx.envs.text.prompts import PromptSource
from seedx.envs.text.task import Prompt
from seedx.grpo_config import GrpoConfig
from seedx.inference.decoder import Decoder
from seedx.learner.advantages import spread
from seedx.learner.text_batch import used
from seedx.metrics import Metrics
from seedx.threads import Crew

_POLL_S = 0.1


class Pace(NamedTuple):
    """How far rollouts may be ahead of the learner.

    Attributes:
        batch_size: B, groups of an update.
        max_staleness: Versions between a token's weights and those that the update begins with.
    """

    batch_size: int
    max_staleness: int

    def allowed(self, updates: int) -> int:
        """Groups that may have been begun after so many updates, those that were discarded aside."""
        return (self.max_staleness + updates + 1) * self.batch_size


class Rollouts:
    """Keeps a queue filled with groups.

    Args:
        generation: Makes them; at work.
        scheduler: That it uses.
        source: Of the prompts.
        encode: The prompt as the model reads it; None if it is too long.
        pace: How far ahead.
        config: Which groups are of use.
        seed: Of the run.
        position: Of the first prompt that was not learned from.
        updates: So far.
        rewards: Of the completions before, the newest last.
        window: Completions that the mean reward is taken over.
        told: Called with every finished group.
        metrics: Where figures go.
        crew: Runs the threads.
        curriculum: Which prompts are passed over; None: none is.
    """

    def __init__(
        self,
        generation: Generation,
        scheduler: Decoder,
        source: PromptSource,
        encode: Callable[[Prompt], tuple[int, ...] | None],
        *,
        pace: Pace,
        config: GrpoConfig,
        seed: int,
        position: int,
        updates: int,
        rewards: Sequence[float],
        window: int,
        told: Callable[[Group], None],
        metrics: Metrics,
        crew: Crew,
        curriculum: Curriculum | None = None,
    ) -> None:
        self._generation, self._scheduler, self._source, self._encode = generation, scheduler, source, encode
        self._pace, self._config, self._seed, self._curriculum = pace, config, seed, curriculum
        self._position, self._updates = position, updates
        self._begun = updates * pace.batch_size  # and not discarded
        self._discarded_in_a_row = 0
        self._order: deque[Future[Group]] = deque()  # bounded by the pace
        self._finished: queue.SimpleQueue[Group] = queue.SimpleQueue()  # likewise
        self._changed = threading.Condition()
        self._told, self._metrics, self._crew = told, metrics, crew
        self._rewards = deque([(-1, reward) for reward in rewards], maxlen=window)  # with the prompt's position

    def start(self, groups: GroupQueue) -> None:
        """Begins; `groups` is where they go."""
        self._groups = groups
        self._crew.spawn("rollouts", self._loop)
        self._crew.spawn("insertion", self._insert_loop)

    def advance(self, updates: int) -> None:
        """The learner has published this version."""
        with self._changed:
            self._updates = updates
            self._changed.notify()

    def rewards(self, before: float = math.inf) -> list[float]:
        """Of the newest completions; of those of prompts before a position, after which a resume generates anew."""
        with self._changed:
            return [reward for position, reward in self._rewards if position < before]

    def mean_reward(self) -> tuple[float, int]:
        """Over the newest completions, and how many these are; NaN if there are none."""
        rewards = self.rewards()
        return (float(np.mean(rewards)) if rewards else math.nan), len(rewards)

    def _loop(self) -> None:
        while not self._crew.stop.is_set():
            self._admit()
            with self._changed:
                self._changed.wait_for(lambda: self._is_next_done() or self._may_begin() > 0, _POLL_S)
            while self._is_next_done():
                self._finish(self._order.popleft().result(0.0))

    def _is_next_done(self) -> bool:
        return bool(self._order) and self._order[0].done()

    def _may_begin(self) -> int:
        """How many groups. Without staleness, what replaces others begins together, in each run alike."""
        if self._order and not self._pace.max_staleness:
            return 0
        return max(self._pace.allowed(self._updates) - self._begun, 0)

    # ---- beginning

    def _admit(self) -> None:
        with self._changed:
            count = self._may_begin()
        if not count:
            return
        prompts = [self._next_prompt() for _ in range(count)]
        with self._scheduler.together():
            futures = [
                self._generation.begin(position, prompt, tokens, seed_of(self._seed, position))
                for position, prompt, tokens in prompts
            ]
        self._begun += count
        self._metrics.count("rollout/begun_groups", count)
        for future in futures:
            self._order.append(future)
            future.add_done_callback(self._wake)

    def _wake(self, _: Future[Group]) -> None:
        with self._changed:
            self._changed.notify()

    def _next_prompt(self) -> tuple[int, Prompt, tuple[int, ...]]:
        """The next prompt that is neither left out by the curriculum nor too long."""
        too_long = 0  # in a row
        while too_long < 2 * self._source.num_prompts:  # a whole epoch is among them, wherever this one is
            position, (_, uid, prompt) = self._position, self._source.at(self._position)
            self._position += 1
            if self._curriculum is not None and not self._curriculum.takes(position, uid):
                too_long = 0  # this one was answered before, so it fits
                self._metrics.count("rollout/skipped_prompts")
                continue
            tokens = self._encode(prompt)
            if tokens is not None:
                if self._curriculum is not None:
                    self._curriculum.begin(position, uid)
                return position, prompt, tokens
            too_long += 1
            self._metrics.count("rollout/too_long_prompts")
        raise ConfigError(
            f"all {self._source.num_prompts:,} prompts are longer than --rollout.max-prompt-tokens; raise it."
        )

    # ---- finishing

    def _finish(self, group: Group) -> None:
        """The next group in the order is scored."""
        rewards = np.array([sample.reward for sample in group.samples])
        scored = rewards[~np.isnan(rewards)]
        truncated = np.array([sample.finish_reason == "length" for sample in group.samples])
        if self._curriculum is not None:
            self._curriculum.answered(scored)
        has_spread = bool(spread(np.where(used(rewards, truncated, self._config), rewards, np.nan)[None])[0])
        self._record(group, scored, has_spread)
        self._told(group)
        if len(scored) and (has_spread or not self._config.dynamic_sampling):
            self._discarded_in_a_row = 0
            self._finished.put(group)
            return
        self._begun -= 1  # another one takes its place
        self._discarded_in_a_row += 1
        self._metrics.count("rollout/discarded_groups")
        if self._discarded_in_a_row >= self._config.max_discarded * self._pace.batch_size:
            what, remedy = "no reward could be computed", "See above why, and mend the task or its --reward settings."
            if len(scored):
                what = "all rewards of each were equal"
                remedy = (
                    "Choose harder or easier prompts or another reward, or --grpo.no-dynamic-sampling to train on "
                    "such groups too."
                )
            raise ConfigError(
                f"no signal is left: the last {self._discarded_in_a_row} groups were left out, {what}. {remedy}"
            )

    def _record(self, group: Group, scored: np.ndarray, has_spread: bool) -> None:
        metrics = self._metrics
        with self._changed:
            self._rewards.extend((group.position, reward) for reward in scored.tolist())
        metrics.count("rollout/scored_groups")
        metrics.average("rollout/zero_spread", not has_spread)
        for sample in group.samples:
            for name, score in (sample.scores or {}).items():
                metrics.average(f"reward/{name}", score)
            metrics.average("rollout/truncated", sample.finish_reason == "length")
        if len(scored):
            metrics.average("reward_interval_mean", float(scored.mean()))
        metrics.observe("rollout/completion_tokens", np.array([len(sample.tokens) for sample in group.samples]))

    def _insert_loop(self) -> None:
        stopped = self._crew.stop.is_set
        while not stopped():
            try:
                group = self._finished.get(timeout=_POLL_S)
            except queue.Empty:
                self._groups.put_lost(stopped)
                continue
            self._groups.put(group, stopped)

"""Scores of a policy on prompts that it does not train on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import NamedTuple

import numpy as np

from seedx.envs.text.generation import Generation, seed_of
from seedx.envs.text.group import Group
from seedx.envs.text.task import Prompt
from seedx.inference.scheduler import Scheduler

AT_A_TIME = 256  # completions
_POLL_S = 0.5
_SALT = 0x48454C44  # no seed of training is one of evaluation


class HeldOut(NamedTuple):
    """Rewards of completions.

    Attributes:
        prompts: P of them.
        groups: Of each prompt, n completions.
        rewards: float64 `[P, n]`; NaN: could not be scored.
    """

    prompts: Sequence[Prompt]
    groups: Sequence[Group]
    rewards: np.ndarray

    @property
    def by_prompt(self) -> np.ndarray:
        """Mean reward of each prompt's completions, `[P]`, without those of which none could be scored."""
        counts = np.count_nonzero(~np.isnan(self.rewards), axis=1)
        return np.nansum(self.rewards, axis=1)[counts > 0] / counts[counts > 0]

    @property
    def mean(self) -> float:
        """Mean reward; NaN if nothing could be scored."""
        return float(np.mean(self.by_prompt)) if len(self.by_prompt) else float("nan")

    @property
    def interval(self) -> tuple[float, float]:
        """A 95 % interval of the mean, by the bootstrap over prompts (1,000 draws, the same each time)."""
        means = self.by_prompt
        if not len(means):
            return float("nan"), float("nan")
        draws = np.random.default_rng(0).integers(0, len(means), (1000, len(means)))
        low, high = np.percentile(means[draws].mean(axis=1), [2.5, 97.5])
        return float(low), float(high)

    @property
    def solved(self) -> float:
        """pass@1: the part of the completions with a reward of at least 1."""
        scored = self.rewards[~np.isnan(self.rewards)]
        return float(np.mean(scored >= 1.0)) if len(scored) else float("nan")


def held_out(
    generation: Generation,
    scheduler: Scheduler,
    prompts: Sequence[Prompt],
    encode: Callable[[Prompt], tuple[int, ...] | None],
    *,
    num_samples: int,
    seed: int,
    stop: Callable[[], bool],
    progress: Callable[[str], None],
) -> HeldOut | None:
    """Completions of prompts, and their rewards; None if it was stopped.

    Args:
        generation: At work.
        scheduler: That it uses.
        prompts: Too long ones are left out.
        encode: The prompt as the model reads it; None if it is too long.
        num_samples: Completions of each prompt.
        seed: Of the run.
        stop: Whether to stop.
        progress: Told now and then how many prompts are done, while others are not.
    """
    kept = [(prompt, tokens) for prompt in prompts if (tokens := encode(prompt)) is not None]
    at_a_time, groups = max(AT_A_TIME // num_samples, 1), []
    for first in range(0, len(kept), at_a_time):
        with scheduler.together():
            futures = [
                generation.begin(i, prompt, tokens, seed_of(seed, _SALT, i), num_samples, shaped=False)
                for i, (prompt, tokens) in enumerate(kept[first : first + at_a_time], first)
            ]
        for future in futures:
            if (group := _wait(future, stop)) is None:
                return None
            groups.append(group)
        if len(groups) < len(kept):
            progress(f"held-out: {len(groups):,} of {len(kept):,} prompts are done")
    rewards = np.array([[sample.reward for sample in group.samples] for group in groups], np.float64)
    return HeldOut([prompt for prompt, _ in kept], groups, rewards.reshape(len(groups), num_samples))


def _wait(future: Future[Group], stop: Callable[[], bool]) -> Group | None:
    while not stop():
        try:
            return future.result(_POLL_S)
        except TimeoutError:
            continue
    return None

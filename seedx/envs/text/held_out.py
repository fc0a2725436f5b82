"""Scores of a policy on prompts that it does not train on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import NamedTuple

import numpy as np

from seedx.envs.text.generation import Generation, seed_of
from seedx.envs.text.group import Group
from seedx.envs.text.task import Prompt
from seedx.inference.decoder import Decoder

AT_A_TIME = 256  # completions
_POLL_S = 0.5
_SALT = 0x48454C44  # no seed of training is one of evaluation


class Mean(NamedTuple):
    """A mean over prompts and its 95 % interval."""

    mean: float
    low: float
    high: float


def bootstrap(by_prompt: np.ndarray) -> Mean:
    """By 1,000 draws of as many prompts, the same each time.

    Of differences between two scores of the same prompts, it is the paired bootstrap.

    Args:
        by_prompt: `[P]`; NaN counts for nothing. All NaN where nothing is left.
    """
    values = by_prompt[~np.isnan(by_prompt)]
    if not len(values):
        return Mean(float("nan"), float("nan"), float("nan"))
    draws = np.random.default_rng(0).integers(0, len(values), (1000, len(values)))
    low, high = np.percentile(values[draws].mean(axis=1), [2.5, 97.5])
    return Mean(float(values.mean()), float(low), float(high))


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
        """Mean reward of each prompt's completions, `[P]`; NaN where none could be scored."""
        counts = np.count_nonzero(~np.isnan(self.rewards), axis=1)
        return np.where(counts > 0, np.nansum(self.rewards, axis=1) / np.maximum(counts, 1), np.nan)

    @property
    def mean(self) -> float:
        """Mean reward; NaN if nothing could be scored."""
        return bootstrap(self.by_prompt).mean

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % interval of the mean."""
        return bootstrap(self.by_prompt)[1:]

    @property
    def solved(self) -> float:
        """pass@1: the part of the completions with a reward of at least 1."""
        scored = self.rewards[~np.isnan(self.rewards)]
        return float(np.mean(scored >= 1.0)) if len(scored) else float("nan")


def summary_of(before: np.ndarray, after: np.ndarray) -> dict[str, float | list[float] | None]:
    """What summary.json says of the scores of each prompt before and after learning; empty: not measured."""
    gain = bootstrap(after - before) if len(before) == len(after) > 0 else None
    known = gain is not None and not np.isnan(gain.mean)
    return {
        "held_out_reward_before": bootstrap(before).mean if len(before) else None,
        "held_out_reward_after": bootstrap(after).mean if len(after) else None,
        "held_out_gain": gain.mean if gain and known else None,
        "held_out_gain_interval": [gain.low, gain.high] if gain and known else None,
    }


def held_out(
    generation: Generation,
    scheduler: Decoder,
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

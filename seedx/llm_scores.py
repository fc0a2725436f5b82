"""What an LLM run scores on prompts it does not learn from: before its first update, in between, after its last."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from seedx.envs.text.generation import Generation
from seedx.envs.text.held_out import held_out, summary_of
from seedx.inference.decoder import Decoder
from seedx.llm_config import LlmConfig
from seedx.llm_prompts import first_prompts, prompts_of
from seedx.llm_setup import Setup


class Scores:
    """Held-out scores of a run; for the learner's thread.

    Args:
        config: Of the run.
        setup: Of the run.
        scheduler: That generates.
        generation: That scores.
        before: Those before the first update, of an earlier session; empty: there are none.
        say: Told how far it is.

    Attributes:
        before: Mean reward of each prompt, float64 `[prompts]`, NaN where none could be scored; empty: not measured.
    """

    def __init__(
        self,
        config: LlmConfig,
        setup: Setup,
        scheduler: Decoder,
        generation: Generation,
        before: Sequence[float],
        say: Callable[[str], None],
    ) -> None:
        self._config, self._setup = config, setup
        self._scheduler, self._generation = scheduler, generation
        self.before, self._after = np.array(before), np.array([])
        self._say = say

    def begin(self, stop: Callable[[], bool]) -> None:
        """Scores the model before the first update."""
        self.before = self._score("before the first update", stop)

    def between(self, updates: int, stop: Callable[[], bool]) -> float | None:
        """The mean reward after so many updates; None: there is nothing to score, or it is to stop meanwhile."""
        scores = self._score(f"after {updates:,} updates", stop)
        return float(np.nanmean(scores)) if len(scores) else None

    def end(self, stop: Callable[[], bool]) -> None:
        """Scores the model after the last update."""
        self._after = self._score("after the last update", stop)

    def summary(self) -> dict[str, Any]:
        """For summary.json."""
        return summary_of(self.before, self._after)

    def _score(self, when: str, stop: Callable[[], bool]) -> np.ndarray:
        config, task = self._config.held_out, self._config.task
        if not config.num_prompts:
            return np.array([])
        prompts = first_prompts(prompts_of(self._setup.task, task, "test"), task, "test", config.num_prompts)
        if not prompts:
            return np.array([])
        result = held_out(
            self._generation,
            self._scheduler,
            prompts,
            self._setup.encode,
            num_samples=config.num_samples,
            seed=self._config.seed,
            stop=stop,
            progress=self._say,
        )
        if result is None or math.isnan(result.mean):
            return np.array([])
        low, high = result.interval
        means = f"{result.mean:.3f} ({low:.3f} to {high:.3f}) over {len(result.groups)} prompts"
        self._say(f"held-out reward {when}: {means}")
        return result.by_prompt

"""The task of the GRPO benchmarks. Reward workers load it, without jax."""

from __future__ import annotations

import os
import random
import time

from seedx.envs.text.task import Prompt, Split

PROMPT_TOKENS = 16
SLEEP_S = "SEEDX_BENCHMARK_SLEEP_S"  # how workers are told how long a reward takes
LETTERS = [chr(48 + i) for i in range(64)]


class RandomPrompts:
    """Prompts of 16 random letters; the reward is how often one letter occurs."""

    def __init__(self) -> None:
        draw = random.Random(0)
        self._prompts = [Prompt("".join(draw.choices(LETTERS, k=PROMPT_TOKENS))) for _ in range(999)]

    def prompts(self, split: Split) -> list[Prompt]:  # noqa: ARG002
        return self._prompts

    def reward(self, prompt: Prompt, completion: str) -> float:  # noqa: ARG002
        return float(completion.count("A"))


class Sleeping(RandomPrompts):
    """The same with a verifier that sleeps."""

    reward_waits = True

    def reward(self, prompt: Prompt, completion: str) -> float:
        time.sleep(float(os.environ.get(SLEEP_S, "0")))
        return super().reward(prompt, completion)

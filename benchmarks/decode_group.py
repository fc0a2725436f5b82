"""`group`: 16 samples of a prompt of 512 tokens cost one prefill, tiny model.

Times are from submission to the last sample's first token, so of the prompt, its copies in slots and one dispatch. A
request of one sample is the least it can cost; 16 requests of the same prompt, without a prefix cache, is what it would
cost if samples shared nothing.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from functools import partial

import numpy as np
from decode_setup import (
    TINY,
    random_prompts,
    ready_engine,
    result,
    result_load,
    start_scheduler,
    take_turns,
    tiny_params,
)

from seedx.inference.engine import Engine, LongPrompt, Prefix
from seedx.inference.requests import Request
from seedx.inference.scheduler import Scheduler
from seedx.weights import Weights

SAMPLES, PROMPT_TOKENS, LENGTH, STEPS, ROUNDS = 16, 512, 1024, 1, 15


class CountingEngine(Engine):
    """Counts the prompt tokens that it computes."""

    prompt_tokens = 0

    def prefill(self, weights: Weights, prompts: Sequence[np.ndarray]) -> list[Prefix]:
        self.prompt_tokens += sum(len(prompt) - 1 for prompt in prompts)
        return super().prefill(weights, prompts)

    def extend(self, weights: Weights, long: LongPrompt) -> None:
        before = long.done
        super().extend(weights, long)
        self.prompt_tokens += long.done - before


def run(_: argparse.Namespace) -> None:
    """Rounds of one sample, 16 samples and 16 requests."""
    params = tiny_params()
    engine = ready_engine(TINY, params, SAMPLES, LENGTH, STEPS, CountingEngine)
    assert isinstance(engine, CountingEngine)
    scheduler = start_scheduler(engine, params)
    (prompt,) = random_prompts(TINY.vocab_size, [PROMPT_TOKENS])
    contenders = {"one_sample": (1, 1), "group": (1, SAMPLES), "requests": (SAMPLES, 1)}
    for name, (requests, samples) in contenders.items():
        before = engine.prompt_tokens
        seconds_to_first_tokens(scheduler, prompt, requests, samples)
        result(f"group_prompt_tokens_{name}", engine.prompt_tokens - before, "tokens")
    seconds = take_turns(
        {name: partial(seconds_to_first_tokens, scheduler, prompt, *counts) for name, counts in contenders.items()},
        ROUNDS,
    )
    scheduler.close()
    for name, values in seconds.items():
        result(f"group_ms_{name}", values * 1e3, "ms")
    result("group_over_one_sample", seconds["group"] / seconds["one_sample"], "of one sample's time")
    result("group_over_requests", seconds["group"] / seconds["requests"], "of the requests' time")
    result_load()


def seconds_to_first_tokens(scheduler: Scheduler, prompt: tuple[int, ...], requests: int, samples: int) -> float:
    """Seconds until all samples of all requests have their only token."""
    start = time.perf_counter()
    asked = [Request(prompt, 1, seed=i, num_samples=samples) for i in range(requests)]
    for handle in [scheduler.submit(request) for request in asked]:
        assert len(handle.result()) == samples
    return time.perf_counter() - start

"""`swap`: how long new weights hold decoding up: 32 slots of SmolLM2-135M, one step a dispatch, float32.

What counts is the time between deliveries, of which each dispatch has one. Around each `publish`, which another thread
calls, the longest of them is compared with the median of the whole run; stretches without a swap show what the machine
does by itself. The check of the new weights, with `--int8` also quantising and measuring them, is on the publisher's
thread, and shares the processors with decoding.
"""

from __future__ import annotations

import argparse
import time

import jax
import jax.numpy as jnp
import numpy as np
from decode_setup import random_prompts, ready_engine, result, result_load, smollm2, start_scheduler

from seedx.inference.requests import Delta, Request
from seedx.inference.scheduler import Scheduler
from seedx.types import Tree

SLOTS, PROMPT_TOKENS, LENGTH, SWAPS, STEPS_BETWEEN = 32, 16, 256, 6, 24


def run(plan: argparse.Namespace) -> None:
    """A run with a swap in every second stretch."""
    config, params = smollm2()
    scheduler = start_scheduler(ready_engine(config, params, SLOTS, LENGTH, steps=1, int8=plan.int8), params)
    others = [jax.tree.map(jnp.copy, params) for _ in range(2)]
    deliveries: list[tuple[float, int]] = []  # when, and the version

    def listener(delta: Delta) -> None:
        if len(delta.versions):
            deliveries.append((time.perf_counter(), int(delta.versions[-1])))

    prompts = random_prompts(config.vocab_size, [PROMPT_TOKENS] * SLOTS)
    handles = [scheduler.submit(Request(prompts[0], LENGTH - PROMPT_TOKENS, temperature=0.0), listener)]
    handles += [scheduler.submit(Request(prompt, LENGTH - PROMPT_TOKENS, temperature=0.0)) for prompt in prompts[1:]]
    wait_for(deliveries, STEPS_BETWEEN)
    begins, publish_s = [], []
    for version in range(1, SWAPS + 1):
        begins.append(len(deliveries))
        publish_s.append(seconds_to_publish(scheduler, version, others[version % 2]))
        wait_for(deliveries, begins[-1] + STEPS_BETWEEN)
    for handle in handles:
        handle.cancel()
    scheduler.close()
    report(deliveries, begins, publish_s)


def seconds_to_publish(scheduler: Scheduler, version: int, params: Tree) -> float:
    start = time.perf_counter()
    scheduler.publish(version, params)
    return time.perf_counter() - start


def wait_for(deliveries: list, count: int) -> None:
    while len(deliveries) < count:
        time.sleep(0.01)


def report(deliveries: list[tuple[float, int]], begins: list[int], publish_s: list[float]) -> None:
    """Gaps around swaps, and in stretches of the same length before the next swap."""
    times, versions = np.array(deliveries).T
    gaps = np.diff(times)
    half = STEPS_BETWEEN // 2
    around = [gaps[begin - 1 : begin - 1 + half].max() for begin in begins]
    quiet = [gaps[begin - 1 + half : begin - 1 + STEPS_BETWEEN].max() for begin in begins]
    assert all(versions[begin + half] == i + 1 for i, begin in enumerate(begins)), "a swap came late"
    median = float(np.median(gaps))
    result("swap_median_step_ms", median * 1e3, "ms")
    result("swap_longest_around_a_swap", np.array(around) / median, "median steps")
    result("swap_longest_without_a_swap", np.array(quiet) / median, "median steps")
    result("swap_publish_ms", np.array(publish_s) * 1e3, "ms")
    result_load()

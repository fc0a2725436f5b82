"""`mixed`: how many slots are in use while requests wait, with prompts and completions of mixed lengths.

128 requests at once for 32 slots of the tiny model; lengths are log-uniform. Counted from the first dispatch to the
last request's placement: slots in use at a dispatch, whose steps cost the same however many they are; slots in use by
time, from insertion to the last token; the share of the time in which prompts are computed. The engine waits for each
computation here, so that the host's clock is the device's.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

import jax
import numpy as np
from decode_setup import (
    TINY,
    log_uniform,
    random_prompts,
    ready_engine,
    result,
    result_load,
    start_scheduler,
    tiny_params,
)

from seedx.inference.engine import Engine, LongPrompt, Placement, Prefix, StepResult
from seedx.inference.requests import Request
from seedx.weights import Weights

SLOTS, REQUESTS, LENGTH, STEPS = 32, 128, 2048, 8
LOADS = {  # ranges of prompt and completion tokens
    "mixed": ((16, 1024), (16, 1024)),
    "long_prompts": ((512, 1024), (16, 64)),
}


class WatchedEngine(Engine):
    """Waits for what it launches, and notes when slots are taken and given back."""

    def watch(self) -> None:
        """Begins anew."""
        self.changes: list[tuple[float, int]] = []  # when, and slots in use from then on
        self.dispatches: list[tuple[float, int]] = []
        self.prefills: list[tuple[float, float]] = []  # begin and end
        self.last_placed = 0.0

    def prefill(self, weights: Weights, prompts: Sequence[np.ndarray]) -> list[Prefix]:
        start = time.perf_counter()
        prefixes = super().prefill(weights, prompts)
        jax.block_until_ready([prefix.rows for prefix in prefixes])
        self.prefills.append((start, time.perf_counter()))
        return prefixes

    def extend(self, weights: Weights, long: LongPrompt) -> None:
        start = time.perf_counter()
        super().extend(weights, long)
        jax.block_until_ready(long.staged)
        self.prefills.append((start, time.perf_counter()))

    def insert(self, placements: Sequence[Placement]) -> None:
        super().insert(placements)
        self.last_placed = time.perf_counter()
        self.changes.append((self.last_placed, self.busy))

    def free(self, slots: Sequence[int] | np.ndarray) -> None:
        super().free(slots)
        self.changes.append((time.perf_counter(), self.busy))

    def generate(self, weights: Weights, members: np.ndarray | None = None) -> StepResult:
        self.dispatches.append((time.perf_counter(), self.busy))
        made = super().generate(weights, members)
        jax.block_until_ready(made.packed)
        return made


def run(_: argparse.Namespace) -> None:
    """All loads, one after the other."""
    params = tiny_params()
    engine = ready_engine(TINY, params, SLOTS, LENGTH, STEPS, WatchedEngine)
    assert isinstance(engine, WatchedEngine)
    scheduler = start_scheduler(engine, params)
    for name, (prompt_range, completion_range) in LOADS.items():
        rng = np.random.default_rng(0)
        prompts = random_prompts(TINY.vocab_size, log_uniform(rng, *prompt_range, REQUESTS))
        lengths = log_uniform(rng, *completion_range, REQUESTS)
        engine.watch()
        requests = [Request(prompt, length, seed=0) for prompt, length in zip(prompts, lengths, strict=True)]
        for handle in [scheduler.submit(request) for request in requests]:
            handle.result()
        report(name, engine)
    scheduler.close()
    result_load()


def report(name: str, engine: WatchedEngine) -> None:
    """The figures of a load."""
    first, last = engine.dispatches[0][0], engine.last_placed
    at_dispatch = [busy for when, busy in engine.dispatches if when <= last]
    result(f"{name}_occupancy_at_dispatch", float(np.mean(at_dispatch)) / SLOTS, "of the slots")
    result(f"{name}_occupancy_by_time", mean_over_time(engine.changes, first, last) / SLOTS, "of the slots")
    prompts_s = sum(end - start for start, end in engine.prefills if first <= start < last)
    result(f"{name}_time_of_prompts", prompts_s / (last - first), "of the time")
    result(f"{name}_seconds", last - first, "s")


def mean_over_time(changes: list[tuple[float, int]], first: float, last: float) -> float:
    """The mean of a value that changes at some times, over an interval that begins after the first change."""
    times, values = np.array(changes).T
    ends = np.append(times[1:], last)
    spans = np.clip(ends, first, last) - np.clip(times, first, last)
    return float(spans @ values / (last - first))

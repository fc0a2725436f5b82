"""`latency`: what a verifier that sleeps for L seconds leaves of the throughput, by how stale completions may be.

With T the time of an update without it, at most (staleness + 1) batches are on their way, each for T + L: so the
relative throughput is at most min(1, (staleness + 1) T / (T + L)).
"""

from __future__ import annotations

import argparse
import os
import time

import numpy as np
from decode_setup import result, result_load
from grpo_setup import GROUP_SIZE, GROUPS, Run
from grpo_task import SLEEP_S

from seedx.reward_config import RewardConfig


def run(plan: argparse.Namespace) -> None:
    """All settings, each next to a run without sleep."""
    base = measure(0, 0.0, plan.updates)
    result("grpo_update_without_sleep", base, "s")
    for factor in (1, 2, 5):
        for eta in (0, 1, 2, 4):
            base = measure(0, 0.0, plan.updates)
            took = measure(eta, factor * base, plan.updates)
            bound = min(1.0, (eta + 1) / (1 + factor))
            name = f"grpo_sleep_{factor}T_staleness_{eta}"
            result(f"{name}_relative", base / took, f"of {bound:.3f} possible")
            result(f"{name}_over_bound", base / took / bound, "of the bound")
    result_load()


def measure(eta: int, sleep_s: float, updates: int) -> float:
    """Seconds of an update."""
    os.environ[SLEEP_S] = str(sleep_s)
    concurrency = 2 * (eta + 2) * GROUPS * GROUP_SIZE
    one = Run("grpo_task:Sleeping", eta, 1, RewardConfig(concurrency=concurrency, timeout_s=60.0))
    try:
        for _ in range(eta + 3):
            one.update()
        start = time.perf_counter()
        for _ in range(updates):
            one.update()
        return float(np.float64(time.perf_counter() - start) / updates)
    finally:
        one.close()

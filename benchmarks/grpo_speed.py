"""`speed`: one optimizer step per 64 completions of 64 tokens, against the bare jitted decode and update."""

from __future__ import annotations

import argparse
import json
import subprocess
import time
from functools import partial
from pathlib import Path

import jax
import numpy as np
from decode_setup import random_prompts, result, result_load, take_turns
from decode_tiny import LLAMA, make_scan, time_scan
from grpo_setup import GROUP_SIZE, GROUPS, NEW_TOKENS, TINY, TOKENS, Run, make_learner
from grpo_task import PROMPT_TOKENS

from seedx.envs.text.group import Group, Sample, to_item
from seedx.metrics import Metrics
from seedx.replay.items import Ragged, join

UPDATES = 5  # of a contender's turn


def run(plan: argparse.Namespace) -> None:
    """Rounds of all contenders."""
    jax.config.update("jax_num_cpu_devices", plan.devices)
    runs = {f"seedx_{eta}": Run("grpo_task:RandomPrompts", eta, plan.devices) for eta in (0, 1)}
    sync = runs["seedx_0"]
    contenders = {name: partial(time_updates, one) for name, one in runs.items()}
    bare = Bare(sync)
    contenders["bare"] = bare.time
    contenders["bare_update"] = bare.time_update
    if plan.trl_python:
        contenders["trl"] = partial(time_trl, plan.trl_python)
    seconds = take_turns(contenders, plan.rounds)
    for one in runs.values():
        one.close()
    result_load()
    for name, values in seconds.items():
        result(f"grpo_{name}_tokens_per_s", UPDATES * TOKENS / values, "tokens/s")
    for name in runs:
        result(f"grpo_{name}_over_bare", seconds["bare"] / seconds[name], "of the bare programs")
        if "trl" in seconds:
            result(f"grpo_{name}_over_trl", seconds["trl"] / seconds[name], "of TRL")
    flops = bare.update_flops()
    result("grpo_update_flops", flops / 1e9, "GFLOP")
    result("grpo_update_rate", flops * UPDATES / seconds["bare_update"] / 1e9, "GFLOP/s")


def time_updates(one: Run, updates: int = UPDATES) -> float:
    """Seconds of some updates; a run that stood still has a batch or two ready, which are taken first."""
    for _ in range(2):
        one.update()
    start = time.perf_counter()
    for _ in range(updates):
        one.update()
    return time.perf_counter() - start


def time_trl(python: str) -> float:
    """Seconds of as many updates of TRL's trainer, in an interpreter of its own that has the machine to itself."""
    command = [python, str(Path(__file__).with_name("grpo_trl.py")), json.dumps({"llama": LLAMA, "updates": UPDATES})]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    line = next(line for line in done.stdout.splitlines() if line.startswith("SECONDS "))
    return float(np.median(json.loads(line.removeprefix("SECONDS "))) * UPDATES)


class Bare:
    """The same programs without scheduler, rewards or queue: all completions in one scan, then the update.

    The devices share rows in both.
    """

    def __init__(self, one: Run) -> None:
        self._learner = make_learner(one.setup, one.learner.state.params, lambda *_: None, Metrics())
        self._scan = make_scan(one.setup.mesh)
        prompts = random_prompts(TINY.vocab_size, [PROMPT_TOKENS] * GROUPS * GROUP_SIZE)
        self._prompts = np.array(prompts, np.int32)
        self._items = _items(self._prompts)

    def time(self) -> float:
        """Seconds of some decodes and updates."""
        start = time.perf_counter()
        for _ in range(UPDATES):
            time_scan(self._scan, self._learner.state.params, self._prompts)
            self._learner.step(self._items)
        return time.perf_counter() - start

    def time_update(self) -> float:
        """Seconds of some updates alone."""
        start = time.perf_counter()
        for _ in range(UPDATES):
            self._learner.step(self._items)
        return time.perf_counter() - start

    def update_flops(self) -> float:
        """Of one update: forward and backward, 6 for each parameter and token, and attention.

        Rows hold one text: completions are too long beside their prompts to share them.
        """
        params = sum(leaf.size for leaf in jax.tree.leaves(self._learner.state.params))
        length = PROMPT_TOKENS + NEW_TOKENS
        tokens = GROUPS * GROUP_SIZE * length
        attention = 12 * TINY.num_layers * TINY.num_heads * TINY.head_dim * length * tokens
        return 6.0 * params * tokens + attention


def _items(prompts: np.ndarray) -> Ragged:
    """Groups with random completions."""
    rng = np.random.default_rng(0)

    def sample() -> Sample:
        tokens = rng.integers(0, TINY.vocab_size, NEW_TOKENS).astype(np.int32)
        logprobs = np.full(NEW_TOKENS, -4.0, np.float32)
        ones = np.ones(NEW_TOKENS, bool)
        return Sample(tokens, ones, logprobs, np.zeros(NEW_TOKENS, np.int32), "length", "", None, rng.normal())

    return join(
        [to_item(Group(i, prompts[i * GROUP_SIZE], [sample() for _ in range(GROUP_SIZE)])) for i in range(GROUPS)]
    )

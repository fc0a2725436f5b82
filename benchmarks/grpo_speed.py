"""`speed`: one optimizer step per 64 completions of 64 tokens, against the bare jitted decode and update."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
import time
from functools import partial
from pathlib import Path

import jax
import numpy as np
import tokenizers
from decode_setup import random_prompts, result, result_load, take_turns, tiny_params
from decode_tiny import LLAMA, make_scan, time_scan
from grpo_setup import GROUP_SIZE, GROUPS, LEARNER, NEW_TOKENS, TINY, TOKENS, Run, make_learner
from grpo_task import LETTERS, PROMPT_TOKENS, RandomPrompts

from seedx.envs.text.group import Group, Sample, to_item
from seedx.metrics import Metrics
from seedx.networks.hf_files import save_hf
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
    if plan.tunix_python:
        contenders["tunix"] = partial(time_tunix, plan.tunix_python)
    seconds = take_turns(contenders, plan.rounds)
    for one in runs.values():
        one.close()
    result_load()
    for name, values in seconds.items():
        result(f"grpo_{name}_tokens_per_s", UPDATES * TOKENS / values, "tokens/s")
    for name in runs:
        result(f"grpo_{name}_over_bare", seconds["bare"] / seconds[name], "of the bare programs")
        for peer in seconds.keys() & {"trl", "tunix"}:
            result(f"grpo_{name}_over_{peer}", seconds[peer] / seconds[name], f"of {peer}")
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
    return _peer_seconds(python, "grpo_trl.py", {"llama": LLAMA, "updates": UPDATES})


def time_tunix(python: str) -> float:
    """The same of tunix's learner, which begins with a model in files."""
    with tempfile.TemporaryDirectory() as directory:
        _write_model(Path(directory))
        settings = {
            "model": directory,
            "updates": UPDATES,
            "seed": 0,
            "max_prompt_tokens": PROMPT_TOKENS,
            "max_tokens": NEW_TOKENS,
            "temperature": 1.0,
            "groups": GROUPS,
            "group_size": GROUP_SIZE,
            "clip": 0.2,
            "learning_rate": LEARNER.learning_rate,
            "beta1": LEARNER.beta1,
            "beta2": LEARNER.beta2,
            "epsilon": LEARNER.epsilon,
            "max_grad_norm": LEARNER.max_grad_norm,
        }
        return _peer_seconds(python, "grpo_tunix.py", settings)


def _peer_seconds(python: str, script: str, settings: dict) -> float:
    command = [python, str(Path(__file__).with_name(script)), json.dumps(settings)]
    environment = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"} | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment)
    line = next(line for line in done.stdout.splitlines() if line.startswith("SECONDS "))
    return float(np.median(json.loads(line.removeprefix("SECONDS "))) * UPDATES)


def _write_model(directory: Path) -> None:
    """The tiny model, a tokenizer with a token for each letter, and prompts."""
    save_hf(directory, TINY, tiny_params())
    library = tokenizers.Tokenizer(tokenizers.models.WordLevel({a: i for i, a in enumerate(LETTERS)}, LETTERS[0]))
    library.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    library.save(str(directory / "tokenizer.json"))
    special = {"bos_token": LETTERS[2], "eos_token": LETTERS[1], "pad_token": LETTERS[0]}
    kind = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (directory / "tokenizer_config.json").write_text(json.dumps(kind | special))
    # A letter less: the first token is BOS there.
    lines = [json.dumps({"prompt": prompt.text[1:], "answer": ""}) for prompt in RandomPrompts().prompts("train")]
    (directory / "prompts.jsonl").write_text("\n".join(lines))


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

"""`race`: the time from the same warm start to a mean reward of 0.9 on the default task, against TRL and tunix.

The default command makes a warm start, which all read from the same Hugging Face directory: weights in float32, a
tokenizer of bytes, prompts in the order of the run. All have its hyperparameters: 128 completions a step in groups of
8, one optimizer step each, no divergence from a reference, the mean over all tokens, the same rewards. The goal is a
mean of 0.9 over the last 2,048 completions that were scored, those of groups that are left out included.

What differs is what each library does: seedx leaves out groups whose rewards are all equal and is one version behind
(its defaults); TRL and tunix have neither, so that `seedx_plain` keeps all groups too; tunix's own sampler leaves the
token that ends a completion out of what is learned from.

The clock begins where a run has its model: in seedx with the line "compiling", with an empty compilation cache, its
first checkpoint and evaluation included; in the others with the call of `train`. `later_seconds` are those without
compiling: from the first row of the run's metrics on, and from when the second batch was scored on. A contender has
400 s, and its updates are counted until it is there.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import tokenizers
from decode_setup import result, result_load
from grpo_race_goal import GOAL

from seedx.checkpoint import load_params
from seedx.config_file import from_json
from seedx.envs.text.encode import encode_prompt
from seedx.envs.text.prompts import PromptSource
from seedx.envs.text.strings import Reverse
from seedx.llm_config import LlmConfig
from seedx.networks.hf_files import save_hf
from seedx.networks.model_source import open_model
from seedx.runlog import read_rows

LIMIT_S = 400.0
_INTERVAL_S = 0.25  # between the rows that tell when seedx was there
_CPU = os.environ | {"JAX_PLATFORMS": "cpu"}
_ROOT = Path(__file__).parent.parent
_LOCAL = [sys.executable, str(_ROOT / "launch" / "local.py"), "--agent", "grpo", "--metrics.no-tensorboard"]


def run(plan: argparse.Namespace) -> None:
    """The warm start, then each contender by itself."""
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch)
        settings = warm_up(directory, plan.seed)
        found = {
            "seedx": time_seedx(directory / "seedx", settings),
            "seedx_plain": time_seedx(directory / "seedx_plain", settings, "--grpo.no-dynamic-sampling"),
        }
        for name, python in (("trl", plan.trl_python), ("tunix", plan.tunix_python)):
            if python:
                found[name] = time_peer(python, f"grpo_race_{name}.py", settings)
    result_load()
    for name, figures in found.items():
        tell(name, figures, found["seedx"])


def warm_up(directory: Path, seed: int) -> dict[str, Any]:
    """Writes the model that the default command makes of the task's answers to `directory / "model"`; the settings."""
    warm, model = directory / "warm", directory / "model"
    command = [*_LOCAL, "--steps", "1", "--seed", str(seed), "--run-dir", str(warm)]
    subprocess.run(command, check=True, env=_CPU)
    for newer in (warm / "checkpoints").iterdir():
        if newer.name != "0":
            shutil.rmtree(newer)
    checkpoint = load_params(warm)
    config = from_json(json.dumps(checkpoint.metadata["config"]))
    assert isinstance(config, LlmConfig)
    tiny = open_model(config.model)
    save_hf(model, tiny.config, checkpoint.params)
    write_tokenizer(model, tiny.tokenizer)
    source = PromptSource(Reverse().prompts("train"), seed)
    prompts = [source.at(position).prompt for position in range(source.num_prompts)]
    lines = [json.dumps({"prompt": prompt.text, "answer": prompt.answer}) for prompt in prompts]
    (model / "prompts.jsonl").write_text("\n".join(lines))
    longest = max(len(encode_prompt(prompt, tiny.tokenizer, None)) for prompt in prompts)
    return settings_of(config, model, longest)


def settings_of(config: LlmConfig, model: Path, max_prompt_tokens: int) -> dict[str, Any]:
    """What the others are told: the hyperparameters of the default command."""
    learner = config.learner
    return {
        "model": str(model),
        "limit_s": LIMIT_S,
        "seed": config.seed,
        "window": config.metrics.return_window,
        "max_prompt_tokens": max_prompt_tokens,
        "max_tokens": Reverse.max_tokens,
        "temperature": config.rollout.temperature,
        "groups": learner.batch_size,
        "group_size": config.grpo.group_size,
        "clip": config.grpo.clip_low,
        "learning_rate": learner.learning_rate,
        "beta1": learner.beta1,
        "beta2": learner.beta2,
        "epsilon": learner.epsilon,
        "max_grad_norm": learner.max_grad_norm,
    }


def write_tokenizer(model: Path, tokenizer: Any) -> None:
    """tokenizer.json and what names its special tokens; prompts begin with BOS."""
    library = tokenizers.Tokenizer.from_str(tokenizer._library.to_str())
    named = {"bos_token": tokenizer.bos_id, "eos_token": tokenizer.eos_ids[0], "pad_token": tokenizer.pad_id}
    texts = {name: library.id_to_token(index) for name, index in named.items()}
    bos = texts["bos_token"]
    library.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"{bos} $A", special_tokens=[(bos, tokenizer.bos_id)]
    )
    library.save(str(model / "tokenizer.json"))
    kind = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (model / "tokenizer_config.json").write_text(json.dumps(kind | texts))


def time_seedx(run_dir: Path, settings: dict[str, Any], *flags: str) -> dict[str, Any]:
    """The default command from the warm start on: from when it begins to compile, with an empty cache."""
    command = [
        *(*_LOCAL, "--config", str(_ROOT / "configs" / "grpo.py"), "--model", settings["model"]),
        *("--warm-start.reward", "0", "--seed", str(settings["seed"]), "--run-dir", str(run_dir)),
        *("--stop-at-reward", str(GOAL), "--seconds", str(LIMIT_S), "--metrics.interval-s", str(_INTERVAL_S), *flags),
    ]
    environment = _CPU | {"XDG_CACHE_HOME": f"{run_dir}_cache"}
    begins = {"compiling": 0.0, "grpo on ": 0.0}  # what the lines start with
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        for line in process.stdout:
            begins |= {start: time.perf_counter() for start in begins if line.startswith(start)}
            print(line, end="", flush=True)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} failed with exit code {process.returncode}.")
    rows = read_rows(run_dir / "metrics.jsonl")
    whole = (row for row in rows if row.get("reward_completions") == settings["window"])
    reached = next((row for row in whole if row["reward_mean"] >= GOAL), None)
    last = reached or rows[-1]
    later = last["seconds"] - rows[0]["seconds"]
    return {
        "seconds": begins["grpo on "] - begins["compiling"] + _INTERVAL_S + later,
        "later_seconds": later,
        "updates": last["updates"],
        "mean": last.get("reward_mean", 0.0),
        "reached": reached is not None,
    }


def time_peer(python: str, script: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Another library in an interpreter of its own: from the call of its trainer on."""
    command = [python, str(Path(__file__).with_name(script)), json.dumps(settings)]
    environment = {name: text for name, text in _CPU.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment)
    line = next(line for line in done.stdout.splitlines() if line.startswith("RACE "))
    print(script, line, flush=True)
    return json.loads(line.removeprefix("RACE "))


def tell(name: str, figures: dict[str, Any], ours: dict[str, Any]) -> None:
    """Prints the figures of a contender; of one that was not there in time they are lower bounds."""
    least = "" if figures["reached"] else f", at least: its mean reward was {figures['mean']:.3f} then"
    result(f"race_{name}_seconds", figures["seconds"], f"s{least}")
    result(f"race_{name}_later_seconds", figures["later_seconds"], f"s without compiling{least}")
    result(f"race_{name}_updates", figures["updates"], f"updates{least}")
    if figures is not ours and ours["reached"]:
        result(f"race_seedx_over_{name}", figures["seconds"] / ours["seconds"], f"times as fast{least}")

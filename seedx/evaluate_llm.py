"""Scores the newest checkpoint of a language model's run on prompts that it was not trained on."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax

from seedx.checkpoint import load_params
from seedx.checks import ConfigError, require
from seedx.config_file import from_json
from seedx.envs.text.held_out import HeldOut, held_out
from seedx.envs.text.task import Prompt
from seedx.llm_config import LlmConfig
from seedx.llm_parts import make_generation, make_scheduler
from seedx.llm_prompts import first_prompts, prompts_of
from seedx.llm_setup import Setup, caster, layout_of, set_up
from seedx.metrics import Metrics
from seedx.threads import Crew
from seedx.weights import Weights

_SHOWN = 5


def evaluate_llm(
    run_dir: Path, *, task: str | None, num_prompts: int, num_samples: int, temperature: float | None, seed: int
) -> dict[str, Any]:
    """The figures for evaluation.json; all completions go to RUN_DIR/evaluation.jsonl, some to the terminal.

    Args:
        run_dir: Of the run.
        task: Another one than the run's.
        num_prompts: Of the test split.
        num_samples: Completions of each.
        temperature: That tokens are drawn at; None: the run's.
        seed: Of the completions.

    Raises:
        ConfigError: there is no checkpoint, or it does not fit the model, the task has no test prompts, all are too
            long or none can be scored, or the temperature is none.
    """
    require(
        temperature is None or 0 <= temperature < math.inf,
        f"--temperature ({temperature}) must be finite and not negative; 0: greedy.",
    )
    checkpoint = load_params(run_dir)
    config = from_json(json.dumps(checkpoint.metadata["config"]))  # what the parameters were trained with
    assert isinstance(config, LlmConfig)
    samples = dataclasses.replace(config.held_out, num_prompts=num_prompts, num_samples=num_samples)
    unshaped = dataclasses.replace(config.grpo, overlong_tokens=0)
    rollout = config.rollout
    if task not in (None, config.task):  # whose prompts may be longer than those of the run
        rollout = dataclasses.replace(rollout, max_prompt_tokens=0)
    config = dataclasses.replace(config, task=task or config.task, held_out=samples, grpo=unshaped, rollout=rollout)
    setup, initial = set_up(config, lambda _: None)  # which prompts are not trained on does not matter here
    del initial  # there is no room for both
    prompts = first_prompts(prompts_of(setup.task, config.task, "test"), config.task, "test", num_prompts)
    require(len(prompts) > 0, f"task {config.task} has no test prompts.")
    if len(prompts) < num_prompts:
        print(f"task {config.task} has {len(prompts):,} test prompts, of {num_prompts:,} asked for; all are used.")
    params = jax.device_put(checkpoint.params, layout_of(setup.config, setup.mesh, config.learner.zero))
    weights = Weights(checkpoint.update, caster(config.learner.dtype)(params))
    found = _held_out(config, setup, prompts, weights, temperature, seed)
    longer = f"{len(prompts) - len(found.groups):,} prompts are longer than the {setup.max_prompt_tokens} tokens that "
    longer += "this run reads"
    require(len(found.groups) > 0, f"all {longer}; evaluate it on another task.")
    if len(found.groups) < len(prompts):
        print(f"{longer}, and are left out.")
    _show(found, setup, run_dir)
    require(not math.isnan(found.mean), f"no completion of task {config.task} could be scored; see the lines above.")
    return {
        "mean": found.mean,
        "interval": found.interval,
        "pass@1": found.solved,
        "num_prompts": len(found.groups),
        "num_samples": num_samples,
        "by_prompt": [None if math.isnan(mean) else mean for mean in found.by_prompt],
        "task": config.task,
        "temperature": config.rollout.temperature if temperature is None else temperature,
        "seed": seed,
        "update": checkpoint.update,
    }


def _held_out(
    config: LlmConfig,
    setup: Setup,
    prompts: Sequence[Prompt],
    weights: Weights,
    temperature: float | None,
    seed: int,
) -> HeldOut:
    """Completions of `config.held_out`; raises what stopped the engine or the rewards."""
    crew, metrics = Crew(), Metrics()
    scheduler = make_scheduler(config, setup, weights, crew)
    generation, pool = make_generation(config, setup, scheduler, metrics, crew, temperature)
    scheduler.start()
    generation.start()
    try:
        found = held_out(
            generation,
            scheduler,
            prompts,
            setup.encode,
            num_samples=config.held_out.num_samples,
            seed=seed,
            stop=crew.stop.is_set,
            progress=partial(print, flush=True),
        )
    finally:
        crew.join(5.0)
        pool.close()
    if found is None:
        if isinstance(crew.failure, ConfigError):
            raise crew.failure
        raise RuntimeError("the evaluation failed.") from crew.failure
    return found


def _show(found: HeldOut, setup: Setup, run_dir: Path) -> None:
    """Writes all completions, and prints some."""
    with (run_dir / "evaluation.jsonl").open("w") as file:
        for i, (prompt, group) in enumerate(zip(found.prompts, found.groups, strict=True)):
            text = setup.tokenizer.decode(group.prompt.tolist())
            for sample in group.samples:
                reward = None if math.isnan(sample.reward) else sample.reward
                row = {"prompt": text, "completion": sample.text, "reward": reward, "answer": prompt.answer}
                file.write(json.dumps(row) + "\n")
                if i < _SHOWN:
                    print(f"{text!r} -> {sample.text!r}  reward {sample.reward:.3g}  answer {prompt.answer!r}")

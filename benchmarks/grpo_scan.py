"""Which reasoning-gym datasets a model can begin to learn from: short ones that it solves now and then.

    python benchmarks/grpo_scan.py --model smollm2
    python benchmarks/grpo_scan.py --only 'basic_arithmetic?max_terms=2&operators=["+"]&shots=2&system=Answer.'

Looks at each dataset as it is, and as a conversation that shows one answer first. Prints a line for each whose prompts
and answers are short: the mean score of completions, and how many of its groups had a spread, without which nothing
can be learned.
"""

from __future__ import annotations

import argparse
import time

import jax
import numpy as np

from seedx.checks import ConfigError
from seedx.envs.text.encode import encode_prompt
from seedx.envs.text.reasoning_gym_task import ReasoningGymTask
from seedx.inference.engine_config import EngineConfig
from seedx.inference.load_engine import load_engine
from seedx.inference.requests import Request
from seedx.inference.scheduler import Scheduler
from seedx.networks.model_source import Model
from seedx.weights import Weights

_SHOWN = "?shots=1&system=Answer."


def names() -> list[str]:
    """All datasets, in both forms."""
    from reasoning_gym.factory import DATASETS

    return [f"{name}{form}" for name in sorted(DATASETS.keys() - {"composite"}) for form in ("", _SHOWN)]


def scan(name: str, model: Model, scheduler: Scheduler, plan: argparse.Namespace) -> str | None:
    """What is said of a dataset; None if its texts are too long."""
    task = ReasoningGymTask(name)
    prompts = [task.prompts("train")[i] for i in range(plan.prompts)]
    tokens = [encode_prompt(prompt, model.tokenizer, model.chat_template) for prompt in prompts]
    answers = [len(model.tokenizer.encode(prompt.answer, add_bos=False)) for prompt in prompts]
    if max(map(len, tokens)) > plan.max_prompt_tokens or np.mean(answers) >= plan.max_tokens:
        return None
    requests = [
        Request(each, plan.max_tokens, seed=i, stop_tokens=model.tokenizer.eos_ids, num_samples=plan.samples)
        for i, each in enumerate(tokens)
    ]
    handles = [scheduler.submit(request) for request in requests]
    groups = [[done.text or "" for done in handle.result(600.0)] for handle in handles]
    scores = np.array([[task.reward(p, text) for text in texts] for p, texts in zip(prompts, groups, strict=True)])
    spread = np.mean(scores.max(axis=1) > scores.min(axis=1))
    return f"{name}: score {scores.mean():.3f}, solved {np.mean(scores >= 1):.3f}, groups with spread {spread:.2f}"


def main() -> None:
    """Scans."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--only", nargs="*", help="these datasets, as after reasoning_gym: in --task")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--max-prompt-tokens", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=16)
    plan = parser.parse_args()
    context = plan.max_prompt_tokens + plan.max_tokens
    model, engine = load_engine(EngineConfig(plan.model, max_concurrent=32, context=context), 8, print)
    weights = Weights(0, jax.block_until_ready(model.params))
    engine.warm_up(weights)
    scheduler = Scheduler(engine, weights, tokenizer=model.tokenizer)
    scheduler.start()
    for name in plan.only or names():
        started = time.monotonic()
        try:
            said = scan(name, model, scheduler, plan)
        except (ConfigError, ValueError) as error:
            said = f"{name}: {error}"
        if said is not None:
            print(f"{said} ({time.monotonic() - started:.1f} s)", flush=True)
    scheduler.close()


if __name__ == "__main__":
    main()

"""Evaluates a run's newest good checkpoint; no learner needed, one may be running.

    python launch/evaluate.py RUN_DIR --episodes 20
    python launch/evaluate.py RUN_DIR --num-prompts 200        # of a language model

Plays greedy episodes, prints `return <mean> +- <std> over <n> episodes` and writes RUN_DIR/evaluation.json. A language
model's run is scored on prompts that it was not trained on: `reward <mean> +- <half of the 95 % interval> over <n>
prompts`, pass@1, and some completions to read; all of them are in RUN_DIR/evaluation.jsonl.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from seedx.config import Config

sys.path.insert(0, os.getcwd())  # as `python -m` does, for a user's own environments and networks


def main(argv: list[str]) -> int:
    """Evaluates; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_dir", metavar="RUN_DIR", help="directory that a run left, or gs://BUCKET/RUN")
    parser.add_argument("--seed", type=int, default=0, help="seed of the environments or completions (default: 0)")
    parser.add_argument("--episodes", type=int, default=20, help="episodes to play (default: 20)")
    parser.add_argument("--env", help="another environment than the run's, with the same spec")
    llm = parser.add_argument_group("language models")
    llm.add_argument("--task", help="another task than the run's")
    llm.add_argument("--num-prompts", type=int, default=200, help="prompts of the test split (default: 200)")
    llm.add_argument("--num-samples", type=int, default=1, help="completions of each (default: 1)")
    llm.add_argument("--temperature", type=float, help="that they are drawn at; 0: greedy (default: the run's)")
    arguments = parser.parse_args(argv)
    for name in ("episodes", "num_prompts", "num_samples"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name.replace('_', '-')} ({getattr(arguments, name)}) must be positive.")
    if not 0 <= arguments.seed < 2**31:
        parser.error(f"--seed ({arguments.seed}) must lie in 0 .. 2**31-1.")
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # a learner may hold the accelerator
    from seedx import bucket
    from seedx.checks import ConfigError
    from seedx.config_file import read_config
    from seedx.llm_config import LlmConfig

    try:
        with bucket.read(arguments.run_dir) as arguments.run_dir:
            of_llm = isinstance(read_config(arguments.run_dir), LlmConfig)
            line = _evaluate_llm(arguments) if of_llm else _evaluate(arguments)
    except (ConfigError, OSError) as error:
        print(f"evaluate.py: {error}", file=sys.stderr)
        return 2
    try:
        print(line, flush=True)
    except OSError:  # nobody reads it any more; evaluation.json has it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _evaluate(arguments: argparse.Namespace) -> str:
    import dataclasses

    import numpy as np

    from seedx import specs
    from seedx.agents.build import build_agent
    from seedx.checkpoint import load_params
    from seedx.checks import ConfigError
    from seedx.config_file import env_config, from_json
    from seedx.envs.make import make_env
    from seedx.evaluate import evaluate

    checkpoint = load_params(arguments.run_dir)
    # What the parameters were trained with.
    config: Config = env_config(from_json(json.dumps(checkpoint.metadata["config"])))
    if arguments.env is not None:
        config = dataclasses.replace(config, env=arguments.env)
    spec = specs.from_json(checkpoint.metadata["spec"])

    def make_envs(seeds: np.ndarray):
        env = make_env(config, len(seeds), seeds)
        found = [line for line in specs.differences(spec, env.spec) if not line.startswith("env is")]
        if found:
            raise ConfigError(f"{config.env} differs from what the run was trained on: {'; '.join(found)}.")
        return env

    agent = build_agent(config, spec)
    returns = evaluate(agent, checkpoint.params, make_envs, arguments.episodes, arguments.seed)
    result = {
        "mean": float(returns.mean()),
        "std": float(returns.std()),
        "episodes": len(returns),
        "returns": returns.tolist(),
        "env": config.env,
        "seed": arguments.seed,
        "update": checkpoint.update,
    }
    (arguments.run_dir / "evaluation.json").write_text(json.dumps(result, indent=2) + "\n")
    return f"return {result['mean']:.2f} +- {result['std']:.2f} over {arguments.episodes} episodes"


def _evaluate_llm(arguments: argparse.Namespace) -> str:
    from seedx.checks import ConfigError

    try:
        from seedx.evaluate_llm import evaluate_llm
    except ModuleNotFoundError as error:
        raise ConfigError(f"this run needs {error.name}: pip install -e '.[llm]' -c constraints.txt") from error
    result = evaluate_llm(
        arguments.run_dir,
        task=arguments.task,
        num_prompts=arguments.num_prompts,
        num_samples=arguments.num_samples,
        temperature=arguments.temperature,
        seed=arguments.seed,
    )
    (arguments.run_dir / "evaluation.json").write_text(json.dumps(result, indent=2) + "\n")
    half = (result["interval"][1] - result["interval"][0]) / 2
    return (
        f"reward {result['mean']:.3f} +- {half:.3f} over {result['num_prompts']} prompts x {arguments.num_samples}, "
        f"pass@1 {result['pass@1']:.3f}"
    )


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)

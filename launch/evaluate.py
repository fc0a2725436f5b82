"""Evaluates a run's newest good checkpoint with greedy episodes; no learner needed, one may be running.

    python launch/evaluate.py RUN_DIR --episodes 20

Prints `return <mean> +- <std> over <n> episodes` and writes RUN_DIR/evaluation.json.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

sys.path.insert(0, os.getcwd())  # as `python -m` does, for a user's own environments and networks


def main(argv: list[str]) -> int:
    """Evaluates; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_dir", metavar="RUN_DIR", type=Path, help="directory that a run left")
    parser.add_argument("--episodes", type=int, default=20, help="episodes to play (default: 20)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the environments (default: 0)")
    parser.add_argument("--env", help="another environment than the run's, with the same spec")
    arguments = parser.parse_args(argv)
    if arguments.episodes < 1:
        parser.error(f"--episodes ({arguments.episodes}) must be positive.")
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # a learner may hold the accelerator
    from seedx.checks import ConfigError

    try:
        result = _evaluate(arguments)
    except (ConfigError, OSError) as error:
        print(f"evaluate.py: {error}", file=sys.stderr)
        return 2
    try:
        print(f"return {result['mean']:.2f} +- {result['std']:.2f} over {arguments.episodes} episodes", flush=True)
    except OSError:  # nobody reads it any more; evaluation.json has it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _evaluate(arguments: argparse.Namespace) -> dict:
    import dataclasses

    import numpy as np

    from seedx import specs
    from seedx.agents.build import build_agent
    from seedx.checkpoint import load_params
    from seedx.checks import ConfigError
    from seedx.config_file import from_json
    from seedx.envs.make import make_env
    from seedx.evaluate import evaluate

    checkpoint = load_params(arguments.run_dir)
    config = from_json(json.dumps(checkpoint.metadata["config"]))  # what the parameters were trained with
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
    return result


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)

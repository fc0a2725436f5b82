"""The command line: flags over a recipe over the defaults, and the run directory that they name. No jax."""

from __future__ import annotations

import dataclasses
import os
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from seedx import rundir
from seedx.bucket import is_bucket
from seedx.checks import ConfigError, require
from seedx.config import Config
from seedx.config_file import AnyConfig, load_recipe, read_config, to_json
from seedx.llm_config import AGENTS, LlmConfig

# The checkout's recipes; an installed wheel has none.
RECIPES = Path(__file__).parent.parent / "configs"

_MAX_NAME = 100  # characters of an environment or task in a directory's name, which may have 255 bytes
# EnvPool gives "-v5" to all Atari games and, beside them, to these.
_MUJOCO_V5 = frozenset(
    {"Ant", "HalfCheetah", "Hopper", "Humanoid", "HumanoidStandup", "InvertedDoublePendulum", "InvertedPendulum"}
    | {"Pusher", "Reacher", "Swimmer", "Walker2d"}
)


@dataclass(frozen=True)
class _Flags:
    """All flags of an environment run; --agent grpo has others.

    Attributes:
        config: File whose config() gives the defaults; None: the recipe in configs/ that fits agent and env.
        run: The run.
    """

    run: Annotated[Config, tyro.conf.arg(name="")]
    config: Path | None = None


@dataclass(frozen=True)
class _LlmFlags:
    """All flags of a language model's run.

    Attributes:
        config: File whose config() gives the defaults; None: the recipe in configs/ that fits task and model.
        run: The run.
    """

    run: Annotated[LlmConfig, tyro.conf.arg(name="")]
    config: Path | None = None


@dataclass(frozen=True)
class _Choosers:
    """The flags that choose where the other flags' defaults come from."""

    config: Path | None = None
    agent: str = Config.agent
    env: str | None = None
    task: str | None = None
    model: str | None = None
    run_dir: str | None = None
    resume: bool = False


def parse(argv: Sequence[str], *, prog: str | None = None, description: str = "") -> AnyConfig:
    """The config that the flags describe.

    Defaults come from `--config FILE`; else, with `--resume --run-dir DIR`, from DIR/config.json if there is one; else
    from the recipe in configs/ that fits agent and env (task and model); else from `Config()`, or of an LLM run from
    `LlmConfig()`.

    Args:
        argv: Flags, without the program's name.
        prog: Name of the program in messages.
        description: First lines of `--help`.

    Raises:
        ConfigError: a value is not allowed, or a file of defaults is missing or not readable.
        SystemExit: after `--help` (0), or a flag is unknown or its value cannot be parsed (2).
    """
    choosers, _ = tyro.cli(_Choosers, args=argv, prog=prog, add_help=False, return_unknown_args=True)
    run = _defaults(choosers)
    flags = _LlmFlags(run, choosers.config) if isinstance(run, LlmConfig) else _Flags(run, choosers.config)
    try:
        config = tyro.cli(type(flags), args=argv, prog=prog, description=description, default=flags).run
    except BrokenPipeError:  # `--help | head`; the descriptor is replaced so that the flush at exit does not fail too.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(0) from None
    require(
        config.run_dir is None or not is_bucket(config.run_dir),
        f"run_dir ({config.run_dir}) is in a bucket, which launch/local.py and launch/pod.py take; give a path here.",
    )
    return config


def _defaults(choosers: _Choosers) -> AnyConfig:
    if choosers.config is not None:
        return load_recipe(choosers.config)
    if choosers.resume and choosers.run_dir is not None and _holds_run(choosers.run_dir):
        return read_config(choosers.run_dir)
    of_llm = choosers.agent in AGENTS
    name = (
        llm_recipe_name(choosers.agent, choosers.task, choosers.model)
        if of_llm
        else recipe_name(choosers.agent, choosers.env)
    )
    path = RECIPES / f"{name}.py"
    if name is None or not path.is_file():
        return (LlmConfig if of_llm else Config)()
    recipe, (_, _, rewards) = load_recipe(path), (choosers.task or "").partition("?")
    if isinstance(recipe, LlmConfig) and rewards not in ("", "reward=task"):
        recipe = dataclasses.replace(recipe, stop_at_reward=None)  # which is one of the task's own rewards
    return recipe


def recipe_name(agent: str, env: str | None) -> str | None:
    """Name of the recipe in configs/ that fits, or None; an agent's first one where no environment is given."""
    match agent, env:
        case "impala", None:
            return "impala_cartpole"
        case "impala", "CartPole-v1" | "Pendulum-v1" | "catch" | "memory":
            return f"impala_{env.removesuffix('-v1').lower()}"
        case "impala", "MiniGrid-DoorKey-5x5-v0":
            return "impala_minigrid"
        case "impala", str() if is_atari(env):
            return "impala_atari"
        case "apex", None | "CartPole-v1":
            return "apex_cartpole"
        case "r2d2", None | "memory":
            return "r2d2_memory"
        case "apex" | "r2d2", str() if is_atari(env):
            return f"{agent}_atari"
        case "apex" | "r2d2", _:
            return agent
        case _:
            return None


def llm_recipe_name(agent: str, task: str | None, model: str | None) -> str | None:
    """Name of the recipe in configs/ that fits, or None: there is one for the tiny model and the built-in tasks.

    It fits them with other rewards too, but for the reward that it stops at.
    """
    built_in = task is None or task.partition("?")[0] in ("reverse", "sort", "sums", "calculator")
    return agent if built_in and model in (None, "tiny") else None


def is_atari(env: str) -> bool:
    """Whether EnvPool knows `env` as an Atari game. Goes by the name: importing EnvPool takes seconds."""
    game, dash, version = env.partition("-")
    return game.isalnum() and dash + version == "-v5" and game not in _MUJOCO_V5


def _holds_run(run_dir: str | Path) -> bool:
    return (Path(run_dir) / "config.json").is_file()


def default_run_dir(config: AnyConfig) -> str:
    """runs/<agent>-<env or task>-<date and time>, every name made fit for a file system, and short enough."""
    names = (re.sub(r"[^A-Za-z0-9_.-]+", "_", name)[:_MAX_NAME] for name in (config.agent, config.env))
    return f"runs/{'-'.join(names)}-{time.strftime('%Y%m%d-%H%M%S')}"


def prepare_run_dir(config: AnyConfig) -> AnyConfig:
    """Makes the run directory, writes its config.json, and returns the config with `run_dir` filled in.

    Raises:
        ConfigError: the directory holds checkpoints and `resume` is not set, or holds a config.json that is no run's,
            or a learner is at work there, or it cannot be written.
    """
    if config.resume and config.run_dir is None:
        raise ConfigError("--resume needs the directory of the run to continue; name it with --run-dir.")
    wanted = config.run_dir or default_run_dir(config)
    try:
        if config.resume:
            if not _holds_run(wanted) and _has_checkpoints(Path(wanted)):
                raise ConfigError(
                    f"run directory {wanted!r} holds checkpoints but no config.json, which says what they are of; "
                    "bring it back, or start afresh with another --run-dir."
                )
            if not _holds_run(wanted):  # Whoever restarts what was preempted uses one line, the first time too.
                print(f"--resume found no run in {wanted!r}; it begins one there.", file=sys.stderr)
        elif _has_checkpoints(Path(wanted)):
            raise ConfigError(
                f"run directory {wanted!r} already holds checkpoints; continue that run with --resume, "
                "or start afresh with another --run-dir."
            )
        elif (Path(wanted) / "config.json").exists():
            read_config(wanted)  # Only what a run has left, before its first checkpoint, is overwritten.
        run_dir = wanted if config.run_dir else _make_new(wanted)
        config = dataclasses.replace(config, run_dir=run_dir)
        (Path(run_dir) / "logs").mkdir(parents=True, exist_ok=True)
        os.close(rundir.claim(run_dir))  # A learner that is at work goes by the config.json that is there.
        rundir.write_config(run_dir, to_json(config))
    except OSError as error:
        raise ConfigError(f"run directory {wanted!r} cannot be used ({error}); name another --run-dir.") from error
    return config


def _has_checkpoints(run_dir: Path) -> bool:
    checkpoints = run_dir / "checkpoints"
    return checkpoints.is_dir() and any(checkpoints.iterdir())


def _make_new(wanted: str) -> str:
    """Makes `wanted`, or wanted-2, wanted-3, ...: runs that start in the same second must not share a directory."""
    Path(wanted).parent.mkdir(parents=True, exist_ok=True)
    run_dir, i = wanted, 1
    while True:
        try:
            Path(run_dir).mkdir()
            return run_dir
        except FileExistsError:
            i += 1
            run_dir = f"{wanted}-{i}"

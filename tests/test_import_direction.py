"""Imports run one way, from the command line down to the nouns; actors never load jax."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# From the top; each name is a module or a package, and imports only from layers below its own or from its own package.
LAYERS = [
    {"launch"},
    {"launcher", "run"},
    {"decode_role", "learner_role", "serve_role", "supervisor"},
    {"child", "llm_session", "session"},
    {"evaluate_llm", "llm_serving", "llm_warm_start"},
    {"llm_parts", "llm_scores"},
    {
        "agents",
        "ending",
        "evaluate",
        "first_actor",
        "joint",
        "llm_setup",
        "llm_resume",
        "llm_view",
        "llm_warnings",
        "report",
        "resume",
        "program",
        "serve_config",
    },
    {"llm_prompts"},
    {"learner", "inference", "envs", "replay", "cli", "console", "curve"},
    {"transport"},
    {"bucket", "networks", "weights", "checkpoint", "metrics", "runlog", "profiling"},
    {
        "chat",
        "compilation_cache",
        "config_file",
        "grpc_options",
        "hosts",
        "imports",
        "loop_thread",
        "memory",
        "parent",
        "rundir",
        "security",
        "seeds",
        "sharding",
        "signals",
        "specs",
        "threads",
        "votes",
    },
    {"llm_config", "roll_call"},
    {"lifeline"},
    {"bpe", "config", "types"},
    {
        "agent_config",
        "device_config",
        "grpo_config",
        "learner_config",
        "lora_config",
        "reward_config",
        "table_config",
        "reverb_address",
        "tokenizer",
    },
    {"device_config"},
    {"checks"},
]
ACROSS = {
    ("envs.actor", "inference.client"),
    ("envs.actor", "inference.wire"),
    ("envs.text.generation", "inference.requests"),
    ("envs.text.generation", "inference.decoder"),
    ("envs.text.generation", "learner.advantages"),
    ("envs.text.group", "replay.items"),
    ("envs.text.group_queue", "replay.items"),
    ("envs.text.group_queue", "replay.patience"),
    ("envs.text.group_queue", "replay.replay"),
    ("envs.text.held_out", "inference.decoder"),
    ("envs.text.job", "inference.requests"),
    ("envs.text.judge", "inference.decode_client"),
    ("envs.text.judge", "inference.decode_pb2"),
    ("envs.text.rollouts", "inference.decoder"),
    ("envs.text.track", "inference.requests"),
    ("envs.text.rollouts", "learner.advantages"),
    ("envs.text.rollouts", "learner.text_batch"),
    ("learner.batches", "replay.patience"),
    ("learner.batches", "replay.replay"),
    ("learner.text_batch", "replay.items"),
    ("learner.text_learner", "replay.items"),
    ("inference.delivery", "replay.patience"),
    ("inference.delivery", "replay.replay"),
    ("inference.policy", "replay.replay"),
}
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
FILES = sorted([*(ROOT / "seedx").rglob("*.py"), *(ROOT / "launch").rglob("*.py")])


def module_of(path):
    """For example "inference.wire", "launch.local", "" for seedx itself."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(part for part in parts[parts[0] == "seedx" :] if part != "__init__")


def is_module(name):
    return (ROOT / Path(*name.split("."))).is_dir() or (ROOT / Path(*name.split("."))).with_suffix(".py").is_file()


def imports_of(path):
    """The seedx and launch modules that a file imports anywhere, for type checkers only or not."""
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Import():
                names = [alias.name for alias in node.names]
            case ast.ImportFrom(level=0):
                inside = [f"{node.module}.{alias.name}" for alias in node.names]
                names = [name if is_module(name) else node.module for name in inside]
            case ast.ImportFrom():
                raise AssertionError(f"{path} has a relative import; write it out")
            case _:
                continue
        for name in names:
            if name.split(".")[0] in ("seedx", "launch"):
                yield name.removeprefix("seedx.") if name != "seedx" else ""


def test_every_module_has_its_layer():
    assert {module_of(path).split(".")[0] for path in FILES} - {""} <= set(LEVEL), "give the new module a layer"
    assert len(FILES) > 30


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_run_one_way(path):
    module = module_of(path)
    package = module.split(".")[0]
    for imported in imports_of(path):
        other = imported.split(".")[0]
        assert other, f"{module} imports seedx as a whole"
        allowed = other == package or LEVEL[other] > LEVEL[package] or (module, imported) in ACROSS
        assert allowed, f"{module} must not import {imported}: imports run down the layers"


def test_the_exceptions_are_in_use():
    found = {(module_of(path), imported) for path in FILES for imported in imports_of(path)}
    assert found >= ACROSS


ACTOR_SIDE = """
import sys
import seedx.run, seedx.envs.actor, seedx.envs.make, seedx.inference.client, seedx.supervisor
import seedx.envs.catch, seedx.envs.memory, seedx.envs.dm_env_adapter, seedx.envs.gymnasium_adapter
import seedx.envs.envpool_adapter
import seedx.inference.decode_client
import seedx.transport.open
import seedx.envs.text.load, seedx.envs.text.strings, seedx.envs.text.calculator, seedx.envs.text.reasoning_gym_task
import seedx.envs.text.prompts, seedx.envs.text.encode, seedx.envs.text.judge
heavy = {"jax", "jaxlib", "flax", "optax", "orbax", "tensorflow", "torch", "matplotlib", "tensorboardX"}
print(", ".join(sorted(heavy & sys.modules.keys())))
"""


def test_actors_do_not_load_jax():
    done = subprocess.run([sys.executable, "-c", ACTOR_SIDE], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("\n", "")

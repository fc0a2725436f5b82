"""Loads a model and makes a decode engine for it, as its flags say; what all decode servers start with."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable
from pathlib import Path

import jax
from jax.sharding import Mesh

from seedx import compilation_cache, sharding
from seedx.checkpoint import load_params
from seedx.checks import ConfigError, require
from seedx.config_file import read_config
from seedx.inference.engine import Engine
from seedx.inference.engine_config import EngineConfig
from seedx.inference.memory_plan import plan_memory
from seedx.llm_config import LlmConfig
from seedx.memory import memory_bytes
from seedx.networks import transformer
from seedx.networks.model_source import Model, ShardingsFor, open_model

_CONTEXT = 2048  # unless it is told: a slot of a model's full context takes the memory of many texts


def load_engine(
    config: EngineConfig, steps_per_dispatch: int, say: Callable[[str], None], *, quantize: bool = False
) -> tuple[Model, Engine]:
    """The model, its parameters where the engine wants them, and the engine, which is not warmed up yet.

    Args:
        config: The flags.
        steps_per_dispatch: Tokens that each slot gets from one launch.
        say: Told how the memory is used.
        quantize: Whether it computes with int8 matrices.

    Raises:
        ConfigError: the model cannot be read, or it or the flags do not fit the devices or each other.
    """
    compilation_cache.use()
    sizes = config.mesh
    mesh = sharding.serve_mesh(data=sizes.data, fsdp=sizes.fsdp, tensor=sizes.tensor)
    dtype, budget = dtype_of(config), _budget_bytes(config, mesh)
    model = _open(
        config.model,
        dtype,
        lambda found: sharding.serve_shardings(
            mesh, transformer.logical_axes(found), transformer.abstract_params(found)
        ),
    )
    length = config.context or min(model.config.max_length, _CONTEXT)
    require(
        steps_per_dispatch <= length,
        f"--steps-per-dispatch ({steps_per_dispatch}) must be at most the {length} tokens of the context.",
    )
    try:
        plan = plan_memory(
            model.config,
            model.params,
            budget,
            length=length,
            max_slots=config.max_concurrent,
            prefix_cache_bytes=budget // 16,
            slots_multiple=config.slots_multiple,
            mesh=mesh,
            quantize=quantize,
        )
    except ConfigError as error:
        raise ConfigError(f"{error} The flags are --memory-budget (bytes, for example 4GB) and --context.") from None
    devices = f"{mesh.size} x " if mesh.size > 1 else ""
    say(f"{model.name} in {dtype} on {devices}{mesh.devices.flat[0].device_kind}: {plan.describe()}")
    launching = threading.Lock() if mesh.size > 1 else contextlib.nullcontext()  # see `sharding.Meshes`
    engine = Engine(model.config, plan, mesh=mesh, steps_per_dispatch=steps_per_dispatch, launching=launching)
    return model, engine


def _open(source: str, dtype: str, shardings_for: ShardingsFor) -> Model:
    """A model of any source, or what a run has made of one: with the parameters of its newest good checkpoint."""
    if not (Path(source) / "checkpoints").is_dir():
        return open_model(source, dtype, shardings_for)
    run = read_config(source)
    require(isinstance(run, LlmConfig), f"--model {source} is a run of {run.agent}, which makes no language model.")
    assert isinstance(run, LlmConfig)
    checkpoint = load_params(source)
    model = open_model(run.model, dtype, shardings_for, seed=run.seed)
    params = jax.tree.map(lambda leaf: leaf.astype(dtype), checkpoint.params)
    params = jax.device_put(params, shardings_for(model.config))
    return dataclasses.replace(model, params=params, name=f"{model.name} after {checkpoint.update:,} updates")


def dtype_of(config: EngineConfig) -> str:
    """Of weights and caches on these devices."""
    if config.dtype != "auto":
        return config.dtype
    return "float32" if jax.default_backend() == "cpu" else "bfloat16"


def _budget_bytes(config: EngineConfig, mesh: Mesh) -> int:
    """What the engine may take.

    Raises:
        ConfigError: it is more than there is.
    """
    memory, given = memory_of(mesh), config.budget_bytes
    if given is None:
        return memory // 2
    require(
        given <= memory,
        f"--memory-budget ({config.memory_budget}) is more than the memory there is ({memory / 1e9:.1f} GB); give "
        "less, or leave it out for half of it.",
    )
    return given


def memory_of(mesh: Mesh) -> int:
    """Of all devices, or of this process where these say nothing."""
    limits = [(device.memory_stats() or {}).get("bytes_limit", 0) for device in mesh.devices.flat]
    return sum(limits) if all(limits) else memory_bytes()

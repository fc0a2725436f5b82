"""What the decode benchmarks have in common: the models, an engine that is ready, turns of contenders, figures."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np

from seedx import compilation_cache, sharding
from seedx.inference.engine import Engine
from seedx.inference.memory_plan import plan_memory
from seedx.inference.scheduler import Scheduler
from seedx.networks import transformer
from seedx.networks.model_source import open_model
from seedx.networks.transformer_config import TransformerConfig
from seedx.threads import spare_the_collector
from seedx.types import Tree
from seedx.weights import Weights

TINY = TransformerConfig(
    vocab_size=64, width=128, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=32, ffn_width=256, max_length=2048
)
_BUDGET_BYTES = 6 * 10**9


def tiny_params() -> Tree:
    """Random weights of the tiny model, float32."""
    return transformer.init_params(TINY, jax.random.key(0))


def smollm2() -> tuple[TransformerConfig, Tree]:
    """SmolLM2-135M-Instruct in float32."""
    model = open_model("smollm2")
    return model.config, model.params


def ready_engine(
    config: TransformerConfig,
    params: Tree,
    slots: int,
    length: int,
    steps: int,
    kind: type[Engine] = Engine,
    *,
    devices: int = 1,
    int8: bool = False,
) -> Engine:
    """With every program compiled; slots are spread over the devices."""
    compilation_cache.use()
    mesh = sharding.serve_mesh(data=devices)
    params = jax.device_put(params, sharding.serve_shardings(mesh, transformer.logical_axes(config), params))
    plan = plan_memory(
        config, params, _BUDGET_BYTES, length=length, max_slots=slots, slots_multiple=devices, mesh=mesh, quantize=int8
    )
    assert plan.num_slots == slots, plan.describe()
    print(plan.describe(), flush=True)
    engine = kind(config, plan, mesh=mesh, steps_per_dispatch=steps)
    engine.warm_up(Weights(0, params))
    return engine


def start_scheduler(engine: Engine, params: Tree) -> Scheduler:
    """A scheduler at work."""
    scheduler = Scheduler(engine, Weights(0, params))
    scheduler.start()
    spare_the_collector()
    return scheduler


def random_prompts(vocab_size: int, lengths: Sequence[int], seed: int = 0) -> list[tuple[int, ...]]:
    """Token ids, a prompt for each length."""
    rng = np.random.default_rng(seed)
    return [tuple(rng.integers(1, vocab_size, length).tolist()) for length in lengths]


def log_uniform(rng: np.random.Generator, least: int, greatest: int, count: int) -> list[int]:
    """Lengths between two bounds."""
    return np.exp(rng.uniform(np.log(least), np.log(greatest), count)).astype(int).tolist()


def take_turns(contenders: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, np.ndarray]:
    """Seconds of each contender, `[rounds]`; one more round goes first, to warm up."""
    values: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(rounds + 1):
        for name, contender in contenders.items():
            value = contender()
            print(f"round {number}: {name} {value:.4g} s", flush=True)
            if number:
                values[name].append(value)
    return {name: np.array(one) for name, one in values.items()}


def result(name: str, values: float | np.ndarray, unit: str) -> None:
    """Prints a figure: the median, and of several values the least and the greatest."""
    values = np.atleast_1d(values)
    spread = f" (min {values.min():.4g}, max {values.max():.4g}, n {len(values)})" if len(values) > 1 else ""
    print(f"RESULT {name} {np.median(values):.4g} {unit}{spread}", flush=True)


def result_load() -> None:
    """Prints how busy the machine is: the mean of the last minute."""
    print(f"RESULT load_average {os.getloadavg()[0]:.2f} of {os.cpu_count()} processors", flush=True)

"""Every jitted function of both modes, compiled ahead of time for TPU slices that are not there.

    pip install -e ".[tpu]" -c constraints.txt
    python benchmarks/scaling.py compile --topology v5e:2x4 --topology v5e:16x16

What all chips compute together, updates, is compiled for the whole slice; what a host does by itself, acting and
decoding, for a host of four chips. Prints what each program takes of a chip's memory; fails where one takes more than
there is.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import tpu_topology  # before jax

# isort: split
import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from seedx import sharding
from seedx.agents.build import build_agent
from seedx.agents.grpo import grpo_loss
from seedx.config import Config
from seedx.config_file import load_recipe
from seedx.grpo_config import GrpoConfig, TextLearnerConfig
from seedx.inference.decode_programs import make_programs
from seedx.inference.memory_plan import plan_memory
from seedx.inference.policy import PolicyServer
from seedx.inference.step import make_policy_step
from seedx.inference.warm_up import trace_all
from seedx.learner.learner import initial_state
from seedx.learner.text_learner import TextLearner, shapes_of
from seedx.learner.token_logprobs import Model
from seedx.learner.trainable import Trainable
from seedx.learner.update import make_update
from seedx.llm_setup import layout_of
from seedx.metrics import Metrics
from seedx.networks import transformer
from seedx.networks.transformer_config import TransformerConfig
from seedx.threads import Crew
from seedx.types import ArraySpec, EnvSpec, Tree
from seedx.weights import WeightStore

CONFIGS = Path(__file__).parent.parent / "configs"
FRAMES = EnvSpec("Pong-v5", ArraySpec((84, 84), "uint8"), ArraySpec((), "int32", num_values=6), 4)
FORCES = EnvSpec("Pendulum-v1", ArraySpec((3,), "float32"), ArraySpec((1,), "float32", minimum=-2.0, maximum=2.0))
RECIPES = {"impala_atari": FRAMES, "r2d2_paper": FRAMES, "impala_pendulum": FORCES}
MODELS = {
    "smollm2": TransformerConfig(
        vocab_size=49152,
        width=576,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        ffn_width=1536,
        max_length=2048,
    ),
    "8b": TransformerConfig(
        vocab_size=128256,
        width=4096,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        ffn_width=14336,
        max_length=8192,
        tie_embeddings=False,
    ),
}
UNROLLS_PER_CHIP, ENVS_PER_CHIP = 32, 128
SLOTS_PER_CHIP, SLOT_TOKENS = 16, 1024
GROUP_SIZE, PROMPT_TOKENS, NEW_TOKENS = 8, 512, 512  # a group for each chip and update
MAX_FSDP = 64  # chips that share one copy of a training state


class Program(NamedTuple):
    """One function on one slice."""

    name: str
    topology: str
    compile: Callable[[], Any]


def environment_programs(recipe: str, spec: EnvSpec, topology: str) -> Iterator[Program]:
    """Update and acting of a recipe; the batch grows with the slice."""
    slice_mesh, host_mesh = _data_mesh(topology), _data_mesh(tpu_topology.HOST)
    config = load_recipe(CONFIGS / f"{recipe}.py")
    assert isinstance(config, Config)
    learner = dataclasses.replace(config.learner, batch_size=UNROLLS_PER_CHIP * slice_mesh.size)
    slots = ENVS_PER_CHIP * host_mesh.size
    config = dataclasses.replace(config, learner=learner, num_actors=1, envs_per_actor=slots, eval_actors=0)
    agent = build_agent(config, spec)
    here = sharding.build_meshes(config.learner)
    state, weights = initial_state(agent, learner, here.learner, 0), WeightStore()
    weights.publish(0, state.params)
    server = PolicyServer(agent, spec, config, weights, here, Metrics(), Crew())  # which knows what a batch looks like
    batch = server.example_batch(learner.batch_size, config.unroll_rows)
    params, target_params, opt_state = _shapes(state[:3])
    update = make_update(agent, learner, slice_mesh, 0).lower(  # type: ignore[attr-defined]
        params,
        target_params,
        opt_state,
        batch,
        jax.ShapeDtypeStruct((learner.batch_size,), np.float32),
        jax.ShapeDtypeStruct((), np.float32),
        jax.ShapeDtypeStruct((), np.int32),
        None,
    )
    yield Program(f"{recipe} update", topology, update.compile)
    policy = make_policy_step(agent, slots, jax.random.key(0), host_mesh)
    rows = slots // config.actor.groups
    timestep = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((rows, *leaf.shape[2:]), leaf.dtype), batch.timestep)
    act = policy.act.lower(  # type: ignore[attr-defined]
        params, jax.eval_shape(policy.fresh), jax.ShapeDtypeStruct((rows,), np.int32), timestep
    )
    yield Program(f"{recipe} act", tpu_topology.HOST, act.compile)


def learner_programs(name: str, topology: str, zero: Literal[1, 2, 3]) -> Iterator[Program]:
    """The programs of a language model's update; groups of devices that hold all of it together share its state."""
    config, devices = MODELS[name], tpu_topology.devices_of(topology)
    fsdp = min(len(devices), MAX_FSDP)
    mesh = _mesh(devices, (len(devices) // fsdp, fsdp, 1))
    layout = layout_of(config, mesh, zero)
    params = _at(transformer.abstract_params(config), layout, "float32")
    learner = TextLearnerConfig(batch_size=mesh.size, microbatches=1, dtype="bfloat16", remat=True, zero=zero)
    settings = GrpoConfig(group_size=GROUP_SIZE)
    model = Model(config, dtype="bfloat16", remat=True, layout=layout)
    trainable = Trainable(config, mesh, split=zero == 3)
    shapes = shapes_of(learner, GROUP_SIZE, PROMPT_TOKENS, NEW_TOKENS, mesh.size)
    text_learner = TextLearner(
        model,
        partial(grpo_loss, model, settings),
        trainable,
        settings,
        learner,
        mesh,
        params,
        shapes,
        lambda *_: None,
        Metrics(),
        Path(),
    )
    state = jax.eval_shape(text_learner.begin, params)
    for program, lowered in text_learner.lower(state).items():
        yield Program(f"{name} zero-{zero} {program}", topology, lowered.compile)


def decode_programs(name: str) -> Iterator[Program]:
    """All programs of a host's decode engine, whose weights are spread over its chips where one cannot hold them."""
    config, count = MODELS[name], len(tpu_topology.devices_of(tpu_topology.HOST))
    shape = (count, 1, 1) if name == "smollm2" else (1, 1, count)
    mesh = _mesh(tpu_topology.devices_of(tpu_topology.HOST), shape)
    params = _at(transformer.abstract_params(config), layout_of(config, mesh), "bfloat16")
    slots = SLOTS_PER_CHIP * count
    plan = plan_memory(
        config,
        params,
        count * tpu_topology.HBM_BYTES,
        length=SLOT_TOKENS,
        max_slots=slots,
        slots_multiple=sharding.row_groups(mesh),
        mesh=mesh,
    )
    for program, traced in trace_all(make_programs(config, plan, 8, mesh), plan, params):
        yield Program(f"{name} {program}", tpu_topology.HOST, lambda traced=traced: traced.lower().compile())


def _data_mesh(topology: str) -> Mesh:
    return Mesh(np.array(tpu_topology.devices_of(topology)), (sharding.DATA,), axis_types=(AxisType.Auto,))


def _mesh(devices: Sequence[Any], shape: tuple[int, int, int]) -> Mesh:
    axes = (sharding.DATA, sharding.FSDP, sharding.TENSOR)
    return Mesh(np.array(devices).reshape(shape), axes, axis_types=(AxisType.Auto,) * 3)


def _at(shapes: Tree, layout: Tree, dtype: str) -> Tree:
    """Shapes of parameters that live there."""
    return jax.tree.map(lambda leaf, at: jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=at), shapes, layout)


def _shapes(tree: Tree) -> Tree:
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)


def chip_bytes(compiled: Any) -> int:
    """What a compiled program takes of each chip: arguments, results elsewhere than in these, and what it computes."""
    memory = compiled.memory_analysis()
    results = memory.output_size_in_bytes - memory.alias_size_in_bytes
    return memory.argument_size_in_bytes + results + memory.temp_size_in_bytes


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="scaling.py compile", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--topology", action="append", help="of a slice, may be repeated; by default 2x4 and 16x16")
    parser.add_argument("--only", default="", help="programs whose name begins with this")
    flags = parser.parse_args(argv)
    too_large = 0
    for program in all_programs(flags.topology or ("v5e:2x4", "v5e:16x16")):
        if not program.name.startswith(flags.only):
            continue
        started = time.monotonic()
        taken = chip_bytes(program.compile())
        too_large += taken > tpu_topology.HBM_BYTES
        label = f"{program.name}, {program.topology}".replace(" ", "_")
        print(f"RESULT {label} {taken / 2**30:.3f} GiB ({time.monotonic() - started:.0f} s to compile)", flush=True)
    return int(too_large > 0)


def all_programs(topologies: Sequence[str]) -> Iterator[Program]:
    """Those of both modes; what hosts do by themselves is the same in all slices and comes once."""
    for topology, (recipe, spec) in itertools.product(topologies, RECIPES.items()):
        for program in environment_programs(recipe, spec, topology):
            if program.topology == topology or topology == topologies[0]:
                yield program
    for topology in topologies:
        for zero in (1, 2, 3):
            yield from learner_programs("smollm2", topology, zero)
    if "v5e:16x16" in topologies and "8b" in MODELS:  # smaller slices do not hold its training state
        yield from learner_programs("8b", "v5e:16x16", 3)
    for name in MODELS:
        yield from decode_programs(name)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

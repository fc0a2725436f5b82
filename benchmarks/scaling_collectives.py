"""What devices send each other in an update, against what a ring must send, counted in the compiled programs.

    python benchmarks/scaling.py collectives

Eight simulated devices: ZeRO-1, 2 and 3 of a language model on `fsdp` 8, and on `data` 2 x `fsdp` 4, and the update of
IMPALA on catch. For each it prints what one device sends in an update: RESULT <name> <value> <unit>; and how much that
is of the ring's. Target: at most 1.05 of it.
"""

from __future__ import annotations

import argparse
import os
from collections import Counter
from functools import partial
from typing import Any

import hlo_bytes

DEVICES = 8
LAYOUTS = ((1, 8), (2, 4))  # data, fsdp
ROWS, TOKENS = 16, 64


def main(argv: list[str]) -> None:
    """Counts and prints."""
    argparse.ArgumentParser(
        "scaling.py collectives", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args(argv)
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={DEVICES}"
    os.environ["JAX_PLATFORMS"] = "cpu"
    from seedx import sharding

    for data, fsdp in LAYOUTS:
        mesh = sharding.serve_mesh(data=data, fsdp=fsdp)
        for zero in (1, 2, 3):
            texts, size = language_model(mesh, zero)
            _report(f"zero{zero}_data{data}_fsdp{fsdp}", texts, ring(zero, size, data, fsdp))
    texts, size = impala()
    _report("impala", texts, {"all-reduce": hlo_bytes.ring_bytes("all-reduce", size, DEVICES)})


def ring(zero: int, size: float, data: int, fsdp: int) -> dict[str, float]:
    """What each device sends in an update that has one part, by operation.

    Args:
        zero: 1, 2 or 3.
        size: Bytes of the parameters, which are those of the gradient.
        data: Devices that have the same part of the state.
        fsdp: Devices that have different parts.
    """
    once = hlo_bytes.ring_bytes("all-gather", size, fsdp)  # of updated parameters, or before they are computed with
    if zero == 1:
        return {"all-reduce": hlo_bytes.ring_bytes("all-reduce", size, data * fsdp), "all-gather": once}
    sums = {"reduce-scatter": once, "all-reduce": hlo_bytes.ring_bytes("all-reduce", size / fsdp, data)}
    return {**sums, "all-gather": once}


def counted(texts: list[str]) -> dict[str, float]:
    """What each device sends in programs that run one after the other, by operation."""
    total: Counter[str] = Counter()
    for text in texts:
        total.update({name: each.bytes for name, each in hlo_bytes.sent(text, DEVICES).items()})
    return dict(total)


def language_model(mesh: Any, zero: int, remat: bool = False) -> tuple[list[str], int]:
    """Gradient and step of a small model, compiled for a mesh, as text; and the bytes of its parameters."""
    import jax
    import numpy as np

    from seedx.agents.grpo import grpo_loss
    from seedx.grpo_config import GrpoConfig, TextLearnerConfig
    from seedx.learner.text_learner import batch_shapes
    from seedx.learner.text_update import make_optimizer, make_update
    from seedx.learner.token_logprobs import Model
    from seedx.llm_setup import layout_of
    from seedx.networks import transformer
    from seedx.networks.transformer_config import TransformerConfig

    config = TransformerConfig(
        vocab_size=512, width=128, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=32, ffn_width=512, max_length=64
    )
    layout, shapes = layout_of(config, mesh, zero), transformer.abstract_params(config)
    params = jax.tree.map(lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at), shapes, layout)
    loss = partial(grpo_loss, Model(config, remat=remat, layout=layout), GrpoConfig())
    programs: Any = make_update(loss, make_optimizer(TextLearnerConfig()), mesh, params, zero=zero)
    gradient = programs.gradient.lower(params, None, batch_shapes(ROWS, TOKENS))
    sums, rate = gradient.out_info, jax.ShapeDtypeStruct((), np.float32)
    step = programs.step.lower(params, jax.eval_shape(programs.init, params), sums.gradient, sums.loss, rate)
    return [program.compile().as_text() for program in (gradient, step)], _size(params)


def impala() -> tuple[list[str], int]:
    """The update of IMPALA on catch, compiled for all devices, as text; and the bytes of its parameters."""
    import jax
    import numpy as np

    from seedx import sharding
    from seedx.agents.impala import Impala
    from seedx.config import Config, LearnerConfig
    from seedx.learner.learner import initial_state
    from seedx.learner.update import make_update
    from seedx.types import ArraySpec, EnvSpec, TimeStep, Unroll

    config = LearnerConfig(batch_size=ROWS, unroll_length=TOKENS)
    spec = EnvSpec("catch", ArraySpec((10, 5, 1), "uint8"), ArraySpec((), "int32", num_values=3))
    agent, mesh = Impala(Config(), spec), sharding.build_meshes(config).learner
    params, target, opt_state, *_ = jax.eval_shape(lambda: initial_state(agent, config, mesh, 0))

    def rows(dtype: Any, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((TOKENS + 1, ROWS, *shape), dtype)

    timestep = TimeStep(rows(np.uint8), rows(np.float32), rows(np.float32), rows(np.uint8, 10, 5, 1))
    state = jax.eval_shape(lambda: agent.initial_state(ROWS))
    batch = Unroll(timestep, rows(np.int32), {"log_prob": rows(np.float32)}, rows(np.int32), state)
    weights, steps, count = (jax.ShapeDtypeStruct(*each) for each in (((ROWS,), "f4"), ((), "f4"), ((), "i4")))
    update: Any = make_update(agent, config, mesh, 0)
    compiled = update.lower(params, target, opt_state, batch, weights, steps, count, None).compile()
    return [compiled.as_text()], _size(params)


def _size(params: Any) -> int:
    import jax

    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(params))


def _report(name: str, texts: list[str], wanted: dict[str, float]) -> None:
    found = counted(texts)
    for operation in hlo_bytes.OPERATIONS:
        if operation in found or wanted.get(operation):
            figure = f"{name}_{operation.replace('-', '_')}"
            print(f"RESULT {figure}_bytes {found.get(operation, 0.0):.0f} bytes", flush=True)
            print(f"RESULT {figure}_ring_bytes {wanted.get(operation, 0.0):.0f} bytes", flush=True)
    print(f"RESULT {name}_over_ring {sum(found.values()) / sum(wanted.values()):.4f} of the ring's", flush=True)

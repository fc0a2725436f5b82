"""Low-rank adapters (LoRA, 2106.09685) on the linear maps of a transformer's blocks.

A map W has A `[inputs, r]` and B `[r, outputs]`, and becomes W + scale A B. Queries, keys and values are three maps,
gate and up are two, though the transformer keeps them in one matrix. Adapters are nested dicts:
{"layer_0": {"attention": {"q": {"a", "b"}, "k", "v", "out"}, "ffn": {"gate", "up", "down"}}, ...}, all float32.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Key, PyTree

from seedx.checks import require
from seedx.networks.transformer import layer_name
from seedx.networks.transformer_config import TransformerConfig


class _Map(NamedTuple):
    """Sizes of the axes on either side of a linear map, by their names in `transformer.logical_axes`."""

    inputs: dict[str, int]
    outputs: dict[str, int]


def check_rank(config: TransformerConfig, rank: int) -> None:
    """Refuses a rank that is larger than a matrix.

    Raises:
        ConfigError: then A and B are no smaller than what they stand for.
    """
    maps = {name: each for part in _maps(config).values() for name, each in part.items()}
    sizes = {name: min(math.prod(side.values()) for side in each) for name, each in maps.items()}
    least = min(sizes, key=lambda name: sizes[name])
    require(
        rank <= sizes[least],
        f"lora.rank ({rank}) must be at most {sizes[least]}, the smaller side of this model's matrix {least!r}; lower "
        "it, or leave it at 0 to train all weights.",
    )


def adapter_axes(config: TransformerConfig) -> PyTree:
    """The names of each adapter's axes, a tuple in the place of each array."""
    block = jax.tree.map(
        lambda each: {"a": (*each.inputs, "rank"), "b": ("rank", *each.outputs)}, _maps(config), is_leaf=_is_map
    )
    return {layer_name(layer): block for layer in range(config.num_layers)}


def init_adapters(config: TransformerConfig, rank: int, key: Key[Array, ""]) -> PyTree:
    """Adapters that change nothing: A is normal with variance 1 / inputs, B is 0."""
    keys = iter(jax.random.split(key, config.num_layers * 7))

    def init(each: _Map) -> dict[str, Array]:
        inputs, outputs = tuple(each.inputs.values()), tuple(each.outputs.values())
        a = jax.random.normal(next(keys), (*inputs, rank), jnp.float32) / math.sqrt(math.prod(inputs))
        return {"a": a, "b": jnp.zeros((rank, *outputs), jnp.float32)}

    return {layer_name(layer): jax.tree.map(init, _maps(config), is_leaf=_is_map) for layer in range(config.num_layers)}


def merge(base: PyTree, adapters: PyTree, scale: float) -> PyTree:
    """The parameters that a base and its adapters make; what has no adapter is the base's.

    Weights, not two products x W + (x A) B: so there is one forward pass, of the very weights that are published, and
    the engine's log-probabilities are the learner's. A B costs as much as r more tokens in a batch of thousands. The
    price is the gradient of each whole matrix, while it is turned into those of A and B.

    Args:
        base: Parameters of the transformer, float32.
        adapters: Of `init_adapters`.
        scale: Of the change.
    """
    return {**base, **{name: _merged_block(base[name], own, scale) for name, own in adapters.items()}}


def _merged_block(block: PyTree, adapters: PyTree, scale: float) -> PyTree:
    # In full precision: accelerators would round A and B, and what is learned in small steps is in their last bits.
    changes = jax.tree.map(
        lambda pair: scale * jnp.tensordot(pair["a"], pair["b"], 1, precision=jax.lax.Precision.HIGHEST),
        adapters,
        is_leaf=lambda x: "a" in x,
    )
    attention, ffn = changes["attention"], changes["ffn"]
    qkv = jnp.concatenate([attention["q"], attention["k"][:, :, None], attention["v"][:, :, None]], axis=2)
    gate_up = jnp.stack([ffn["gate"], ffn["up"]], axis=1)
    own, forward = block["attention"], block["ffn"]
    return {
        **block,
        "attention": {**own, "qkv": own["qkv"] + qkv, "out": own["out"] + attention["out"]},
        "ffn": {**forward, "gate_up": forward["gate_up"] + gate_up, "down": forward["down"] + ffn["down"]},
    }


def _maps(config: TransformerConfig) -> dict[str, dict[str, _Map]]:
    width, ffn = {"embed": config.width}, {"ffn": config.ffn_width}
    one = {"kv_heads": config.num_kv_heads, "head_dim": config.head_dim}
    queries = {"kv_heads": config.num_kv_heads, "group": config.queries_per_kv, "head_dim": config.head_dim}
    return {
        "attention": {
            "q": _Map(width, queries),
            "k": _Map(width, one),
            "v": _Map(width, one),
            "out": _Map(queries, width),
        },
        "ffn": {"gate": _Map(width, ffn), "up": _Map(width, ffn), "down": _Map(ffn, width)},
    }


def _is_map(x: object) -> bool:
    return isinstance(x, _Map)

"""How many slots of which length a decode engine has, from the bytes that it may take."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from seedx import sharding
from seedx.checks import require
from seedx.networks import int8, transformer
from seedx.networks.transformer_config import TransformerConfig
from seedx.types import Tree

_STAGED_PROMPTS = 3  # rows of prompts whose cache lives outside of the slots: one being computed, two waiting
_SMALLEST_BUCKET = 16
_SMALLEST_SPAN = 64
GAP_TEXTS, GAP_TOKENS = 8, 32  # what int8 weights are measured on, see logprob_gap.py


@dataclass(frozen=True)
class MemoryPlan:
    """The shapes of a decode engine and what they take, bytes on all devices together.

    Attributes:
        num_slots: S, completions that are generated at a time.
        length: Tokens of a slot, prompt and completion.
        chunk: Prompt tokens that one prefill computes at most.
        cache_dtype: Of keys and values.
        int8: Whether it computes with int8 matrices, which are made of the weights that are published.
        weights_bytes: Of one version of the weights, as it computes with them.
        quantizing_bytes: Of one version before it is quantised, of measuring what that changes, and of two matrices on
            their way into a product; 0 without int8.
        slot_bytes: Of a slot: keys and values, a copy of one layer's, and its logits.
        prefill_bytes: Of one prefill at work.
        staging_bytes: Of prompts that wait for their slots.
        prefix_cache_bytes: Of prefixes that prompts have in common.
        budget_bytes: What all may take.
    """

    num_slots: int
    length: int
    chunk: int
    cache_dtype: jnp.dtype
    int8: bool
    weights_bytes: int
    quantizing_bytes: int
    slot_bytes: int
    prefill_bytes: int
    staging_bytes: int
    prefix_cache_bytes: int
    budget_bytes: int

    @property
    def versions(self) -> int:
        """Of the weights at a time: two to compute with, and with int8 one that waits, see `live_weights.py`."""
        return 3 if self.int8 else 2

    @property
    def total_bytes(self) -> int:
        """What the engine takes at most."""
        return self.num_slots * self.slot_bytes + self.fixed_bytes

    @property
    def fixed_bytes(self) -> int:
        """What it takes without slots."""
        weights = self.versions * self.weights_bytes + self.quantizing_bytes
        return weights + self.prefill_bytes + self.staging_bytes + self.prefix_cache_bytes

    @property
    def buckets(self) -> list[int]:
        """Lengths that one prompt of up to a chunk, or a slot, is padded to."""
        return _ladder(_SMALLEST_BUCKET, min(self.chunk, self.length), 2)

    @property
    def batches(self) -> list[tuple[int, int]]:
        """Rows and lengths of prompts that are computed together: as many as make a chunk of tokens."""
        lengths = _ladder(_SMALLEST_BUCKET, min(self.chunk, self.length), 4)
        shapes = [(min(self.chunk // length, self.num_slots), length) for length in lengths]
        return [shape for shape in shapes if shape[0] > 1]

    @property
    def spans(self) -> list[int]:
        """Lengths that the cache of all slots takes, as the longest of them needs."""
        return _ladder(_SMALLEST_SPAN, self.length, 4)

    @property
    def staged_spans(self) -> list[int]:
        """Lengths that the cache of a prompt of several chunks takes."""
        return [span for span in self.spans if span > self.chunk] if self.length - 1 > self.chunk else []

    def bucket(self, tokens: int) -> int:
        """The length that so many tokens are padded to."""
        return fit(tokens, self.buckets)

    def batch(self, tokens: int) -> tuple[int, int]:
        """Rows and length of the batch that prompts of so many tokens are computed in; one row if there is none."""
        return next((shape for shape in self.batches if shape[1] >= tokens), (1, self.bucket(tokens)))

    def describe(self) -> str:
        """One line for people."""
        kind, quantizing = "two versions of", ""
        if self.int8:
            kind, quantizing = "three versions of int8", f"quantising {_mb(self.quantizing_bytes)}, "
        return (
            f"{self.num_slots} slots of {self.length} tokens: {_mb(self.total_bytes)} of {_mb(self.budget_bytes)} "
            f"(slots {_mb(self.num_slots * self.slot_bytes)}, "
            f"{kind} weights {_mb(self.versions * self.weights_bytes)}, {quantizing}"
            f"prefill {_mb(self.prefill_bytes)}, waiting prompts {_mb(self.staging_bytes)}, "
            f"prefix cache {_mb(self.prefix_cache_bytes)})"
        )


def plan_memory(
    config: TransformerConfig,
    params: Tree,
    budget_bytes: int,
    *,
    length: int | None = None,
    max_slots: int = 64,
    chunk: int = 256,
    prefix_cache_bytes: int = 0,
    slots_multiple: int = 1,
    mesh: Mesh | None = None,
    quantize: bool = False,
) -> MemoryPlan:
    """As many slots as fit the budget.

    Args:
        config: Of the model.
        params: Its parameters as they are published and where they will live, or what has their shapes; the cache has
            the embedding's dtype.
        budget_bytes: What weights, caches and intermediate results may take, of all devices together.
        length: Tokens of a slot; None: the model's.
        max_slots: More are never made.
        chunk: Prompt tokens that one prefill computes at most.
        prefix_cache_bytes: For prefixes in common.
        slots_multiple: The number of slots is one of its multiples.
        mesh: The devices, whose row groups each hold every prompt that is computed; None: one device.
        quantize: Whether the engine computes with int8 matrices.

    Raises:
        ConfigError: the budget does not hold the least number of slots, or the length is not the model's.
    """
    length = length or config.max_length
    require(
        2 <= length <= config.max_length,
        f"a slot's length ({length}) must be from 2 to the model's context ({config.max_length}).",
    )
    dtype = jnp.dtype(jax.tree.leaves(params)[0].dtype)
    entry_bytes = 2 * config.num_kv_heads * config.head_dim * dtype.itemsize  # of a token, in one layer
    layer_bytes, row_bytes = length * entry_bytes, max(length, chunk) * entry_bytes
    # Per prompt token: the residual stream, the feed-forward layer and the scores of all heads, a few times each.
    token_floats = 8 * config.width + 6 * config.ffn_width + 3 * config.num_heads * length
    groups = 1 if mesh is None else sharding.row_groups(mesh)
    tensor = 1 if mesh is None else mesh.size // groups  # devices of a group, as if they shared no intermediate result
    weights_bytes, quantizing_bytes = _bytes(params), 0
    if quantize:
        weights_bytes = _int8_bytes(config, params, mesh)
        logits = groups * tensor * GAP_TEXTS * GAP_TOKENS * 4 * (2 * config.vocab_size + token_floats)
        largest = max(leaf.size for leaf in jax.tree.leaves(params))
        quantizing_bytes = _bytes(params) + logits + groups * 2 * largest * dtype.itemsize
    plan = MemoryPlan(
        num_slots=0,
        length=length,
        chunk=chunk,
        cache_dtype=dtype,
        int8=quantize,
        weights_bytes=weights_bytes,
        quantizing_bytes=quantizing_bytes,
        slot_bytes=(config.num_layers + 1) * layer_bytes + tensor * 4 * (8 * config.vocab_size + token_floats),
        prefill_bytes=groups * (tensor * 4 * chunk * token_floats + row_bytes),
        staging_bytes=groups * _STAGED_PROMPTS * config.num_layers * row_bytes,
        prefix_cache_bytes=prefix_cache_bytes,
        budget_bytes=budget_bytes,
    )
    slots = min((budget_bytes - plan.fixed_bytes) // plan.slot_bytes, max_slots) // slots_multiple * slots_multiple
    plan = replace(plan, num_slots=max(slots, slots_multiple))
    require(
        slots > 0,
        f"the memory budget ({_mb(budget_bytes)}) holds no decode engine: {plan.describe()}. "
        "Raise the budget, or lower the slots' length, the prefix cache or the chunk.",
    )
    return plan


def _int8_bytes(config: TransformerConfig, params: Tree, mesh: Mesh | None) -> int:
    """Of the quantised parameters, on all devices that hold them."""
    axes = transformer.logical_axes(config)
    shapes = jax.eval_shape(partial(int8.quantize, axes=axes), params)
    if mesh is None:
        return _bytes(shapes)
    places = sharding.serve_shardings(mesh, int8.quantized_axes(axes), shapes)
    placed = jax.tree.map(lambda leaf, at: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=at), shapes, places)
    return _bytes(placed)


def _bytes(tree: Tree) -> int:
    return sum(map(sharding.held_bytes, jax.tree.leaves(tree)))


def fit(length: int, sizes: list[int]) -> int:
    """The smallest of rising sizes that holds a length."""
    return next(size for size in sizes if size >= length)


def _ladder(smallest: int, largest: int, factor: int) -> list[int]:
    """`largest`, and below it `smallest` times powers of the factor."""
    sizes = []
    while smallest < largest:
        sizes.append(smallest)
        smallest *= factor
    return [*sizes, largest]


def _mb(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:,.1f} MB"

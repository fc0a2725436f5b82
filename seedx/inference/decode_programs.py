"""The decode engine's jitted functions: prefill of prompts, insertion into slots, and steps of all slots at once.

Letters: S slots, K steps of a dispatch, R prompts, L tokens, V vocabulary. A cache's leaves keep the layout that the
transformer gives them; its axes are found by name.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float32, Int32

from seedx import sharding
from seedx.inference.memory_plan import MemoryPlan
from seedx.inference.sampling import Sampling, is_cut, sample, uniforms
from seedx.networks import transformer
from seedx.networks.transformer import Cache
from seedx.networks.transformer_config import TransformerConfig
from seedx.types import Tree

IDLE = 1 << 30  # the position of a slot without a completion: beyond any cache, so that nothing is written


class DecodeState(NamedTuple):
    """What the device remembers of the slots."""

    cache: Cache  # [S, ...]
    token: Int32[Array, " S"]  # the last one of each text, whose keys and values are not in the cache yet
    position: Int32[Array, " S"]  # its place in the text, from 0
    sampling: Sampling


class Order(IntEnum):
    """Rows of the one array `[8, S]` that tells a dispatch what changed; floats and seeds by their bits."""

    MEMBER = 0  # whether the slot takes part
    PLACED = 1  # whether the rows below are new
    TOKEN = 2
    POSITION = 3
    TEMPERATURE = 4
    TOP_K = 5
    TOP_P = 6
    SEED = 7


class Programs(NamedTuple):
    """Jitted functions; those that take a state, or a staged cache, consume it."""

    fresh: Callable[[], DecodeState]
    fresh_staging: Callable[..., Cache]  # (length): one row
    prefill: Callable[..., Cache]  # (params, tokens [R, L], positions [R, L]): one row of a chunk, prompt after prompt
    extend: Callable[..., tuple[Cache, Cache]]  # (params, staged, tokens [1, L], first position): and their block
    write_block: Callable[..., Cache]  # (staged, block, first position)
    insert: Callable[..., Cache]  # (slots' cache, prompts' row, [3, S] first entries, tokens and slots, count)
    resize: Callable[..., dict[str, Array]]  # (one layer of the slots' cache, length)
    generate: Callable[..., tuple[DecodeState, Int32[Array, "K 3 S"]]]  # (params, state, orders [8, S])

    def compiled(self) -> int:
        """Programs that were compiled so far."""
        return sum(program._cache_size() for program in self)  # type: ignore[attr-defined]


def make_programs(config: TransformerConfig, plan: MemoryPlan, steps: int, mesh: Mesh) -> Programs:
    """The functions for a model and its slots.

    Args:
        config: Of the model.
        plan: Shapes; the cache of `fresh` has the first span.
        steps: K, of a dispatch.
        mesh: Slots are spread over its data axis, key heads over its tensor axis.
    """
    num_slots, dtype = plan.num_slots, plan.cache_dtype
    axes = transformer.cache_axes(config)
    length_axes = jax.tree.map(lambda names: names.index("cache"), axes, is_leaf=_is_names)
    by_slot = sharding.serve_shardings(mesh, ("batch",), jax.ShapeDtypeStruct((num_slots,), jnp.int32))
    packed = sharding.serve_shardings(mesh, ("", "", "batch"), jax.ShapeDtypeStruct((steps, 3, num_slots), jnp.int32))
    slots_cache = sharding.serve_shardings(mesh, axes, _shapes(config, num_slots, dtype))
    prompts_cache = prompt_shardings(config, dtype, mesh)

    def fresh() -> DecodeState:
        cache = transformer.init_cache(config, num_slots, plan.spans[0], dtype)
        token, position, top_k = (jnp.full(num_slots, value, jnp.int32) for value in (0, IDLE, 0))
        temperature, top_p = (jnp.full(num_slots, value, jnp.float32) for value in (0, 1))
        return DecodeState(
            cache, token, position, Sampling(temperature, top_k, top_p, jnp.zeros(num_slots, jnp.uint32))
        )

    state = jax.tree.map(lambda _: by_slot, jax.eval_shape(fresh))._replace(cache=slots_cache)

    def specs(layout: Tree) -> Tree:
        return jax.tree.map(lambda place: place.spec, layout)

    # Every device copies to its own slots; what the compiler makes of a place that it does not know sends all slots.
    insert = jax.shard_map(
        partial(_insert, length_axes, plan),
        mesh=mesh,
        in_specs=(specs(slots_cache), specs(prompts_cache), PartitionSpec(), PartitionSpec()),
        out_specs=specs(slots_cache),
        check_vma=False,
    )

    def jitted(function: Callable[..., Any], out: Any, **options: Any) -> Callable[..., Any]:
        # A function of its own: JAX keeps what it compiled by function, and another engine's is not to be counted here.
        return jax.jit(partial(function), out_shardings=out, **options)

    return Programs(
        fresh=jitted(fresh, state),
        fresh_staging=jitted(
            lambda length: transformer.init_cache(config, 1, length, dtype), prompts_cache, static_argnums=0
        ),
        prefill=jitted(partial(_prefill, config, length_axes, plan.chunk, dtype, mesh), prompts_cache),
        extend=jitted(partial(_extend, config, length_axes), (prompts_cache, prompts_cache), donate_argnums=1),
        write_block=jitted(partial(_write_block, length_axes), prompts_cache, donate_argnums=0),
        insert=jitted(insert, slots_cache, donate_argnums=0),
        resize=jitted(partial(_resize, length_axes[0]), slots_cache[0], static_argnums=1),
        generate=jitted(partial(_generate, config, steps), (state, packed), donate_argnums=1),
    )


def prompt_shardings(config: TransformerConfig, dtype: jnp.dtype, mesh: Mesh) -> Tree:
    """Where the keys and values of prompts live, before they are in slots."""
    axes = transformer.cache_axes(config)
    without_batch = jax.tree.map(
        lambda names: tuple("" if name == "batch" else name for name in names), axes, is_leaf=_is_names
    )
    return sharding.serve_shardings(mesh, without_batch, _shapes(config, 1, dtype))


def _is_names(axes: Any) -> bool:
    return isinstance(axes, tuple) and all(isinstance(name, str) for name in axes)


def _shapes(config: TransformerConfig, batch: int, dtype: jnp.dtype) -> Tree:
    return jax.eval_shape(lambda: transformer.init_cache(config, batch, 1, dtype))


def _cached(
    config: TransformerConfig, params: Tree, tokens: Int32[Array, "B L"], positions: Int32[Array, "B L"], cache: Cache
) -> tuple[Float32[Array, "B L V"], Cache]:
    logits, after = transformer.apply(config, params, tokens, positions, cache=cache)
    assert after is not None
    return logits, after


def _prefill(
    config: TransformerConfig,
    length_axes: Tree,
    chunk: int,
    dtype: jnp.dtype,
    mesh: Mesh,
    params: Tree,
    tokens: Int32[Array, "R L"],
    positions: Int32[Array, "R L"],
) -> Cache:
    """Keys and values of R prompts, one after the other in a row of a chunk: whatever R and L are, it has one shape.

    Row groups share the prompts where these divide and heads are whole.
    """
    rows, length = tokens.shape
    shared = rows % sharding.row_groups(mesh) == 0 and mesh.shape[sharding.TENSOR] == 1
    if shared:
        tokens, positions = jax.lax.with_sharding_constraint((tokens, positions), sharding.split_rows(mesh))
    cache = _cached(config, params, tokens, positions, transformer.init_cache(config, rows, length, dtype))[1]
    if shared:
        cache = _gathered(cache, mesh)

    def joined(leaf: Array, axis: int) -> Array:
        leaf = jnp.moveaxis(leaf, 0, axis - 1)
        leaf = leaf.reshape(1, *leaf.shape[: axis - 1], rows * length, *leaf.shape[axis + 1 :])
        missing = [(0, 0)] * leaf.ndim
        missing[axis] = (0, chunk - rows * length)
        return jnp.pad(leaf, missing)

    return jax.tree.map(joined, cache, length_axes)


def _gathered(cache: Cache, mesh: Mesh) -> Cache:
    """A cache whose rows are spread, whole on every device: sent as one array, since a CPU sends each by itself."""
    leaves, tree = jax.tree.flatten(cache)
    rows = leaves[0].shape[0]
    flat = jnp.concatenate([leaf.reshape(rows, -1) for leaf in leaves], axis=1)
    flat = jax.lax.with_sharding_constraint(flat, sharding.replicated(mesh))
    ends = np.cumsum([leaf.size // rows for leaf in leaves])[:-1]
    parts = jnp.split(flat, ends, axis=1)
    return jax.tree.unflatten(tree, [part.reshape(leaf.shape) for part, leaf in zip(parts, leaves, strict=True)])


def _extend(
    config: TransformerConfig,
    length_axes: Tree,
    params: Tree,
    staged: Cache,
    tokens: Int32[Array, "1 L"],
    first: Int32[Array, ""],
) -> tuple[Cache, Cache]:
    length = tokens.shape[1]
    staged = _cached(config, params, tokens, first + jnp.arange(length, dtype=jnp.int32)[None], staged)[1]
    block = jax.tree.map(
        lambda leaf, axis: jax.lax.dynamic_slice_in_dim(leaf, first, length, axis), staged, length_axes
    )
    return staged, block


def _write_block(length_axes: Tree, staged: Cache, block: Cache, first: Int32[Array, ""]) -> Cache:
    return jax.tree.map(
        lambda leaf, new, axis: jax.lax.dynamic_update_slice_in_dim(leaf, new, first, axis), staged, block, length_axes
    )


def _insert(
    length_axes: Tree,
    plan: MemoryPlan,
    cache: Cache,
    prompts: Cache,
    places: Int32[Array, "3 S"],
    count: Int32[Array, ""],
) -> Cache:
    """Copies the prompts that begin at `places[0]` and have `places[1]` tokens to slots `places[2]`, the first `count`.

    They are copied piece by piece, so that one program does for prompts of any length. A row group copies those of its
    own slots.
    """
    axis = length_axes[0]["k"]
    num_slots = cache[0]["k"].shape[0]
    first_slot = sharding.row_group() * num_slots
    length, span = prompts[0]["k"].shape[axis], cache[0]["k"].shape[axis]
    piece = plan.chunk if length > plan.chunk else plan.buckets[0]

    def copy(i: Int32[Array, ""], cache: Cache) -> Cache:
        first, tokens, slot = places[0, i], places[1, i], places[2, i] - first_slot
        tokens = jnp.where((slot >= 0) & (slot < num_slots), tokens, 0)
        last = jnp.minimum(span, length - first) - piece

        def copy_piece(j: Int32[Array, ""], cache: Cache) -> Cache:
            at = jnp.minimum(j * piece, last)

            def one(leaf: Array, new: Array, axis: int) -> Array:
                entries = jax.lax.dynamic_slice_in_dim(new, first + at, piece, axis)
                starts = [slot, *[jnp.int32(0)] * (leaf.ndim - 1)]
                starts[axis] = at
                return jax.lax.dynamic_update_slice(leaf, entries, starts)

            return jax.tree.map(one, cache, prompts, length_axes)

        return jax.lax.fori_loop(0, (tokens + piece - 1) // piece, copy_piece, cache)

    return jax.lax.fori_loop(0, count, copy, cache)


def _resize(length_axes: Tree, layer: dict[str, Array], length: int) -> dict[str, Array]:
    def one(leaf: Array, axis: int) -> Array:
        missing = [(0, 0)] * leaf.ndim
        missing[axis] = (0, max(length - leaf.shape[axis], 0))
        return jax.lax.slice_in_dim(jnp.pad(leaf, missing), 0, length, axis=axis)

    return jax.tree.map(one, layer, length_axes)


def _generate(
    config: TransformerConfig, steps: int, params: Tree, state: DecodeState, orders: Int32[Array, "8 S"]
) -> tuple[DecodeState, Int32[Array, "K 3 S"]]:
    """K steps of the slots that take part; tokens, and the bits of both log-probabilities."""
    state = _placed(state, orders)
    active = (orders[Order.MEMBER] != 0) & (state.position < IDLE)
    drawn_at = state.position[None] + 1 + jnp.arange(steps, dtype=jnp.int32)[:, None]
    seeds = jnp.broadcast_to(state.sampling.seed[None], drawn_at.shape)
    any_cut = jnp.any(
        is_cut(state.sampling)
    )  # here, so that devices with slots of their own do not wait for each other

    def step(state: DecodeState, uniform: Float32[Array, "S 2"]) -> tuple[DecodeState, Int32[Array, "3 S"]]:
        position = jnp.where(active, state.position, IDLE)
        logits, cache = _cached(config, params, state.token[:, None], position[:, None], state.cache)
        drawn = sample(logits[:, 0], state.sampling, uniform, any_cut)
        state = state._replace(
            cache=cache,
            token=jnp.where(active, drawn.token, state.token),
            position=jnp.where(active, position + 1, state.position),
        )
        return state, jnp.stack([drawn.token, _bits(drawn.logprob), _bits(drawn.raw_logprob)])

    return jax.lax.scan(step, state, uniforms(seeds, drawn_at))


def _placed(state: DecodeState, orders: Int32[Array, "8 S"]) -> DecodeState:
    """The state with the slots that are new."""
    new = orders[Order.PLACED] != 0

    def put(old: Array, row: Order) -> Array:
        return jnp.where(new, jax.lax.bitcast_convert_type(orders[row], old.dtype), old)

    sampling = Sampling(
        put(state.sampling.temperature, Order.TEMPERATURE),
        put(state.sampling.top_k, Order.TOP_K),
        put(state.sampling.top_p, Order.TOP_P),
        put(state.sampling.seed, Order.SEED),
    )
    return DecodeState(state.cache, put(state.token, Order.TOKEN), put(state.position, Order.POSITION), sampling)


def _bits(values: Float32[Array, " S"]) -> Int32[Array, " S"]:
    return jax.lax.bitcast_convert_type(values, jnp.int32)

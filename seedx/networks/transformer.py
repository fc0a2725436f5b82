"""One decoder for training, prefill and cached decode; its parameters are nested dicts of arrays.

Queries, keys and values are one matrix, grouped by key head: head j of `[D, K, G + 2, E]` holds its G query heads, its
key and its value. So a step has one matrix product where a checkpoint has three, queries come out as attention wants
them, and splitting K over devices never splits a group. Gate and up are one matrix in the same way.

Letters: B rows, L tokens, V vocabulary, D width, K key heads, G query heads for each of them, E head width, F
feed-forward width, S cache length.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, Key, PyTree

from seedx.networks import rope
from seedx.networks.int8 import project, take_rows
from seedx.networks.transformer_config import TransformerConfig

Cache = tuple[dict[str, Array], ...]
Angles = tuple[Array, Array]


class RMSNorm(nnx.Module):
    """x / rms(x) * (weight + offset), in float32 (1910.07467)."""

    def __init__(self, size: int, config: TransformerConfig, param: "_Param", axis: str = "embed") -> None:
        self.eps, self.offset = config.norm_eps, config.norm_offset
        self.weight = param((size,), (axis,), fill=1.0 - config.norm_offset)

    def __call__(self, x: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
        """The normalised x, in its dtype."""
        weight = self.weight[...].astype(jnp.float32) + self.offset
        return rms_norm(x, weight.reshape((1,) * (x.ndim - 1) + (-1,)), self.eps)


def rms_norm(x: Float[Array, "*B D"], weight: Float[Array, "*W D"], eps: float) -> Float[Array, "*B D"]:
    """x / rms(x) * weight in float32; the result has the dtype of x."""
    y = x.astype(jnp.float32)
    return (y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + eps) * weight).astype(x.dtype)


class Attention(nnx.Module):
    """Grouped-query attention (2305.13245) over the tokens of a call or over a cache."""

    def __init__(self, config: TransformerConfig, param: "_Param") -> None:
        self.config = config
        heads = (config.num_kv_heads, config.queries_per_kv + 2, config.head_dim)
        self.qkv = param((config.width, *heads), ("embed", "kv_heads", "group", "head_dim"))
        self.bias = param(heads, ("kv_heads", "group", "head_dim"), fill=0.0) if config.attention_bias else None
        self.q_norm = RMSNorm(config.head_dim, config, param, "head_dim") if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config, param, "head_dim") if config.qk_norm else None
        self.out = param(
            (config.num_kv_heads, config.queries_per_kv, config.head_dim, config.width),
            ("kv_heads", "group", "head_dim", "embed"),
        )

    def __call__(
        self,
        x: Float[Array, "B L D"],
        angles: Angles,
        mask: Bool[Array, "B L S"],
        positions: Int[Array, "B L"],
        cache: dict[str, Array] | None,
    ) -> tuple[Float[Array, "B L D"], dict[str, Array] | None]:
        """What the tokens take from those that they see, and the cache of this layer with their own entries."""
        config = self.config
        batch, length, _ = x.shape
        qkv = project(x, self.qkv.get_value())
        qkv = qkv.reshape(batch, length, config.num_kv_heads, config.queries_per_kv + 2, config.head_dim)
        if self.bias is not None:
            qkv += self.bias[...][None, None]
        qk, v = qkv[..., :-1, :], qkv[..., -1, :]
        if self.q_norm is not None and self.k_norm is not None:
            qk = jnp.concatenate([self.q_norm(qk[..., :-1, :]), self.k_norm(qk[..., -1:, :])], axis=-2)
        qk = rope.rotate(qk, *angles)
        q, k = qk[..., :-1, :].transpose(0, 2, 3, 1, 4), qk[..., -1, :]
        if cache is None:
            k, v = k.transpose(0, 2, 3, 1), v.transpose(0, 2, 1, 3)
        else:
            cache = _write(cache, k, v, positions)
            k, v = cache["k"].astype(x.dtype), cache["v"].astype(x.dtype)
        # Plain products, queries on the left: an einsum may swap its operands, and then a CPU copies both.
        rows = (batch, config.num_kv_heads, config.queries_per_kv * length)
        scores = jnp.matmul(q.reshape(*rows, -1), k, preferred_element_type=jnp.float32) * config.score_scale
        scores = _soft_cap(scores, config.attention_soft_cap).reshape(*q.shape[:4], -1)
        scores = jnp.where(mask[:, None, None], scores, jnp.finfo(jnp.float32).min)
        weights = jnp.exp(scores - jax.lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True)))
        total = jnp.sum(weights, axis=-1, keepdims=True)
        # A softmax; its division comes last, where there is less to divide.
        y = jnp.matmul(weights.astype(x.dtype).reshape(*rows, -1), v)
        y = (y.reshape(q.shape).astype(jnp.float32) / total).astype(x.dtype)
        y = y.transpose(0, 3, 1, 2, 4).reshape(batch, length, -1)
        return project(y, self.out.get_value()), cache


class FeedForward(nnx.Module):
    """down(act(gate x) * up x) (2002.05202)."""

    def __init__(self, config: TransformerConfig, param: "_Param") -> None:
        self.activation = {"silu": jax.nn.silu, "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True)}[
            config.activation
        ]
        self.gate_up = param((config.width, 2, config.ffn_width), ("embed", "gate_up", "ffn"))
        self.down = param((config.ffn_width, config.width), ("ffn", "embed"))

    def __call__(self, x: Float[Array, "B L D"]) -> Float[Array, "B L D"]:
        """The same for every token."""
        gate, up = jnp.split(project(x, self.gate_up.get_value()), 2, axis=-1)
        return project(self.activation(gate) * up, self.down.get_value())


class Block(nnx.Module):
    """Attention and feed-forward, each with its norms, added to the residual stream."""

    def __init__(self, config: TransformerConfig, param: "_Param") -> None:
        self.attention_norm = RMSNorm(config.width, config, param)
        self.attention = Attention(config, param)
        self.attention_post_norm = RMSNorm(config.width, config, param) if config.post_norms else None
        self.ffn_norm = RMSNorm(config.width, config, param)
        self.ffn = FeedForward(config, param)
        self.ffn_post_norm = RMSNorm(config.width, config, param) if config.post_norms else None

    def __call__(
        self, x: Float[Array, "B L D"], *args: PyTree
    ) -> tuple[Float[Array, "B L D"], dict[str, Array] | None]:
        """The residual stream after the block; `args` are those of `Attention`, after its first."""
        y, cache = self.attention(self.attention_norm(x), *args)
        x += self.attention_post_norm(y) if self.attention_post_norm is not None else y
        y = self.ffn(self.ffn_norm(x))
        return x + (self.ffn_post_norm(y) if self.ffn_post_norm is not None else y), cache


class Transformer(nnx.Module):
    """Embedding, blocks, norm, output."""

    def __init__(self, config: TransformerConfig, rngs: nnx.Rngs, dtype: DTypeLike) -> None:
        param = _Param(rngs, dtype)
        self.embedding = param((config.vocab_size, config.width), ("vocab", "embed"))
        for layer in range(config.num_layers):
            setattr(self, layer_name(layer), Block(config, param))
        self.norm = RMSNorm(config.width, config, param)
        if not config.tie_embeddings:
            self.output = param((config.width, config.vocab_size), ("embed", "vocab"))


class _Param:
    """Makes parameters: normal with standard deviation 0.02, or filled; the names of the axes go with them."""

    def __init__(self, rngs: nnx.Rngs, dtype: DTypeLike) -> None:
        self.rngs, self.dtype = rngs, dtype

    def __call__(self, shape: tuple[int, ...], axes: tuple[str, ...], fill: float | None = None) -> nnx.Param:
        if fill is not None:
            return nnx.Param(jnp.full(shape, fill, self.dtype), axes=axes)
        return nnx.Param(0.02 * jax.random.normal(self.rngs.params(), shape, self.dtype), axes=axes)


def init_params(config: TransformerConfig, key: Key[Array, ""], dtype: DTypeLike = jnp.float32) -> PyTree:
    """Random parameters: nested dicts, every leaf of `dtype`."""
    return jax.jit(lambda key: nnx.to_pure_dict(nnx.state(Transformer(config, nnx.Rngs(key), dtype))))(key)


def abstract_params(config: TransformerConfig, dtype: DTypeLike = jnp.float32) -> PyTree:
    """Shapes and dtypes of the parameters."""
    shapes = nnx.to_pure_dict(nnx.state(_abstract(config)))
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtype), shapes)


def logical_axes(config: TransformerConfig) -> PyTree:
    """The names of each parameter's axes, a tuple in the place of each array."""

    def is_param(x: object) -> bool:
        return isinstance(x, nnx.Param)

    return nnx.to_pure_dict(jax.tree.map(lambda p: p.replace(p.axes), nnx.state(_abstract(config)), is_leaf=is_param))


def apply(
    config: TransformerConfig,
    params: PyTree,
    tokens: Int[Array, "B L"],
    positions: Int[Array, "B L"],
    *,
    segments: Int[Array, "B L"] | None = None,
    cache: Cache | None = None,
    logits_at: Int[Array, "B"] | None = None,
) -> tuple[Float[Array, "B N V"], Cache | None]:
    """Logits of the next token.

    Args:
        config: Of the model.
        params: Its parameters.
        tokens: Ids.
        positions: Of each token in its text, from 0.
        segments: See `features`.
        cache: See `features`.
        logits_at: The one token of each row whose logits are wanted; None: all, N = L.
    """
    x, cache = features(config, params, tokens, positions, segments=segments, cache=cache)
    if logits_at is not None:
        x = jnp.take_along_axis(x, logits_at[:, None, None], axis=1)
    return logits_of(config, params, x), cache


def features(
    config: TransformerConfig,
    params: PyTree,
    tokens: Int[Array, "B L"],
    positions: Int[Array, "B L"],
    *,
    segments: Int[Array, "B L"] | None = None,
    parents: Int[Array, "B L"] | None = None,
    cache: Cache | None = None,
    remat: bool = False,
    whole: Callable[[str, PyTree], PyTree] | None = None,
) -> tuple[Float[Array, "B L D"], Cache | None]:
    """What the output makes logits of, and the cache after the call.

    Without a cache a token sees the tokens before it in its row that have its segment (packed rows; 0 is padding), or
    are its parent's. With a cache, keys and values are first written at `positions` (one at or beyond its length writes
    nothing); then a token sees entries up to its own position. What lies beyond counts nothing. So a prompt in one
    piece or in chunks, one token of each row, and a check of guessed tokens are all the same call.

    Args:
        config: Of the model.
        params: Its parameters; their dtype is the one that is computed in, but for norms, softmax and logits (float32).
            Of those that `int8.quantize` made it is the norms'.
        tokens: Ids.
        positions: Of each token in its text, from 0.
        segments: Which text of a packed row a token belongs to; None: one text.
        parents: The segment that a token's own goes on from; None: none does.
        cache: Of `init_cache`; the cache after the call is returned.
        remat: Whether a gradient computes each block anew instead of keeping what is in it (1604.06174).
        whole: Makes those parameters of a block that it is computed with, of its name and what stands in `params`;
            computed anew with it. None: they are the same.
    """
    x = take_rows(params["embedding"], tokens, params["norm"]["weight"].dtype)
    if config.embedding_scale != 1.0:
        x *= jnp.asarray(config.embedding_scale, x.dtype)
    masks = _masks(config, positions, segments, parents, cache)
    turns = _angles(config, positions)
    after: list[Any] = []
    for layer in range(config.num_layers):
        sliding, name = config.window(layer) > 0, layer_name(layer)
        call = functools.partial(_block, config, name, whole)
        call = jax.checkpoint(call) if remat else call
        entries = cache[layer] if cache is not None else None
        x, entry = call(params[name], x, turns[sliding], masks[sliding], positions, entries)
        after.append(entry)
    norm = nnx.merge(nnx.graphdef(_abstract(config).norm), params["norm"])
    return norm(x), tuple(after) if cache is not None else None


def _block(
    config: TransformerConfig, name: str, whole: Callable[[str, PyTree], PyTree] | None, part: PyTree, *args: PyTree
) -> tuple[Float[Array, "B L D"], dict[str, Array] | None]:
    """A block of these parameters, applied."""
    params = part if whole is None else whole(name, part)
    return nnx.merge(nnx.graphdef(getattr(_abstract(config), name)), params)(*args)


def logits_of(config: TransformerConfig, params: PyTree, x: Float[Array, "*B D"]) -> Float[Array, "*B V"]:
    """Logits of `features`, float32."""
    matrix = params["embedding"] if config.tie_embeddings else params["output"]
    output = jax.tree.map(jnp.transpose, matrix) if config.tie_embeddings else matrix
    return _soft_cap(project(x, output, jnp.float32), config.final_soft_cap)


def init_cache(config: TransformerConfig, batch: int, length: int, dtype: DTypeLike = jnp.float32) -> Cache:
    """An empty cache: keys `[B, K, E, S]` and values `[B, K, S, E]` of each layer.

    These are the layouts that both products of attention read along their last axis; on a CPU any other is copied.
    """
    heads = (batch, config.num_kv_heads)
    keys, values = (*heads, config.head_dim, length), (*heads, length, config.head_dim)
    return tuple({"k": jnp.zeros(keys, dtype), "v": jnp.zeros(values, dtype)} for _ in range(config.num_layers))


def cache_axes(config: TransformerConfig) -> PyTree:
    """The names of each cache leaf's axes."""
    keys, values = ("batch", "kv_heads", "head_dim", "cache"), ("batch", "kv_heads", "cache", "head_dim")
    return tuple({"k": keys, "v": values} for _ in range(config.num_layers))


def layer_name(layer: int) -> str:
    """What the parameters of a block are called."""
    return f"layer_{layer}"


@functools.cache
def _abstract(config: TransformerConfig) -> Transformer:
    return nnx.eval_shape(lambda: Transformer(config, nnx.Rngs(0), jnp.float32))


def _write(
    cache: dict[str, Array], k: Float[Array, "B L K E"], v: Float[Array, "B L K E"], positions: Int[Array, "B L"]
) -> dict[str, Array]:
    """The entries of a row depend on the row alone, and are told to: so rows on several devices stay where they are.

    Values are written finite. Weights that overflow must not spoil the next text of their slot, which counts what lies
    beyond its end 0 times.
    """

    def row(k_cache: Array, v_cache: Array, k: Array, v: Array, at: Array) -> tuple[Array, Array]:
        return k_cache.at[:, :, at].set(k, mode="drop"), v_cache.at[:, at].set(v, mode="drop")

    k, v = k.transpose(0, 2, 3, 1).astype(cache["k"].dtype), v.transpose(0, 2, 1, 3).astype(cache["v"].dtype)
    k, v = jax.vmap(row)(cache["k"], cache["v"], k, jnp.where(jnp.isfinite(v), v, 0), positions)
    return {"k": k, "v": v}


def _masks(
    config: TransformerConfig,
    positions: Int[Array, "B L"],
    segments: Int[Array, "B L"] | None,
    parents: Int[Array, "B L"] | None,
    cache: Cache | None,
) -> tuple[Bool[Array, "B L S"], Bool[Array, "B L S"]]:
    """What a token of a full and of a sliding layer sees."""
    if cache is not None:
        others = jnp.arange(cache[0]["k"].shape[-1])[None, None]
        full = others <= positions[:, :, None]
    else:
        others = positions[:, None]
        index = jnp.arange(positions.shape[1])
        full = jnp.broadcast_to((index[:, None] >= index[None])[None], (*positions.shape, positions.shape[1]))
        if segments is not None:
            own = segments[:, :, None] == segments[:, None]
            full &= own if parents is None else own | (parents[:, :, None] == segments[:, None])
    return full, full & (positions[:, :, None] - others < config.sliding_window) if config.sliding_window else full


def _angles(config: TransformerConfig, positions: Int[Array, "B L"]) -> tuple[Angles, Angles]:
    """Cosines and sines of full and of sliding layers."""
    full = rope.angles(positions, config.head_dim, config.rope_theta, config.rope_scaling)
    if config.local_rope_theta is None:
        return full, full
    return full, rope.angles(positions, config.head_dim, config.local_rope_theta, None)


def _soft_cap(x: Float[Array, "*B"], cap: float) -> Float[Array, "*B"]:
    """cap * tanh(x / cap) (2408.00118); as it is if the cap is 0."""
    return cap * jnp.tanh(x / cap) if cap else x

"""The transformer: a cache in any chunks gives what one pass gives; packing, windows, caps, dtypes and devices."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from seedx.checks import ConfigError
from seedx.networks import transformer
from seedx.networks.transformer import (
    abstract_params,
    apply,
    cache_axes,
    init_cache,
    init_params,
    logical_axes,
)
from seedx.networks.transformer_config import RopeScaling, TransformerConfig
from seedx.sharding import serve_mesh, serve_shardings

LLAMA = TransformerConfig(
    vocab_size=24, width=16, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=6, ffn_width=20, max_length=32
)
EVERYTHING = dataclasses.replace(
    LLAMA,
    activation="gelu_tanh",
    rope_scaling=RopeScaling("linear", 2.0),
    local_rope_theta=30.0,
    norm_offset=1.0,
    post_norms=True,
    qk_norm=True,
    attention_bias=True,
    tie_embeddings=False,
    embedding_scale=4.0,
    sliding_window=4,
    sliding_layers=(True, False),
    attention_soft_cap=2.0,
    final_soft_cap=3.0,
    query_scale=0.3,
)
CONFIGS = {"llama": LLAMA, "everything": EVERYTHING}
B, L, S = 2, 12, 16
TOKENS = jax.random.randint(jax.random.key(1), (B, L), 0, LLAMA.vocab_size)
POSITIONS = jnp.broadcast_to(jnp.arange(L, dtype=jnp.int32), (B, L))


@functools.cache
def params_of(config, dtype=jnp.float32):
    """Parameters large enough for every part to show; NumPy, for it compiles nothing."""
    rng = np.random.default_rng(0)

    def draw(path, leaf):
        centre = 1.0 - config.norm_offset if path[-1].key == "weight" else 0.0
        return jnp.asarray(centre + 0.3 * rng.normal(size=leaf.shape).astype(np.float32), dtype)

    return jax.tree.map_with_path(draw, abstract_params(config))


@functools.cache
def compiled(config):
    return jax.jit(functools.partial(apply, config))


@functools.cache
def full_logits(config):
    return np.asarray(compiled(config)(params_of(config), TOKENS, POSITIONS)[0])


def in_chunks(config, sizes):
    """Logits of all positions through a cache, so many tokens at a time; the cache starts as garbage."""
    cache = jax.tree.map(lambda x: x + 7.0, init_cache(config, B, S))
    found, at = [], 0
    for size in sizes:
        chunk = slice(at, at + size)
        logits, cache = compiled(config)(params_of(config), TOKENS[:, chunk], POSITIONS[:, chunk], cache=cache)
        found.append(logits)
        at += size
    return np.concatenate(found, axis=1)


def chunkings():
    """Sizes that sum to L; few different ones, so that few programs are compiled."""

    def filled(sizes):
        ends = np.cumsum(sizes)
        kept = [int(size) for size, end in zip(sizes, ends, strict=True) if end <= L]
        return kept + [1] * (L - sum(kept))

    return st.lists(st.sampled_from([1, 3, 4]), max_size=L).map(filled)


@pytest.mark.parametrize("name", CONFIGS)
@given(sizes=chunkings())
@example(sizes=[1] * L)
@settings(max_examples=12)
def test_a_cache_in_any_chunks_gives_what_one_pass_gives(name, sizes):
    np.testing.assert_allclose(in_chunks(CONFIGS[name], sizes), full_logits(CONFIGS[name]), atol=2e-5)


def test_rows_of_a_cache_are_at_positions_of_their_own():
    config, starts = EVERYTHING, jnp.array([3, 7])
    cache = init_cache(config, B, S)
    pad = jnp.where(starts[:, None] > POSITIONS, POSITIONS, S)  # beyond the cache: writes nothing
    _, cache = compiled(config)(params_of(config), TOKENS, pad, cache=cache)
    rows = jnp.arange(B)
    for step in range(L - 7):
        at = starts + step
        logits, cache = compiled(config)(params_of(config), TOKENS[rows, at][:, None], at[:, None], cache=cache)
        np.testing.assert_allclose(logits[:, 0], full_logits(config)[rows, at], atol=2e-5)


def test_a_position_beyond_the_cache_writes_nothing():
    cache = jax.tree.map(jnp.ones_like, init_cache(LLAMA, B, S))
    _, after = compiled(LLAMA)(params_of(LLAMA), TOKENS, POSITIONS + S, cache=cache)
    assert jax.tree.all(jax.tree.map(np.array_equal, after, cache))


def test_packed_texts_are_as_if_alone():
    config, cut = EVERYTHING, 5
    positions = jnp.where(cut > POSITIONS, POSITIONS, POSITIONS - cut)
    segments = jnp.where(cut > POSITIONS, 1, 2).at[:, -2:].set(0)
    packed = compiled(config)(params_of(config), TOKENS, positions, segments=segments)[0]
    np.testing.assert_allclose(packed[:, :cut], full_logits(config)[:, :cut], atol=2e-5)
    second = compiled(config)(params_of(config), TOKENS[:, cut:-2], POSITIONS[:, : L - cut - 2])[0]
    np.testing.assert_allclose(packed[:, cut:-2], second, atol=2e-5)
    assert np.isfinite(packed).all()  # padding too: its gradient is zero times this


def test_a_token_sees_its_own_segment_and_its_parents():
    """Two families in a row, the second without a parent, and padding; token by token."""
    segments = np.array([[1, 1, 1, 4, 4, 6, 7, 7, 9, 9, 0, 0]])
    parents = np.array([[1, 1, 1, 1, 1, 1, 7, 7, 9, 9, 0, 0]])
    positions = np.array([[0, 1, 2, 3, 4, 3, 0, 1, 0, 1, 0, 0]])
    masks = transformer._masks(EVERYTHING, *map(jnp.asarray, (positions, segments, parents)), None)
    for i, j in np.ndindex(L, L):
        full = j <= i and segments[0, j] in (segments[0, i], parents[0, i])
        assert bool(masks[0][0, i, j]) == full
        assert bool(masks[1][0, i, j]) == (full and positions[0, i] - positions[0, j] < 4)
    none = transformer._masks(EVERYTHING, jnp.asarray(positions), jnp.asarray(segments), None, None)
    assert not none[0][0, 3:6, :3].any()


def reached(config):
    """Which tokens `[L]` the last token's logits depend on."""
    last = compiled(config)(params_of(config), TOKENS, POSITIONS)[0][0, -1]
    changed = [TOKENS.at[0, i].set((TOKENS[0, i] + 1) % config.vocab_size) for i in range(L)]
    return [bool((compiled(config)(params_of(config), x, POSITIONS)[0][0, -1] != last).any()) for x in changed]


def test_a_sliding_layer_sees_its_window_and_two_see_the_windows_of_the_first():
    assert all(reached(LLAMA))
    one = dataclasses.replace(LLAMA, num_layers=1, sliding_window=4, sliding_layers=(True,))
    assert reached(one) == [False] * (L - 4) + [True] * 4
    two = dataclasses.replace(LLAMA, sliding_window=4, sliding_layers=(True, True))
    assert reached(two) == [False] * (L - 7) + [True] * 7


def test_soft_caps_bound_logits_and_act_on_scores():
    plain = dataclasses.replace(LLAMA, num_layers=1)
    capped = dataclasses.replace(plain, final_soft_cap=0.5)
    uncapped = full_logits(plain)
    np.testing.assert_allclose(full_logits(capped), 0.5 * np.tanh(uncapped / 0.5), atol=1e-5)
    # Scores capped to nearly nothing make attention a mean, whatever the queries are.
    flat = dataclasses.replace(plain, attention_soft_cap=1e-6)
    params = params_of(plain)
    other = jax.tree.map(jnp.array, params)
    attention = other["layer_0"]["attention"]
    attention["qkv"] = attention["qkv"].at[:, :, :-2].multiply(-2.0)
    found = [compiled(flat)(p, TOKENS, POSITIONS)[0] for p in (params, other)]
    np.testing.assert_allclose(*found, atol=1e-4)
    assert np.abs(found[0] - uncapped).max() > 0.1


def test_logits_of_one_token_of_each_row():
    at = jnp.array([4, 11])
    logits, cache = compiled(LLAMA)(params_of(LLAMA), TOKENS, POSITIONS, logits_at=at)
    assert cache is None
    np.testing.assert_allclose(logits[:, 0], full_logits(LLAMA)[np.arange(B), at], atol=1e-5)


def test_bf16_computes_in_bf16_and_gives_float32_logits_near_those_of_float32():
    config = EVERYTHING
    cache = init_cache(config, B, S, jnp.bfloat16)
    logits, after = compiled(config)(params_of(config, jnp.bfloat16), TOKENS, POSITIONS, cache=cache)
    assert logits.dtype == jnp.float32
    assert {leaf.dtype for leaf in jax.tree.leaves(after)} == {jnp.dtype(jnp.bfloat16)}
    exact = full_logits(config)
    assert 0 < np.abs(logits - exact).max() < 0.1 * np.abs(exact).max()


def is_names(node):
    return isinstance(node, tuple) and all(isinstance(name, str) for name in node)


def test_every_parameter_and_cache_has_named_axes():
    for config in CONFIGS.values():
        shapes, axes = abstract_params(config, jnp.bfloat16), logical_axes(config)
        ranks = jax.tree.map(lambda leaf: len(leaf.shape), shapes)
        assert ranks == jax.tree.map(len, axes, is_leaf=is_names)
        assert {leaf.dtype for leaf in jax.tree.leaves(shapes)} == {jnp.dtype(jnp.bfloat16)}
        made = jax.eval_shape(lambda config=config: init_params(config, jax.random.key(0), jnp.bfloat16))
        assert jax.tree.map(lambda x: (x.shape, x.dtype), made) == jax.tree.map(lambda x: (x.shape, x.dtype), shapes)
        cache = init_cache(config, B, S)
        jax.tree.map(
            lambda leaf, names: leaf.ndim == len(names) or pytest.fail(f"{leaf} {names}"), cache, cache_axes(config)
        )


@pytest.mark.parametrize(
    ("data", "tensor", "fsdp"), [(2, 2, 2), *(pytest.param(*m, marks=pytest.mark.slow) for m in ((4, 2, 1), (8, 1, 1)))]
)
def test_eight_devices_give_what_one_gives(data, tensor, fsdp):
    config, rows = EVERYTHING, 8
    mesh = serve_mesh(data=data, fsdp=fsdp, tensor=tensor)
    params = jax.device_put(params_of(config), serve_shardings(mesh, logical_axes(config), abstract_params(config)))
    blank = init_cache(config, rows, S)
    cache = jax.device_put(blank, serve_shardings(mesh, cache_axes(config), blank))
    qkv, keys = params["layer_0"]["attention"]["qkv"], cache[0]["k"]
    assert qkv.addressable_shards[0].data.shape[:2] == (config.width // fsdp, config.num_kv_heads // tensor)
    assert keys.addressable_shards[0].data.shape[:2] == (rows // (data * fsdp), config.num_kv_heads // tensor)
    tokens, positions = jnp.tile(TOKENS, (4, 1)), jnp.tile(POSITIONS, (4, 1))
    logits, after = compiled(config)(params, tokens, positions, cache=cache)
    np.testing.assert_allclose(logits, np.tile(full_logits(config), (4, 1, 1)), atol=2e-5)
    assert after[0]["k"].sharding.is_equivalent_to(keys.sharding, 4)


def test_what_does_not_divide_over_the_devices_is_refused():
    for sizes, said in (
        ({"tensor": 4}, r"kv_heads \(2\) .* mesh\.tensor \(4\)"),
        ({"fsdp": 3}, r"embed \(16\) .*fsdp \(3\)"),
    ):
        with pytest.raises(ConfigError, match=said):
            serve_shardings(serve_mesh(**sizes), logical_axes(LLAMA), abstract_params(LLAMA))
    with pytest.raises(
        ConfigError, match=r"\(4 x 1 x 4\) asks for 16 devices; there are 8: .*XLA_FLAGS=.*device_count=16"
    ):
        serve_mesh(data=4, tensor=4)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"num_kv_heads": 3}, r"num_heads \(4\) must be a multiple of num_kv_heads \(3\)"),
        ({"head_dim": 5}, r"head_dim \(5\) must be even"),
        ({"activation": "relu"}, r"activation \(relu\) must be one of silu, gelu_tanh"),
        ({"sliding_layers": (True,), "sliding_window": 3}, "1 entries for 2 layers"),
        ({"sliding_layers": (True, False)}, r"sliding_window \(0\) must be positive"),
        ({"vocab_size": 0}, r"vocab_size \(0\) must be positive"),
        ({"rope_theta": float("nan")}, r"rope_theta \(nan\)"),
        ({"query_scale": 0.0}, r"query_scale \(0.0\) must be positive"),
    ],
)
def test_a_config_that_cannot_work_is_refused(change, said):
    with pytest.raises(ConfigError, match=said):
        dataclasses.replace(LLAMA, **change)


@pytest.mark.parametrize(
    ("scaling", "said"),
    [
        ({"kind": "dynamic", "factor": 2.0}, r"kind \(dynamic\) must be one of linear, llama3, yarn"),
        ({"kind": "linear", "factor": 0.0}, r"factor \(0.0\) must be positive"),
        ({"kind": "yarn", "factor": 2.0}, r"original_length \(0\) must be positive for yarn"),
        (
            {"kind": "llama3", "factor": 2.0, "original_length": 4, "high_frequency_factor": 1.0},
            r"high_frequency_factor \(1.0\) must be greater",
        ),
    ],
)
def test_a_scaling_that_cannot_work_is_refused(scaling, said):
    with pytest.raises(ConfigError, match=said):
        RopeScaling(**scaling)

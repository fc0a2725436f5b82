"""Int8 weights: what a matrix loses, products, engines, the log-probability gap, new versions, what they take."""

import dataclasses
import functools
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decode_harness import CONFIG, Serving, full_logits, greedy, make_params, near_misses, random_prompts
from hypothesis import given, settings
from hypothesis import strategies as st
from server_harness import wait_until

from seedx import sharding
from seedx.checks import ConfigError
from seedx.inference.decode_programs import Order, make_programs
from seedx.inference.engine import Engine, Placement
from seedx.inference.logprob_gap import GapMeter, draw_texts, logprobs_of
from seedx.inference.memory_plan import GAP_TEXTS, GAP_TOKENS, plan_memory
from seedx.networks import int8, transformer
from seedx.networks.transformer_config import TransformerConfig
from seedx.weights import Weights

UNTIED = dataclasses.replace(CONFIG, num_layers=1, tie_embeddings=False, attention_bias=True, qk_norm=True)
SMALL = dataclasses.replace(CONFIG, num_layers=1)


def int8_engine(config=CONFIG, mesh=None, slots=4):
    shapes = transformer.abstract_params(config)
    plan = plan_memory(config, shapes, 10**9, max_slots=slots, chunk=16, prefix_cache_bytes=1 << 20, quantize=True)
    return Engine(config, plan, mesh=mesh, steps_per_dispatch=2)


def quantize(params, config=CONFIG):
    return int8.quantize(params, transformer.logical_axes(config))


def dequantize(params):
    """Every int8 matrix as float32 again."""
    return jax.tree.map(
        lambda leaf: leaf.values.astype(jnp.float32) * leaf.scale if is_int8(leaf) else leaf, params, is_leaf=is_int8
    )


def is_int8(leaf):
    return isinstance(leaf, int8.Int8Matrix)


@pytest.fixture(scope="module")
def engine():
    engine = int8_engine()
    engine.warm_up(Weights(0, make_params(0)))
    return engine


@pytest.fixture(scope="module")
def versions():
    return [make_params(seed) for seed in range(3)]


# ---- matrices


@settings(max_examples=30, deadline=None)
@given(
    st.sampled_from([1e-42, 1e-30, 1.0, 3e38]),
    st.integers(0, 1000),
    st.sampled_from([("embed", "kv_heads", "group", "head_dim"), ("kv_heads", "group", "head_dim", "embed")]),
)
def test_each_element_is_within_half_a_scale(magnitude, seed, names):
    """Also of channels of zeros, of tiny and of huge numbers."""
    drawn = np.random.default_rng(seed).uniform(-1, 1, (4, 3, 2, 5)).astype(np.float32) * np.float32(magnitude)
    drawn[..., 0] = 0
    matrix = int8.quantize({"m": jnp.asarray(drawn)}, {"m": names})["m"]
    values, scale = (np.asarray(leaf, np.float64) for leaf in matrix)
    assert np.abs(values).max() <= 127
    assert scale.shape == ((1, 3, 2, 5) if names[0] == "embed" else (1, 1, 1, 5))
    assert (np.abs(drawn - values * scale) <= scale / 2 * (1 + 1e-5)).all()


@pytest.mark.parametrize("config", [CONFIG, UNTIED])
def test_matrices_are_int8_with_a_scale_for_each_output_channel_and_the_rest_stays(config):
    params = make_params(0, config)
    quantized = quantize(params, config)
    for path, leaf in jax.tree_util.tree_leaves_with_path(quantized, is_leaf=is_int8):
        assert is_int8(leaf) == (path[-1].key in {"embedding", "output", "qkv", "out", "gate_up", "down"}), path
    scales = {name: quantized["layer_0"][part][name].scale.shape for part, name in LAYER_MATRICES}
    assert scales == {"qkv": (1, 2, 4, 8), "out": (1, 1, 1, 32), "gate_up": (1, 2, 64), "down": (1, 32)}
    assert quantized["embedding"].scale.shape == (64, 1)
    axes = int8.quantized_axes(transformer.logical_axes(config))
    jax.tree.map(lambda leaf, names: assert_named(leaf, names), quantized, axes)


LAYER_MATRICES = [("attention", "qkv"), ("attention", "out"), ("ffn", "gate_up"), ("ffn", "down")]


def assert_named(leaf, names):
    assert len(names) == leaf.ndim
    assert all(name or size == 1 for name, size in zip(names, leaf.shape, strict=True))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(("part", "name"), LAYER_MATRICES)
def test_a_product_is_that_of_the_matrix_that_int8_stands_for(part, name, dtype):
    matrix = quantize(make_params(1))["layer_0"][part][name]
    whole = np.asarray(dequantize({"m": matrix})["m"], np.float64)
    width = {"qkv": 32, "out": 32, "gate_up": 32, "down": 64}[name]
    x = jax.random.normal(jax.random.key(0), (2, 3, width), dtype)
    product = int8.project(x, matrix)
    assert product.dtype == dtype
    oracle = np.asarray(x, np.float64) @ whole.reshape(width, -1)
    tolerance = 1e-5 if dtype == jnp.float32 else 2**-8
    np.testing.assert_allclose(np.asarray(product, np.float64), oracle, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("config", [CONFIG, UNTIED])
def test_a_forward_pass_is_that_of_the_weights_that_int8_stands_for(config):
    params = quantize(make_params(0, config), config)
    texts = random_prompts(2, 20, 20)
    logits, oracle = (full_logits(tree, texts, config) for tree in (params, dequantize(params)))
    np.testing.assert_allclose(logits, oracle, rtol=0, atol=1e-4 * np.abs(oracle).max())  # scales are applied later


# ---- engines


def test_cached_tokens_are_those_of_full_passes_of_the_int8_weights(engine, versions):
    prompts = random_prompts(6, 1, 40, seed=2)
    with Serving(engine, versions[0]) as scheduler:
        done = [scheduler.submit(greedy(prompt)).result(60)[0] for prompt in prompts]
    quantized = quantize(versions[0])
    assert sum(near_misses(quantized, *pair) for pair in zip(prompts, (one.tokens for one in done), strict=True)) <= 1
    assert engine.compilations == 0


def test_the_gap_is_that_of_the_log_probabilities_of_texts_that_the_engine_drew(engine, versions):
    with Serving(engine, versions[0]) as scheduler:
        gap, figures = scheduler.logprob_gap, scheduler.figures()
    weights = Weights(0, engine.quantize(engine.place(versions[0])))
    texts = draw_texts(engine, weights)
    assert texts.shape == (4, 32)
    assert engine.busy == 0
    both = [
        np.asarray(jax.nn.log_softmax(full_logits(params, texts)[:, :31]))
        for params in (versions[0], dequantize(quantize(versions[0])))
    ]
    rows, columns = np.ogrid[:4, :31]
    difference = np.abs(both[0] - both[1])[rows, columns, texts[:, 1:]]
    assert gap.mean == pytest.approx(difference.mean(), rel=1e-3)
    assert gap.greatest == pytest.approx(difference.max(), rel=1e-3)
    assert 0 < gap.mean < gap.greatest
    assert figures["decode/int8_logprob_gap_mean"] == gap.mean
    assert figures["decode/int8_logprob_gap_max"] == gap.greatest


def test_an_engine_that_is_not_int8_has_no_gap(versions):
    plan = plan_memory(SMALL, transformer.abstract_params(SMALL), 10**9, max_slots=2)
    with Serving(Engine(SMALL, plan), make_params(0, SMALL)) as scheduler:
        assert scheduler.logprob_gap is None
        assert not any("gap" in name for name in scheduler.figures())


def test_new_versions_are_quantised_measured_and_compile_nothing(engine, versions, caplog):
    with Serving(engine, versions[0]) as scheduler:
        gaps = [scheduler.logprob_gap]
        scheduler.submit(greedy((5, 9, 2), 4)).result(60)
        scheduler.publish(1, versions[1])
        wait_until(lambda: scheduler.version == 1)
        gaps.append(scheduler.logprob_gap)
        with jax.log_compiles(), caplog.at_level(logging.DEBUG):
            scheduler.publish(2, versions[2])
            wait_until(lambda: scheduler.version == 2)
            gaps.append(scheduler.logprob_gap)
            (done,) = scheduler.submit(greedy((5, 9, 2), 8)).result(60)
    assert not [record.message for record in caplog.records if "ompiling" in record.message]
    assert set(done.versions.tolist()) == {2}
    assert near_misses(quantize(versions[2]), (5, 9, 2), done.tokens) == 0
    assert len(set(gaps)) == 3
    assert engine.compilations == 0


def test_weights_that_cannot_be_used_are_refused_and_the_old_ones_and_their_gap_stay(engine, versions):
    nan = {**versions[1], "norm": {"weight": versions[1]["norm"]["weight"].at[3].set(jnp.nan)}}
    inf = {**versions[1], "embedding": versions[1]["embedding"].at[3, 4].set(jnp.inf)}
    with Serving(engine, versions[0], version=3) as scheduler:
        gap = scheduler.logprob_gap
        for bad in (nan, inf):
            with pytest.raises(ValueError, match="NaN"):
                scheduler.publish(4, bad)
        with pytest.raises(ValueError, match=r"'out'\]\.scale is unexpected"):
            scheduler.publish(4, quantize(versions[1]))
        with pytest.raises(ValueError, match="greater than"):
            scheduler.publish(3, versions[1])
        (done,) = scheduler.submit(greedy((5, 9), 6)).result(60)
        assert scheduler.logprob_gap == gap
    assert set(done.versions.tolist()) == {3}
    assert near_misses(quantize(versions[0]), (5, 9), done.tokens) == 0


def test_a_version_that_waits_for_finishing_requests_is_quantised_before_its_swap(engine, versions):
    meter = GapMeter(engine)
    ready = [Weights(0, engine.quantize(engine.place(params))) for params in versions]
    gaps = [meter.measure(engine.place(versions[i]), ready[i]) for i in (0, 2)]
    with Serving(engine, versions[0]) as scheduler:
        handle = scheduler.submit(greedy((5, 9, 2), 50, on_swap="finish"))
        scheduler.publish(1, versions[1])
        wait_until(lambda: scheduler.version == 1)
        scheduler.publish(2, versions[2])
        (done,) = handle.result(60)
        wait_until(lambda: scheduler.version == 2)
        assert scheduler.logprob_gap == gaps[1]
        (later,) = scheduler.submit(greedy((5, 9), 6)).result(60)
    assert len(set(done.versions.tolist())) == 1
    assert near_misses(quantize(versions[2]), (5, 9), later.tokens) == 0


def test_eight_devices_give_the_int8_matrices_tokens_and_gap_of_one():
    params, made = make_params(0, SMALL), []
    for mesh in (None, sharding.serve_mesh(data=4, tensor=2)):
        engine = int8_engine(SMALL, mesh, slots=8)
        placed = engine.place(params)
        weights = Weights(0, engine.quantize(placed))
        prompts = [np.array(prompt, np.int32) for prompt in random_prompts(8, 1, 16, seed=4)]
        gap = GapMeter(engine).measure(placed, weights)
        prefixes = engine.prefill(weights, prompts)
        engine.insert([Placement(slot, prefix, 1.0, 0, 1.0, 3) for slot, prefix in enumerate(prefixes)])
        made.append((np.concatenate([engine.generate(weights).fetch()[0] for _ in range(6)]), gap, weights.params))
    (tokens, gap, one), (tokens_8, gap_8, eight) = made
    jax.tree.map(np.testing.assert_array_equal, one, eight)
    down, out = eight["layer_0"]["ffn"]["down"], eight["layer_0"]["attention"]["qkv"]
    assert (down.values.sharding.spec[0], tuple(down.scale.sharding.spec)) == ("tensor", (None, "fsdp"))
    assert tuple(out.scale.sharding.spec)[:2] == (None, "tensor")
    assert (tokens != tokens_8).mean() <= 0.02  # near-ties of a draw may fall otherwise
    assert gap_8.mean == pytest.approx(gap.mean, rel=0.1)


# ---- memory

WIDE = TransformerConfig(
    vocab_size=500, width=64, num_layers=8, num_heads=4, num_kv_heads=2, head_dim=16, ffn_width=256, max_length=256
)


def test_the_plan_counts_int8_bytes_and_what_quantising_takes():
    shapes = transformer.abstract_params(WIDE)
    full, small = (plan_memory(WIDE, shapes, 50_000_000, quantize=quantize) for quantize in (False, True))
    held = jax.eval_shape(lambda params: quantize(params, WIDE), shapes)
    assert small.weights_bytes == sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(held))
    assert small.weights_bytes < 0.3 * full.weights_bytes
    assert (full.quantizing_bytes, small.cache_dtype) == (0, full.cache_dtype)
    assert small.quantizing_bytes > full.weights_bytes
    assert "three versions of int8 weights" in small.describe()
    assert "int8" not in full.describe()
    with pytest.raises(ConfigError, match="int8 weights"):
        plan_memory(WIDE, shapes, 1_000_000, quantize=True)


def test_int8_programs_take_no_more_than_planned():
    """Above all a dispatch has no second copy of the weights, which XLA would like to convert before its loop."""
    shapes, mesh = transformer.abstract_params(WIDE), sharding.serve_mesh()
    held = jax.eval_shape(lambda params: quantize(params, WIDE), shapes)
    plan = plan_memory(WIDE, shapes, 50_000_000, chunk=64, max_slots=4, quantize=True)
    programs = make_programs(WIDE, plan, 4, mesh)
    state = jax.eval_shape(programs.fresh), jax.ShapeDtypeStruct((len(Order), plan.num_slots), jnp.int32)
    full, small = (temporary_bytes(programs.generate, params, *state) for params in (shapes, held))
    largest = 4 * max(leaf.size for leaf in jax.tree.leaves(shapes))
    assert small <= full + largest < full + plan.weights_bytes
    texts = jax.ShapeDtypeStruct((GAP_TEXTS, GAP_TOKENS), jnp.int32)
    logprobs = jax.jit(functools.partial(logprobs_of, WIDE))
    published = plan.quantizing_bytes - 4 * sum(leaf.size for leaf in jax.tree.leaves(shapes))
    assert max(temporary_bytes(logprobs, params, texts) for params in (shapes, held)) + largest <= published
    assert temporary_bytes(jax.jit(lambda params: quantize(params, WIDE)), shapes) <= published


def temporary_bytes(program, *args):
    return program.lower(*args).compile().memory_analysis().temp_size_in_bytes

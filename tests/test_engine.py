"""The engine alone: idle slots, chunks, several devices, its memory plan, and lowering for accelerators."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decode_harness import CONFIG, make_engine, make_params, near_misses, random_prompts, warm_engine

from seedx import sharding
from seedx.checks import ConfigError
from seedx.inference.decode_programs import Order, make_programs
from seedx.inference.engine import Placement
from seedx.inference.memory_plan import plan_memory
from seedx.inference.prefix_cache import PrefixCache
from seedx.inference.slot_state import SlotState
from seedx.networks import transformer
from seedx.networks.transformer_config import TransformerConfig
from seedx.weights import Weights

SMALL = dataclasses.replace(CONFIG, num_layers=1)  # for engines that a test makes: half as much to compile


@pytest.fixture(scope="module")
def small_weights():
    return Weights(0, make_params(0, SMALL))


@pytest.fixture(scope="module")
def weights():
    return Weights(0, warm_engine().place(make_params(0)))


@pytest.fixture
def engine():
    """One that other tests have used."""
    engine = warm_engine()
    engine.free(range(engine.plan.num_slots))
    return engine


def place(prefix, slot, temperature=0.0, seed=0):
    return Placement(slot, prefix, temperature, 0, 1.0, seed)


def run(engine, weights, dispatches):
    return np.concatenate([engine.generate(weights).fetch()[0] for _ in range(dispatches)])


def prefix_of(engine, weights, prompt):
    prompt = np.array(prompt, np.int32)
    if not engine.is_long(prompt):
        return engine.prefill(weights, [prompt])[0]
    long = engine.begin(weights, prompt)
    while not long.ready:
        engine.extend(weights, long)
    return long.prefix()


def test_idle_and_late_slots_change_nothing(engine, weights):
    """A text alone, with others beside it, and with others that come and go."""
    prompts = random_prompts(4, 3, 20, seed=1)
    prefixes = [prefix_of(engine, weights, prompt) for prompt in prompts]
    engine.insert([place(prefixes[0], 2, temperature=1.0, seed=9)])
    alone = run(engine, weights, 8)[:, 2]
    engine.insert([place(prefix, slot, 1.0, 9) for slot, prefix in zip((2, 0, 1, 3), prefixes, strict=True)])
    first = run(engine, weights, 3)
    engine.free([0, 3])
    second = run(engine, weights, 2)
    engine.insert([place(prefixes[1], 3)])
    third = run(engine, weights, 3)
    np.testing.assert_array_equal(np.concatenate([first, second, third])[:, 2], alone)


def test_weights_that_overflow_do_not_spoil_the_next_text_of_a_slot(engine, weights):
    prompt = random_prompts(1, 6, 6, seed=3)[0]
    want = decode_alone(engine, weights, prompt)
    params = jax.tree.map(lambda leaf: leaf, weights.params)
    params["layer_0"]["attention"]["qkv"] = 1e25 * weights.params["layer_0"]["attention"]["qkv"]
    assert all(bool(jnp.all(jnp.isfinite(leaf))) for leaf in jax.tree.leaves(params))
    huge = weights._replace(params=engine.place(params))
    engine.insert([place(prefix_of(engine, huge, prompt), 0)])
    logprobs = [engine.generate(huge).fetch()[2][:, 0] for _ in range(8)]
    assert np.isnan(logprobs).any()
    engine.free([0])
    np.testing.assert_array_equal(decode_alone(engine, weights, prompt), want)
    assert engine.compilations == 0


def decode_alone(engine, weights, prompt):
    """Greedy tokens and their log-probabilities in slot 0, the bits of both."""
    engine.insert([place(prefix_of(engine, weights, prompt), 0)])
    made = [engine.generate(weights).fetch() for _ in range(4)]
    engine.free([0])
    return np.concatenate([np.stack([tokens[:, 0], raw[:, 0].view(np.int32)]) for tokens, _, raw in made], axis=1)


@pytest.mark.slow
def test_prompts_of_all_lengths_are_computed_and_copied_whole(small_weights):
    """A context and a chunk that are no multiples of the pieces that a prompt is copied in."""
    config = dataclasses.replace(SMALL, max_length=70)
    engine = make_engine(config, slots=13, chunk=40)
    assert (engine.plan.buckets, engine.plan.batches) == ([16, 32, 40], [(2, 16)])
    lengths = (2, 16, 1, 18, 33, 41, 17, 40), (42, 50, 57, 66, 69)
    prompts = [random_prompts(1, n, n, seed=n)[0] for n in (*lengths[0], *lengths[1])]
    prefixes = engine.prefill(small_weights, [np.array(prompt, np.int32) for prompt in prompts[:8]])
    assert [prefix.first for prefix in prefixes] == [0, 16, 0, 0, 0, 0, 0, 0]
    assert len({id(prefix.rows) for prefix in prefixes if prefix.rows is not None}) == 6
    prefixes += [prefix_of(engine, small_weights, prompt) for prompt in prompts[8:]]
    engine.insert([place(prefix, slot) for slot, prefix in enumerate(prefixes)])
    tokens = run(engine, small_weights, 1)[:1]
    assert sum(near_misses(small_weights.params, prompt, tokens[:, i], config) for i, prompt in enumerate(prompts)) <= 1


@pytest.mark.slow
def test_the_cache_grows_and_shrinks_with_the_longest_text(small_weights):
    weights, config = small_weights, dataclasses.replace(SMALL, max_length=140)
    engine = make_engine(config, slots=2, chunk=120, steps=8)
    prompts = random_prompts(1, 10, 10), random_prompts(1, 105, 105, seed=3)
    short, long = prefix_of(engine, weights, prompts[0][0]), prefix_of(engine, weights, prompts[1][0])
    engine.insert([place(short, 0)])
    spans, tokens = [], []
    for step in range(7):
        if step == 1:
            engine.insert([place(long, 1)])
        if step == 5:
            engine.free([1])
            engine.insert([place(short, 0)])
        tokens.append(engine.generate(weights).fetch()[0])
        spans.append(engine.span)
    assert spans == [64, 140, 140, 140, 140, 64, 64]
    near_misses(weights.params, prompts[0][0], np.concatenate(tokens[:5])[:, 0], config)
    near_misses(weights.params, prompts[1][0], np.concatenate(tokens[1:5])[:, 1], config)
    np.testing.assert_array_equal(np.concatenate(tokens[5:])[:, 0], np.concatenate(tokens[:2])[:, 0])


def test_lengths_of_the_cache(small_weights):
    config = dataclasses.replace(SMALL, max_length=2048)
    plan = plan_memory(config, small_weights.params, 10**9, max_slots=1)
    assert (plan.spans, plan.staged_spans) == ([64, 256, 1024, 2048], [1024, 2048])
    programs = make_programs(config, plan, 1, sharding.serve_mesh())
    slots, spans = SlotState(programs, plan, programs.fresh()), []
    for tokens in (64, 65, 33, 32, 2048, 3000, 513, 512, 129, 128, 1, 1025, 32):
        slots.make_room(tokens)
        spans.append(slots.span)
    assert spans == [64, 256, 256, 64, 2048, 2048, 2048, 1024, 1024, 256, 64, 2048, 64]


@pytest.mark.slow
@pytest.mark.parametrize(("data", "tensor", "fsdp"), [(4, 2, 1), (2, 2, 2)])
def test_eight_devices_give_the_tokens_of_one(small_weights, data, tensor, fsdp):
    prompts = [*random_prompts(6, 1, 16, seed=4), *random_prompts(2, 30, 40, seed=5)]
    made = []
    for mesh in (None, sharding.serve_mesh(data=data, fsdp=fsdp, tensor=tensor)):
        engine = make_engine(SMALL, slots=8, mesh=mesh)
        placed = small_weights._replace(params=engine.place(small_weights.params))
        engine.insert([place(prefix_of(engine, placed, prompt), slot, 1.0, 3) for slot, prompt in enumerate(prompts)])
        made.append(run(engine, placed, 6))
    down = placed.params["layer_0"]["ffn"]["down"]
    assert down.addressable_shards[0].data.shape == (SMALL.ffn_width // tensor, SMALL.width // fsdp)
    assert (made[0] != made[1]).mean() <= 0.02  # near-ties of a draw may fall otherwise


def test_the_plan_counts_what_fits_and_refuses_what_does_not():
    shapes = jax.eval_shape(lambda: transformer.init_params(CONFIG, jax.random.key(0)))
    options = {"chunk": 16, "prefix_cache_bytes": 1000}
    few = plan_memory(CONFIG, shapes, 1_000_000, **options)
    more = plan_memory(CONFIG, shapes, 2_000_000, **options)
    assert 1 < few.num_slots < more.num_slots < 64
    assert few.total_bytes <= 1_000_000 < few.total_bytes + few.slot_bytes
    assert plan_memory(CONFIG, shapes, 2_000_000, slots_multiple=8, **options).num_slots % 8 == 0
    assert f"{few.num_slots} slots of 64 tokens" in few.describe()
    with pytest.raises(ConfigError, match=r"0.1 MB\) holds no decode engine: 1 slots of 64 tokens: 0.\d MB of 0.1 MB"):
        plan_memory(CONFIG, shapes, 100_000, **options)
    with pytest.raises(ConfigError, match="length"):
        plan_memory(CONFIG, shapes, 2_000_000, length=65)


@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_programs_take_no_more_than_planned(size):
    """What XLA reserves for arguments, results and intermediates of the largest programs, against the plan."""
    mesh = sharding.serve_mesh(data=size, fsdp=size, tensor=size)
    config = TransformerConfig(
        vocab_size=500, width=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, ffn_width=128, max_length=256
    )
    params = transformer.init_params(config, jax.random.key(0))
    layout = sharding.serve_shardings(mesh, transformer.logical_axes(config), params)
    params = jax.device_put(params, layout)
    plan = plan_memory(config, params, 200_000_000, chunk=64, max_slots=16, mesh=mesh)
    programs = make_programs(config, plan, 4, mesh)
    orders = jax.ShapeDtypeStruct((len(Order), plan.num_slots), jnp.int32)
    generate = programs.generate.lower(params, programs.fresh(), orders).compile().memory_analysis()
    taken = generate.temp_size_in_bytes + generate.argument_size_in_bytes + generate.output_size_in_bytes
    taken = mesh.size * (taken - generate.alias_size_in_bytes)  # of one device, times all
    assert taken <= plan.weights_bytes + plan.num_slots * plan.slot_bytes
    staged = programs.fresh_staging(plan.length)
    tokens, first = jax.ShapeDtypeStruct((1, plan.chunk), jnp.int32), jax.ShapeDtypeStruct((), jnp.int32)
    extend = programs.extend.lower(params, staged, tokens, first).compile().memory_analysis()
    assert mesh.size * extend.temp_size_in_bytes <= plan.prefill_bytes


def test_prefixes_are_kept_within_their_bound_and_for_one_version():
    cache = PrefixCache(chunk=2, block_bytes=10, max_bytes=35)
    tokens = np.arange(8, dtype=np.int32)
    for end in (2, 4, 6):
        cache.add(0, tokens[:end], ({"k": jnp.full(1, end)},))
    assert [int(block[0]["k"][0]) for block in cache.find(0, tokens[:7])] == [2, 4, 6]
    assert cache.find(1, tokens) == []
    assert cache.find(0, tokens[1:]) == []
    cache.add(0, tokens[4:6], ())  # the last of the chain was used least recently
    assert (len(cache), len(cache.find(0, tokens))) == (3, 2)
    cache.add(1, tokens[:2], ())
    assert (len(cache), cache.find(0, tokens), len(cache.find(1, tokens))) == (1, [], 1)


@pytest.mark.parametrize("platform", ["tpu", "cuda"])
def test_prefill_and_generate_lower_for_accelerators(platform):
    params = jax.eval_shape(lambda: transformer.init_params(CONFIG, jax.random.key(0)))
    programs = make_programs(CONFIG, plan_memory(CONFIG, params, 10**9, max_slots=4), 2, sharding.serve_mesh())
    tokens = jax.ShapeDtypeStruct((2, 16), jnp.int32)
    orders = jax.ShapeDtypeStruct((len(Order), 4), jnp.int32)
    for program, args in (
        (programs.prefill, (tokens, tokens)),
        (programs.generate, (jax.eval_shape(programs.fresh), orders)),
    ):
        exported = jax.export.export(program, platforms=[platform])(params, *args)
        assert exported.platforms == (platform,)
        assert "stablehlo.dot_general" in exported.mlir_module()


def test_short_slots_do_not_keep_prompts_from_being_computed_together():
    params = transformer.init_params(CONFIG, jax.random.key(0))
    plan = plan_memory(CONFIG, params, 200_000_000, length=40, max_slots=16)
    assert (plan.chunk, plan.buckets, plan.batches) == (256, [16, 32, 40], [(16, 16), (6, 40)])
    programs = make_programs(CONFIG, plan, 4, sharding.serve_mesh())
    for shape in plan.batches:
        tokens = jax.ShapeDtypeStruct(shape, jnp.int32)
        taken = programs.prefill.lower(params, tokens, tokens).compile().memory_analysis()
        assert taken.temp_size_in_bytes <= plan.prefill_bytes
        assert 3 * (taken.output_size_in_bytes - 100) <= plan.staging_bytes  # and the table of what is in the output

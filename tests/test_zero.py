"""ZeRO-1, 2 and 3: the updates of one device, from parts of the state on each of eight; and what each device keeps."""

import dataclasses
import functools
from functools import partial

import jax
import numpy as np
import pytest
from bits import assert_bit_equal
from decode_harness import CONFIG, Serving, greedy, make_engine, make_params, near_misses, random_prompts
from text_fakes import random_items

from seedx import sharding
from seedx.agents.grpo import grpo_loss
from seedx.checks import ConfigError
from seedx.device_config import MeshConfig
from seedx.grpo_config import GrpoConfig, TextLearnerConfig
from seedx.learner.text_learner import TextLearner, batch_shapes, shapes_of
from seedx.learner.token_logprobs import Model
from seedx.learner.trainable import Trainable
from seedx.llm_config import LlmConfig
from seedx.llm_setup import layout_of
from seedx.lora_config import LoraConfig
from seedx.metrics import Metrics

# Has parameters that no width divides: biases and norms of heads.
SMALL = dataclasses.replace(
    CONFIG, width=16, num_heads=4, num_kv_heads=2, head_dim=4, ffn_width=16, attention_bias=True, qk_norm=True
)
WIDE = dataclasses.replace(SMALL, width=64, ffn_width=256)
UPDATES = 3
ITEMS = [random_items(seed, num_groups=6, vocab=64) for seed in range(UPDATES)]  # the recorded batches


def weights(seed, config=SMALL):
    """Not so sharp that rounding would be amplified."""

    def blunt(path, leaf):
        of_heads = any(part.key in ("q_norm", "k_norm") for part in path)
        return np.ones_like(leaf) if of_heads else leaf / 2

    return jax.tree_util.tree_map_with_path(blunt, make_params(seed, config))


class Bench:
    """A learner on some devices, and what it published."""

    def __init__(
        self, run_dir, zero=3, mesh=(1, 1, 1), parts=1, lora=0, dtype="float32", remat=False, of=SMALL, **changes
    ):
        data, fsdp, tensor = mesh
        self.mesh = sharding.serve_mesh(data=data, fsdp=fsdp, tensor=tensor)
        settings = GrpoConfig(**{"group_size": 4, "kl_cost": 0.1, "old": "recomputed", **changes})
        # Of Adam: where a gradient is rounding alone, its sign must not decide; with this epsilon it does not.
        config = TextLearnerConfig(batch_size=6, microbatches=parts, learning_rate=0.01, epsilon=1e-3, zero=zero)
        layout = layout_of(of, self.mesh, zero)
        self.params = jax.device_put(weights(0, of), layout)
        model = Model(of, dtype=dtype, remat=remat, layout=layout)
        self.published, self.metrics = [], Metrics()
        self.learner = TextLearner(
            model,
            partial(grpo_loss, model, settings),
            Trainable(
                of,
                self.mesh,
                value_head=settings.advantage == "gae",
                reference=True,
                lora=LoraConfig(lora),
                split=zero == 3,
            ),
            settings,
            config,
            self.mesh,
            self.params,
            shapes_of(config, 4, 4, 8, sharding.row_groups(self.mesh)),
            lambda version, params: self.published.append(params),
            self.metrics,
            run_dir,
        )
        self.learner.state = self.learner.begin(self.params)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tmp_path_factory.mktemp("learned")


@functools.cache
def learned(directory, **options):
    """What is trained after the recorded batches, and the figures of each."""
    bench, rows = Bench(directory, **options), []
    for items in ITEMS:
        bench.learner.step(items)
        rows.append(bench.metrics.snapshot())
    for leaf, before in zip(jax.tree.leaves(bench.published[-1]), jax.tree.leaves(bench.params), strict=True):
        assert leaf.sharding == before.sharding
    return jax.device_get(bench.learner.state.trained), rows


def assert_close(got, want, tolerance=2e-6):
    """Leaves differ by no more than so much of the largest value of all of them."""
    got, want = ([np.asarray(leaf) for leaf in jax.tree.leaves(tree)] for tree in (got, want))
    largest = max(np.abs(leaf).max() for leaf in want)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * largest)


slow = partial(pytest.param, marks=pytest.mark.slow)


@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        ((1, 8, 1), {}),
        slow((2, 2, 2), {"parts": 2}),
        slow((4, 2, 1), {"parts": 2, "advantage": "gae"}),
        slow((1, 4, 2), {"remat": True}),
        slow((2, 2, 2), {"lora": 3, "parts": 2, "remat": True}),
    ],
    ids=str,
)
def test_any_layout_ends_at_the_parameters_of_one_device(directory, zero, mesh, options):
    """But for rounding: 2e-6 of the largest weight."""
    got, rows = learned(directory, zero=zero, mesh=mesh, **options)
    alone = {name: value for name, value in options.items() if name in ("advantage", "lora")}
    want, want_rows = learned(directory, **alone)
    assert_close(got, want)
    assert want_rows[0]["learner/grad_norm"] > 0.01
    for row, want_row in zip(rows, want_rows, strict=True):
        for name in ("loss", "grad_norm", "ratio_max", "kl_reference", "tokens"):
            np.testing.assert_allclose(row[f"learner/{name}"], want_row[f"learner/{name}"], rtol=1e-3, atol=1e-5)


@pytest.mark.slow
def test_in_bfloat16_they_differ_by_no_more_than_its_rounding(directory):
    """No more than what one device has in bfloat16 differs from what it has in float32."""
    want, exact = learned(directory, dtype="bfloat16")[0], learned(directory)[0]
    got = learned(directory, zero=3, mesh=(1, 8, 1), dtype="bfloat16")[0]
    apart, rounding = (norm(jax.tree.map(np.subtract, want, tree)) for tree in (got, exact))
    assert 0 < apart <= rounding


def norm(tree):
    return float(np.sqrt(sum(np.sum(np.square(leaf)) for leaf in jax.tree.leaves(tree))))


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_memory_is_told_as_it_is_taken(directory, zero):
    """Of each of eight devices: by the formulas, by the arrays that live on one, and by XLA."""
    learner = Bench(directory, zero, (1, 8, 1), parts=2, of=WIDE).learner
    needs = learner.compile()
    learner.step(ITEMS[0])
    state = learner.state
    leaves = jax.tree.leaves(learner.state.params)
    whole = sum(leaf.nbytes for leaf in leaves)
    odd = sum(leaf.nbytes for leaf in leaves if not splits(leaf))  # biases, norms of heads
    part = (whole - odd) // 8 + odd
    assert needs.weights == needs.frozen == (part if zero == 3 else whole)
    assert needs.gradients == 2 * (whole if zero == 1 else part)  # of all parts so far, and of one
    assert needs.optimizer == 2 * part + 4  # both moments, and a counter
    assert needs.weights == live_bytes(state.params)
    assert needs.optimizer == live_bytes(state.opt_state)
    gradient, step = (program.memory_analysis() for program in (learner._programs.gradient, learner._programs.step))
    _, row_tokens, rows = learner._shapes
    batch = sum(leaf.size * leaf.dtype.itemsize for leaf in batch_shapes(rows // 8, row_tokens))
    assert gradient.argument_size_in_bytes == pytest.approx(needs.weights + needs.frozen + batch, rel=0.02)
    assert gradient.output_size_in_bytes == pytest.approx(needs.gradients / 2, rel=0.02)
    kept = needs.weights + needs.optimizer + needs.gradients / 2
    assert step.argument_size_in_bytes == pytest.approx(kept, rel=0.02)
    assert needs.temporary == max(gradient.temp_size_in_bytes, step.temp_size_in_bytes) > 0
    assert f"on each of 8 devices with ZeRO-{zero} (weights 0." in needs.describe(8, zero)


def splits(leaf):
    """Whether it can be spread over eight devices."""
    return any(size % 8 == 0 for size in leaf.shape)


def live_bytes(tree):
    """Of the arrays that are on the first device."""
    (first, *_) = jax.devices()
    shards = [shard for leaf in jax.tree.leaves(tree) for shard in leaf.addressable_shards]
    return sum(shard.data.nbytes for shard in shards if shard.device == first)


@pytest.mark.slow
@pytest.mark.parametrize("zero", [1, 3])
def test_the_engine_decodes_with_what_was_published_without_a_copy(zero):
    mesh = sharding.serve_mesh(data=2, fsdp=4)
    layout, params = layout_of(CONFIG, mesh, zero), make_params(0)
    engine = make_engine(slots=8, mesh=mesh, layout=layout)
    placed = jax.device_put(params, layout)
    assert engine.place(placed) is placed
    moved = engine.place(jax.device_put(params, layout_of(CONFIG, mesh, 4 - zero)))
    assert sharding.layout_of(moved) == layout
    assert_bit_equal(moved, params)
    prompts = random_prompts(8, 2, 12)
    with Serving(engine, placed) as scheduler:
        handles = [scheduler.submit(greedy(prompt)) for prompt in prompts]
        completions = [handle.result(60)[0] for handle in handles]
    misses = [near_misses(params, prompt, done.tokens) for prompt, done in zip(prompts, completions, strict=True)]
    assert sum(misses) <= 1


def test_a_preset_without_devices_to_share_with_is_refused():
    config = TextLearnerConfig(zero=2)
    with pytest.raises(ConfigError, match=r"learner.zero \(2\) does nothing with mesh.fsdp 1.*Give --mesh.fsdp"):
        LlmConfig(learner=config)
    LlmConfig(learner=config, mesh=MeshConfig(fsdp=2))

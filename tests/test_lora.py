"""Low-rank adapters: the base until they learn, the chain rule, and nothing else changes; alike on all devices."""

import dataclasses
import functools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bits import assert_bit_equal
from decode_harness import CONFIG, make_params
from text_fakes import random_items, spoilt_items

from seedx import sharding
from seedx.agents.grpo import grpo_loss
from seedx.checks import ConfigError
from seedx.grpo_config import GrpoConfig, TextLearnerConfig
from seedx.learner.learner import NonFiniteError
from seedx.learner.text_batch import pack_batch, sequences_of
from seedx.learner.text_learner import TextLearner, shapes_of
from seedx.learner.token_logprobs import Model
from seedx.learner.trainable import Trainable
from seedx.lora_config import LoraConfig
from seedx.metrics import Metrics
from seedx.networks import lora, transformer

# Sides of its matrices: 16 x 16 (q, out), 16 x 8 (k, v), 16 x 20 (gate, up, down).
SMALL = dataclasses.replace(CONFIG, num_layers=2, width=16, num_heads=4, num_kv_heads=2, head_dim=4, ffn_width=20)
MODEL = Model(SMALL)
ITEMS = random_items(0, num_groups=6, vocab=64)  # 24 sequences of up to 12 tokens
TOKENS = 16  # L
MESHES = {"1": {}, "data=8": {"data": 8}, "data=2, fsdp=2, tensor=2": {"data": 2, "fsdp": 2, "tensor": 2}}
RANK = 3


def weights(seed):
    """Not so sharp that rounding would be amplified."""
    return jax.tree.map(lambda leaf: leaf / 2, make_params(seed, SMALL))


def random_adapters(seed):
    """As after some updates."""
    rng = np.random.default_rng(seed)
    fresh = lora.init_adapters(SMALL, RANK, jax.random.key(0))
    return jax.tree.map(lambda leaf: jnp.asarray(rng.normal(0, 0.2, leaf.shape), jnp.float32), fresh)


def assert_close(got, want, tolerance):
    """Leaves differ by no more than so much of the largest value of all of them."""
    got, want = ([np.asarray(leaf) for leaf in jax.tree.leaves(tree)] for tree in (got, want))
    largest = max(np.abs(leaf).max() for leaf in want)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * largest)


# ---- settings


@pytest.mark.parametrize("changes", [{"rank": -1}, {"alpha": -0.5}])
def test_settings_that_cannot_be(changes):
    with pytest.raises(ConfigError, match="must not be negative"):
        LoraConfig(**changes)


def test_a_scale_of_no_adapters_is_refused():
    with pytest.raises(ConfigError, match=r"lora.alpha \(16\) does nothing without adapters.*--lora.rank"):
        LoraConfig(alpha=16)


def test_the_scale_is_alpha_over_rank():
    assert LoraConfig(rank=8).scale == 1.0
    assert LoraConfig(rank=8, alpha=16).scale == 2.0
    assert LoraConfig(rank=8, alpha=4).scale == 0.5


def test_a_rank_that_is_larger_than_a_matrix_is_refused():
    lora.check_rank(SMALL, 0)
    lora.check_rank(SMALL, 8)
    with pytest.raises(ConfigError, match=r"lora.rank \(9\) must be at most 8, .* matrix '[kv]'; lower it"):
        lora.check_rank(SMALL, 9)
    with pytest.raises(ConfigError, match=r"at most 4, .* 'gate'"):
        lora.check_rank(dataclasses.replace(SMALL, ffn_width=4), 9)


# ---- adapters and their gradient


def linear_maps(block):
    """Each map of a block as a matrix `[inputs, outputs]`, by part and name; NumPy, float64."""
    attention, ffn = ({name: np.float64(leaf) for name, leaf in block[part].items()} for part in ("attention", "ffn"))
    qkv, out, width = attention["qkv"], attention["out"], SMALL.width
    return {
        "attention": {
            "q": qkv[:, :, :-2].reshape(width, -1),
            "k": qkv[:, :, -2].reshape(width, -1),
            "v": qkv[:, :, -1].reshape(width, -1),
            "out": out.reshape(-1, width),
        },
        "ffn": {"gate": ffn["gate_up"][:, 0], "up": ffn["gate_up"][:, 1], "down": ffn["down"]},
    }


def factors(pair):
    """A and B as matrices."""
    return np.float64(pair["a"]).reshape(-1, RANK), np.float64(pair["b"]).reshape(RANK, -1)


@pytest.mark.slow
def test_fresh_adapters_are_the_base_bit_for_bit():
    base = weights(0)
    adapters = lora.init_adapters(SMALL, RANK, jax.random.key(1))
    assert_bit_equal(jax.jit(partial(lora.merge, scale=2.0))(base, adapters), base)
    for block in adapters.values():
        for part in block.values():
            for pair in part.values():
                assert not np.any(pair["b"])
                a, _ = factors(pair)
                assert 0.5 < a.std() * np.sqrt(len(a)) < 1.5
    drawn = [np.asarray(pair["a"]).tobytes() for block in adapters.values() for pair in block["attention"].values()]
    assert len(set(drawn)) == len(drawn)


def test_what_is_merged_is_the_product_and_what_has_no_adapter_is_the_bases():
    base, adapters = weights(0), random_adapters(1)
    merged = lora.merge(base, adapters, 0.5)
    assert jax.tree.structure(merged) == jax.tree.structure(base)
    for layer, own in adapters.items():
        got, before = linear_maps(merged[layer]), linear_maps(base[layer])
        for part, pairs in own.items():
            for name, pair in pairs.items():
                a, b = factors(pair)
                np.testing.assert_allclose(got[part][name], before[part][name] + 0.5 * a @ b, atol=1e-6, err_msg=name)
        for norm in ("attention_norm", "ffn_norm"):
            assert merged[layer][norm] is base[layer][norm]
    assert merged["embedding"] is base["embedding"]
    assert merged["norm"] is base["norm"]


@pytest.mark.slow
def test_the_gradient_of_adapters_is_the_chain_rule_of_the_dense_gradient():
    """dA = scale G B^T and dB = scale A^T G, of the gradient G of a whole map."""
    config = GrpoConfig(group_size=4, kl_cost=0.1)
    trainable = Trainable(SMALL, sharding.serve_mesh(), lora=LoraConfig(RANK, 6.0))
    batch, _ = pack_batch(sequences_of(ITEMS, config), config, version=0, max_tokens=8, row_tokens=24, rows_multiple=1)
    base, adapters = weights(0), random_adapters(2)

    def loss(params, base, batch):
        return grpo_loss(MODEL, config, params, base, batch)[0]

    def of_adapters(adapters, base, batch):
        return loss(trainable.policy(adapters, base), base, batch)

    got = jax.jit(jax.grad(of_adapters))(adapters, base, batch)
    dense = jax.jit(jax.grad(loss))(lora.merge(base, adapters, 2.0), base, batch)
    want = {
        layer: {
            part: {
                name: dict(zip("ab", (2.0 * g @ b.T, 2.0 * a.T @ g), strict=True))
                for name, g in linear_maps(dense[layer])[part].items()
                for a, b in [factors(adapters[layer][part][name])]
            }
            for part in own
        }
        for layer, own in adapters.items()
    }
    flat = jax.tree.map(lambda leaf, like: np.asarray(leaf).reshape(like.shape), got, want)
    assert_close(flat, want, 1e-5)
    assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(want))


# ---- the learner


class Bench:
    """A learner of adapters, and what it published."""

    def __init__(self, run_dir, mesh_name="1", parts=1, rank=RANK, **changes):
        self.mesh = sharding.serve_mesh(**MESHES[mesh_name])
        self.settings = GrpoConfig(**{"group_size": 4, "kl_cost": 0.1, **changes})
        config = TextLearnerConfig(batch_size=6, microbatches=parts, learning_rate=0.01, epsilon=1e-3)
        layout = sharding.serve_shardings(
            self.mesh, transformer.logical_axes(SMALL), transformer.abstract_params(SMALL)
        )
        self.base = jax.device_put(weights(0), layout)
        self.published, self.metrics = [], Metrics()
        model = MODEL._replace(layout=layout)
        self.learner = TextLearner(
            model,
            partial(grpo_loss, model, self.settings),
            Trainable(
                SMALL,
                self.mesh,
                value_head=self.settings.advantage == "gae",
                reference=True,
                lora=LoraConfig(rank, 4.5),
                seed=3,
            ),
            self.settings,
            config,
            self.mesh,
            self.base,
            shapes_of(config, 4, 4, 8, sharding.row_groups(self.mesh)),
            lambda version, params: self.published.append((version, params)),
            self.metrics,
            run_dir,
        )
        self.learner.state = self.learner.begin(self.base)


@functools.cache
def learned(directory, mesh_name="1", parts=1):
    """What is trained and what is published after three updates."""
    bench = Bench(directory, mesh_name, parts, advantage="gae", old="recomputed")
    for seed in range(3):
        bench.learner.step(random_items(seed, num_groups=6, vocab=64))
    state = bench.learner.state
    for leaf, before in zip(jax.tree.leaves(state.params), jax.tree.leaves(bench.base), strict=True):
        assert leaf.sharding == before.sharding
    return jax.device_get(state.trained), jax.device_get(state.params)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tmp_path_factory.mktemp("learned")


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "parts"), [("1", 4), ("data=8", 1), ("data=2, fsdp=2, tensor=2", 2)])
def test_microbatches_and_devices_change_nothing(directory, mesh, parts):
    got, want = learned(directory, mesh, parts), learned(directory)
    assert_close(got[0], want[0], 2e-6)
    assert_close(got[1], want[1], 2e-6)
    assert "value_head" in want[0]


@pytest.mark.slow
def test_only_adapters_are_trained_and_the_base_is_the_reference(tmp_path):
    bench = Bench(tmp_path)
    learner = bench.learner
    before = jax.device_get(bench.base)
    assert learner.state.frozen is bench.base
    assert_bit_equal(learner.state.params, before)
    needs = learner.compile()
    base_bytes, adapter_bytes = (
        sum(leaf.nbytes for leaf in jax.tree.leaves(tree)) for tree in (bench.base, learner.state.trained)
    )
    assert adapter_bytes == 4 * RANK * SMALL.num_layers * (2 * 32 + 2 * 24 + 3 * 36)
    assert (needs.weights, needs.frozen) == (base_bytes + adapter_bytes, base_bytes)
    assert needs.gradients == adapter_bytes
    assert needs.optimizer == 2 * adapter_bytes + 4
    first = None
    for i in range(4):
        learner.step(ITEMS)
        first = first or bench.metrics.snapshot()
        version, params = bench.published[-1]
        assert version == i + 1
        assert params is learner.state.params
    assert first["learner/kl_reference"] == 0.0
    assert bench.metrics.snapshot()["learner/kl_reference"] > 0.0
    assert_bit_equal(learner.state.frozen, before)
    assert_bit_equal(params, jax.jit(partial(lora.merge, scale=1.5))(bench.base, learner.state.trained))
    for name in ("embedding", "norm"):
        assert_bit_equal(params[name], before[name])
    for layer in learner.state.trained:
        for norm in ("attention_norm", "ffn_norm"):
            assert_bit_equal(params[layer][norm], before[layer][norm])
        for part in ("attention", "ffn"):
            for name in before[layer][part]:
                assert np.abs(params[layer][part][name] - before[layer][part][name]).max() > 0


@pytest.mark.slow
def test_an_update_that_is_not_finite_changes_nothing(tmp_path):
    learner = Bench(tmp_path, advantage="gae").learner
    learner.step(ITEMS)
    before = jax.tree.map(np.array, learner.state)
    bad = spoilt_items(4, num_groups=6, vocab=64)
    with pytest.raises(NonFiniteError, match="update 2 is not finite"):
        learner.step(bad)
    assert_bit_equal(before, jax.tree.map(np.array, learner.state))
    learner.step(ITEMS)
    assert learner.state.updates == 2

"""PPO in an LLM run: the gradient against sequences one by one, no split changes it, and the head lives beside."""

import dataclasses
import functools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bits import assert_bit_equal
from decode_harness import CONFIG, make_params
from hypothesis import given
from hypothesis import strategies as st
from text_fakes import random_items, spoilt_items

from seedx import sharding
from seedx.agents.grpo import grpo_loss
from seedx.checks import ConfigError
from seedx.grpo_config import GrpoConfig, TextLearnerConfig
from seedx.learner.learner import NonFiniteError
from seedx.learner.text_batch import pack_batch, sequences_of
from seedx.learner.text_gae import with_gae
from seedx.learner.text_learner import TextLearner, shapes_of
from seedx.learner.token_logprobs import Model
from seedx.learner.trainable import Trainable
from seedx.learner.value_head import head_values, init_head, value_figures, value_sums
from seedx.metrics import Metrics
from seedx.networks import transformer

SMALL = dataclasses.replace(CONFIG, num_layers=1, width=16, num_heads=4, num_kv_heads=2, head_dim=4, ffn_width=16)
MODEL = Model(SMALL)
ITEMS = random_items(0, num_groups=6, vocab=64)  # 24 sequences of up to 12 tokens
TOKENS = 16  # L
MESHES = {"1": {}, "data=8": {"data": 8}, "data=2, fsdp=2, tensor=2": {"data": 2, "fsdp": 2, "tensor": 2}}


def weights(seed):
    """Not so sharp that rounding would be amplified."""
    return jax.tree.map(lambda leaf: leaf / 2, make_params(seed, SMALL))


def random_head(seed):
    weight = np.random.default_rng(seed).normal(0, 0.3, SMALL.width)
    return {"weight": jnp.asarray(weight, jnp.float32), "bias": jnp.float32(0.2)}


def config_of(**changes):
    return GrpoConfig(**{"group_size": 4, "advantage": "gae", "gae_lambda": 0.9, "discount": 0.95, **changes})


def assert_close(got, want, tolerance):
    """Leaves differ by no more than so much of the largest value of all of them."""
    got, want = ([np.asarray(leaf) for leaf in jax.tree.leaves(tree)] for tree in (got, want))
    largest = max(np.abs(leaf).max() for leaf in want)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * largest)


# ---- settings


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"dynamic_sampling": True}, r"dynamic_sampling \(True\) must be off .* --grpo.no-dynamic-sampling"),
        ({"group_size": 0}, r"group_size \(0\) must be at least 1"),
        ({"advantage": "whitened", "group_size": 1}, r"group_size \(1\) must be at least 2: .* unless .* gae"),
        ({"gae_lambda": 1.1}, r"gae_lambda \(1.1\) must lie in \[0, 1\]"),
        ({"discount": -0.1}, r"discount \(-0.1\) must lie in \[0, 1\]"),
        ({"value_cost": -1.0}, r"value_cost \(-1.0\) must not be negative"),
        ({"value_clip": -1.0}, r"value_clip \(-1.0\) must not be negative"),
    ],
)
def test_settings_that_cannot_be(changes, words):
    with pytest.raises(ConfigError, match=words):
        config_of(**changes)
    assert config_of(group_size=1).group_size == 1


# ---- figures


@given(seed=st.integers(0, 1000), offset=st.sampled_from([0.0, -3.0]))
def test_explained_variance_is_that_of_targets_and_errors(seed, offset):
    rng = np.random.default_rng(seed)
    values, targets = rng.normal(size=(2, 3, 8)).astype(np.float32) + np.float32(offset)
    mask = rng.random((3, 8)) < 0.7
    mask[0, :2] = True
    losses = np.where(mask, np.square(targets - values) / 2, 0)
    spoilt = (np.where(mask, leaf, np.float32(np.nan)) for leaf in (values, targets))
    sums = value_sums(*map(jnp.asarray, (losses, *spoilt, mask)))
    found = value_figures({name: float(leaf) / mask.sum() for name, leaf in sums.items()})
    assert set(found) == {"value_loss", "value", "explained_variance"}
    want = 1 - np.var(np.float64(targets - values)[mask]) / np.var(np.float64(targets)[mask])
    np.testing.assert_allclose(found["explained_variance"], want, rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(found["value"], values[mask].mean(), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(found["value_loss"], losses.sum() / mask.sum(), rtol=1e-4)


@pytest.mark.parametrize("target", [0.0, 0.7, -1000.1])
def test_nothing_is_explained_where_all_targets_are_equal(target):
    targets, values, mask = np.full(50, target, np.float32), np.linspace(0, 1, 50, dtype=np.float32), np.ones(50, bool)
    sums = value_sums(*map(jnp.asarray, (values, values, targets, mask)))
    assert value_figures({name: float(leaf) / 50 for name, leaf in sums.items()})["explained_variance"] == 0.0


def test_a_value_is_linear_in_the_state_and_a_fresh_head_knows_nothing():
    x = np.arange(12, dtype=np.float32).reshape(1, 4, 3)
    head = {"weight": jnp.float32([1.0, 0.0, 2.0]), "bias": jnp.float32(0.5)}
    np.testing.assert_array_equal(head_values(head, jnp.asarray(x))[0], [4.5, 13.5, 22.5, 31.5])
    assert head_values(head, jnp.asarray(x, jnp.bfloat16)).dtype == jnp.float32
    assert not np.any(head_values(init_head(3), jnp.asarray(x)))


# ---- the gradient


def slow_values(params, head, texts):
    """Of each token, each text in a row of its own: of the features of the token before it."""
    positions = jnp.broadcast_to(jnp.arange(texts.shape[1], dtype=jnp.int32), texts.shape)
    x, _ = transformer.features(SMALL, params, jnp.asarray(texts), positions)
    return x[:, :-1] @ head["weight"] + head["bias"], transformer.logits_of(SMALL, params, x)[:, :-1]


def slow_advantages(config, sequences, sampled, values):
    """Advantages and targets `[N, L]` by equation 16 of 1506.02438, backwards through each completion; float64."""
    advantages, targets = (np.zeros(sampled.shape) for _ in range(2))
    for i in np.flatnonzero(sequences.counted):
        after_value = after = 0.0
        for t in np.flatnonzero(sampled[i])[::-1]:
            reward = sequences.rewards[i] if t == np.flatnonzero(sampled[i])[-1] else 0.0
            delta = reward + config.discount * after_value - values[i, t]
            after = delta + config.discount * config.gae_lambda * after
            after_value = values[i, t]
            advantages[i, t], targets[i, t] = after, after + after_value
    told = advantages[trained_of(sequences, sampled)]
    return (advantages - told.mean()) / np.sqrt(told.var(ddof=1) + 1e-8), targets


def trained_of(sequences, sampled):
    return sampled & (sequences.counted > 0)[:, None]


def unpacked(sequences):
    """Texts, which of their tokens were sampled, log-probabilities; `[N, L]`."""
    ends = np.cumsum(sequences.lengths)
    shape = (len(ends), TOKENS)
    texts, sampled, old = np.zeros(shape, np.int32), np.zeros(shape, bool), np.zeros(shape, np.float32)
    for i, end in enumerate(ends):
        own = slice(end - sequences.lengths[i], end)
        for rows, leaf in ((texts, sequences.tokens), (sampled, sequences.sampled), (old, sequences.logprobs)):
            rows[i, : sequences.lengths[i]] = leaf[own]
    return texts, sampled, old


def slow_loss(config, sequences, params, head, old_values, advantages, targets):
    """PPO (1707.06347, equations 7 and 9, with the clipped value loss of its code), mean over trained tokens."""
    texts, sampled, old = unpacked(sequences)
    values, logits = slow_values(params, head, texts)
    every = jax.nn.log_softmax(logits)
    logprobs = jnp.take_along_axis(every, texts[:, 1:, None], axis=2)[..., 0]
    ratio, advantages = jnp.exp(logprobs - old[:, 1:]), advantages[:, 1:].astype(np.float32)
    policy = -jnp.minimum(ratio * advantages, jnp.clip(ratio, 0.8, 1.2) * advantages)
    entropy = -jnp.sum(jnp.exp(every) * every, axis=2)
    errors = jnp.square(values - targets[:, 1:].astype(np.float32))
    if config.value_clip:
        near = old_values[:, 1:] + jnp.clip(values - old_values[:, 1:], -config.value_clip, config.value_clip)
        errors = jnp.maximum(errors, jnp.square(near - targets[:, 1:].astype(np.float32)))
    total = policy + config.value_cost * errors / 2 - config.entropy_cost * entropy
    trained = trained_of(sequences, sampled)[:, 1:]
    return jnp.sum(jnp.where(trained, total, 0.0)) / np.float32(trained.sum())


def fast_batch(config, sequences, params, head, row_tokens=24):
    """The packed batch as a learner makes it."""
    batch, packing = pack_batch(sequences, config, version=0, max_tokens=8, row_tokens=row_tokens, rows_multiple=1)
    values = jax.jit(MODEL.logprobs_and_values)(params, head, batch)[2]
    return with_gae(batch._replace(value=np.asarray(values)), packing, sequences, config), packing


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [{}, {"value_clip": 0.05, "value_cost": 0.7, "entropy_cost": 0.01}, {"mask_truncated": True, "gae_lambda": 1.0}],
    ids=["plain", "clipped", "masked"],
)
def test_the_gradient_is_that_of_sequences_one_by_one(changes):
    """Values, advantages, targets and the whole loss through whole forward passes; the batch is stale."""
    config = config_of(**changes)
    sequences = sequences_of(ITEMS, config)
    assert (sequences.counted == 0).any()
    before, now = (weights(0), random_head(0)), (weights(1), random_head(1))
    texts, sampled, _ = unpacked(sequences)
    old_values = np.pad(np.asarray(jax.jit(slow_values)(*before, texts)[0]), ((0, 0), (1, 0)))
    advantages, targets = slow_advantages(config, sequences, sampled, np.float64(old_values))
    batch, packing = fast_batch(config, sequences, *before)
    trained = trained_of(sequences, sampled)
    for name, want in (("value", old_values), ("advantage", advantages), ("target", targets)):
        got = getattr(batch, name).reshape(-1)[packing.places]
        in_rows = np.zeros(texts.shape)
        in_rows[np.arange(TOKENS) < sequences.lengths[:, None]] = got
        np.testing.assert_allclose(in_rows[trained], want[trained], atol=1e-4, err_msg=name)

    def fast(params, head):
        return grpo_loss(MODEL, config, params, None, jax.tree.map(jnp.asarray, batch), head)[0]

    def slow(params, head):
        return slow_loss(config, sequences, params, head, old_values, advantages, targets)

    got, want = (jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(*now) for loss in (fast, slow))
    np.testing.assert_allclose(got[0], want[0], rtol=1e-4)
    assert_close(got[1][0], want[1][0], 2e-5)
    assert_close(got[1][1], want[1][1], 2e-5)
    assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(want[1]))


@pytest.mark.slow
def test_a_head_that_costs_nothing_has_no_gradient_and_changes_none():
    config = config_of(value_cost=0.0)
    sequences = sequences_of(ITEMS, config)
    batch, _ = fast_batch(config, sequences, weights(0), random_head(0))

    def loss(params, head):
        return grpo_loss(MODEL, config, params, None, jax.tree.map(jnp.asarray, batch), head)[0]

    with_head = jax.jit(jax.grad(loss, argnums=(0, 1)))(weights(1), random_head(1))
    without = jax.jit(jax.grad(lambda params: loss(params, None)))(weights(1))
    for leaf in jax.tree.leaves(with_head[1]):
        np.testing.assert_array_equal(leaf, 0.0)
    assert_close(with_head[0], without, 1e-6)


# ---- the learner


class Bench:
    """A learner of a transformer with a value head, and what it published."""

    def __init__(self, run_dir, mesh_name="1", parts=1, **changes):
        self.mesh = sharding.serve_mesh(**MESHES[mesh_name])
        self.settings = config_of(**changes)
        config = TextLearnerConfig(batch_size=6, microbatches=parts, learning_rate=0.01, epsilon=1e-3)
        layout = sharding.serve_shardings(
            self.mesh, transformer.logical_axes(SMALL), transformer.abstract_params(SMALL)
        )
        params = jax.device_put(weights(0), layout)
        self.published, self.metrics = [], Metrics()
        model = MODEL._replace(layout=layout)
        self.learner = TextLearner(
            model,
            partial(grpo_loss, model, self.settings),
            Trainable(SMALL, self.mesh, value_head=True),
            self.settings,
            config,
            self.mesh,
            params,
            shapes_of(config, 4, 4, 8, sharding.row_groups(self.mesh)),
            lambda version, params: self.published.append((version, params)),
            self.metrics,
            run_dir,
        )
        self.learner.state = self.learner.begin(params)


@functools.cache
def learned(directory, mesh_name="1", parts=1):
    """What is trained after three updates, and the figures of each."""
    bench, rows = Bench(directory, mesh_name, parts, old="recomputed", importance="truncate"), []
    for seed in range(3):
        bench.learner.step(random_items(seed, num_groups=6, vocab=64))
        row = bench.metrics.snapshot()
        rows.append({name: row[f"learner/{name}"] for name in ("value", "value_loss", "explained_variance", "ratio")})
    return jax.device_get(bench.learner.state.trained), rows


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tmp_path_factory.mktemp("learned")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "parts"), [("1", 2), ("1", 4), ("data=8", 1), ("data=8", 2), ("data=2, fsdp=2, tensor=2", 2)]
)
def test_microbatches_and_devices_change_nothing(directory, mesh, parts):
    (got, rows), (want, want_rows) = learned(directory, mesh, parts), learned(directory)
    assert_close(got, want, 2e-6)
    for row, want_row in zip(rows, want_rows, strict=True):
        for name, value in want_row.items():
            np.testing.assert_allclose(row[name], value, rtol=1e-3, atol=1e-4, err_msg=name)


@pytest.mark.slow
def test_values_are_learned_beside_the_policy_which_is_published_without_them(tmp_path):
    bench = Bench(tmp_path)
    learner = bench.learner
    needs = learner.compile()
    weight_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(learner.state.params))
    head_bytes = 4 * (SMALL.width + 1)
    assert needs.weights == needs.gradients == weight_bytes + head_bytes
    assert needs.optimizer == 2 * (weight_bytes + head_bytes) + 4
    assert needs.frozen == 0
    rows = []
    for _ in range(60):
        learner.step(ITEMS)
        rows.append(bench.metrics.snapshot())
    assert rows[0]["learner/value"] == rows[0]["learner/explained_variance"] == 0.0  # a head of zeros
    assert rows[-1]["learner/explained_variance"] > 0.5
    assert rows[-1]["learner/value_loss"] < rows[0]["learner/value_loss"] / 2
    assert {"learner/value", "learner/value_loss"} <= rows[0].keys()
    assert not {name for name in rows[0] if "squared" in name or "target" in name or "value_error" in name}
    version, params = bench.published[-1]
    assert version == 60
    assert jax.tree.structure(params) == jax.tree.structure(transformer.abstract_params(SMALL))
    own = jax.tree.leaves(learner.trainable.policy(learner.state.trained, None))
    assert all(leaf is mine for leaf, mine in zip(jax.tree.leaves(params), own, strict=True))


@pytest.mark.slow
def test_an_update_that_is_not_finite_changes_neither_policy_nor_head(tmp_path):
    bench = Bench(tmp_path)
    learner = bench.learner
    learner.step(ITEMS)
    before = jax.tree.map(np.array, learner.state)
    bad = spoilt_items(4, num_groups=6, vocab=64)
    with pytest.raises(NonFiniteError, match="update 2 is not finite"):
        learner.step(bad)
    assert_bit_equal(before, jax.tree.map(np.array, learner.state))
    (path,) = tmp_path.glob("*.npz")
    with np.load(path) as saved:
        assert np.abs(saved["advantage"]).max() > 0
        assert np.abs(saved["target"]).max() > 0
    learner.step(random_items(5, num_groups=6, vocab=64))  # and it could go on
    assert learner.state.updates == 2

"""The update of a language model: no split of a batch changes it, and its step is Adam as written out."""

import dataclasses
import functools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bits import assert_bit_equal
from decode_harness import CONFIG, make_params
from text_fakes import random_items

from seedx import sharding
from seedx.agents.grpo import grpo_loss
from seedx.grpo_config import GrpoConfig, TextLearnerConfig
from seedx.learner.packing import microbatches
from seedx.learner.text_batch import pack_batch, sequences_of
from seedx.learner.text_update import make_optimizer, make_update
from seedx.learner.token_logprobs import Model
from seedx.networks import transformer

pytestmark = pytest.mark.slow  # many compilations, or whole pipelines

SMALL = dataclasses.replace(CONFIG, num_layers=1, width=16, num_heads=4, num_kv_heads=2, head_dim=4, ffn_width=16)
GRPO = GrpoConfig(group_size=4, kl_cost=0.1, entropy_cost=0.01, aggregation="seq-mean-token-mean")
# Of Adam: where a gradient is rounding alone, its sign must not decide; with this epsilon it does not.
LEARNER = TextLearnerConfig(learning_rate=0.01, epsilon=1e-3, weight_decay=0.1)
MESHES = {"1": {}, "data=8": {"data": 8}, "data=2, fsdp=2, tensor=2": {"data": 2, "fsdp": 2, "tensor": 2}}
ITEMS = random_items(0, num_groups=6, vocab=64)  # 24 sequences of up to 12 tokens
TOKENS = 16  # L


def weights(seed):
    """Not so sharp that rounding would be amplified."""
    return jax.tree.map(lambda leaf: leaf / 2, make_params(seed, SMALL))


def assert_close(got, want, tolerance=5e-6):
    """Leaves differ by no more than so much of the largest value of all of them."""
    got, want = ([np.asarray(leaf) for leaf in jax.tree.leaves(tree)] for tree in (got, want))
    largest = max(np.abs(leaf).max() for leaf in want)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * largest)


# ---- a transformer


@functools.cache
def programs(mesh_name):
    """The programs on a mesh, the parameters and those of the reference."""
    mesh = sharding.serve_mesh(**MESHES[mesh_name])
    layout = sharding.serve_shardings(mesh, transformer.logical_axes(SMALL), transformer.abstract_params(SMALL))
    params, reference = (jax.device_put(weights(seed), layout) for seed in (0, 1))
    loss = partial(grpo_loss, Model(SMALL, layout=layout), GRPO)
    return mesh, make_update(loss, make_optimizer(LEARNER), mesh, params, reference), params, reference


@functools.cache
def updated(mesh_name="1", parts=1, row_tokens=TOKENS, updates=2):
    """Gradients, metrics and parameters of some updates on one batch."""
    mesh, update, params, reference = programs(mesh_name)
    sequences = sequences_of(ITEMS, GRPO)
    rows = 32 * TOKENS // row_tokens
    batch, _ = pack_batch(sequences, GRPO, version=0, max_tokens=8, row_tokens=row_tokens, rows_multiple=rows)
    split = microbatches(batch, rows // parts)
    assert len(split) == parts
    state, found = update.init(params), []
    for _ in range(updates):
        sums = None
        for part in jax.device_put(split, sharding.split_rows(mesh)):
            new = update.gradient(params, reference, part)
            sums = new if sums is None else update.add(sums, new)
        found.append(jax.device_get(sums))
        stepped = update.step(params, state, sums.gradient, sums.loss, np.float32(LEARNER.learning_rate))
        assert bool(stepped.finite)
        params, state = stepped.params, stepped.opt_state
    return found, jax.device_get(params), params


@pytest.mark.parametrize(
    ("mesh", "parts", "row_tokens"),
    [
        ("1", 2, TOKENS),
        ("1", 4, TOKENS),
        ("1", 1, 2 * TOKENS),
        ("data=8", 1, TOKENS),
        ("data=8", 2, TOKENS),
        ("data=2, fsdp=2, tensor=2", 1, TOKENS),
        ("data=2, fsdp=2, tensor=2", 2, 2 * TOKENS),
    ],
)
def test_microbatches_packing_and_devices_change_nothing(mesh, parts, row_tokens):
    """But for rounding: 5e-6 of the largest gradient, 1e-6 of the largest weight."""
    (found, params, _), (want, want_params, _) = updated(mesh, parts, row_tokens), updated()
    for got, wanted in zip(found, want, strict=True):
        assert_close(got.gradient, wanted.gradient)
        np.testing.assert_allclose(got.loss, wanted.loss, rtol=1e-4)
        assert got.metrics.keys() == wanted.metrics.keys()
        for name, value in wanted.metrics.items():
            np.testing.assert_allclose(got.metrics[name], value, rtol=1e-4, atol=1e-5, err_msg=name)
    assert_close(params, want_params, 1e-6)
    assert np.abs(want[0].gradient["embedding"] - want[1].gradient["embedding"]).max() > 0.0


def test_parameters_and_optimizer_stay_where_they_were_laid():
    _, update, params, _ = programs("data=2, fsdp=2, tensor=2")
    after = updated("data=2, fsdp=2, tensor=2")[2]
    for old, new in zip(jax.tree.leaves(params), jax.tree.leaves(after), strict=True):
        assert new.sharding == old.sharding
    qkv = params["layer_0"]["attention"]["qkv"]
    assert qkv.sharding.shard_shape(qkv.shape) == (8, 1, 4, 4)
    (adam,) = (part for part in update.init(params) if hasattr(part, "mu"))
    for moment in (adam.mu, adam.nu):
        assert moment["layer_0"]["attention"]["qkv"].sharding == qkv.sharding


def test_the_gradient_is_that_of_sequences_one_by_one():
    """Plain GRPO (2402.03300, equation 3 without its clip, which does not bind) through whole forward passes."""
    config = GrpoConfig(group_size=4, clip_low=0.99, clip_high=1e6)
    sequences = sequences_of(ITEMS, config)
    ends = np.cumsum(sequences.lengths)
    texts = np.zeros((len(ends), TOKENS), np.int32)
    scale, old = (np.zeros(texts.shape, np.float32) for _ in range(2))
    for i, end in enumerate(ends):
        own = slice(end - sequences.lengths[i], end)
        texts[i, : sequences.lengths[i]] = sequences.tokens[own]
        old[i, : sequences.lengths[i]] = sequences.logprobs[own]
        if sequences.counted[i]:
            scale[i, : sequences.lengths[i]] = sequences.sampled[own] * sequences.advantages[i]
    total = sequences.counted.sum()

    def loss(params):
        positions = jnp.broadcast_to(jnp.arange(TOKENS, dtype=jnp.int32), texts.shape)
        logits, _ = transformer.apply(SMALL, params, jnp.asarray(texts), positions)
        logprobs = jnp.take_along_axis(jax.nn.log_softmax(logits[:, :-1]), texts[:, 1:, None], axis=2)[..., 0]
        return -jnp.sum(jnp.exp(logprobs - old[:, 1:]) * scale[:, 1:]) / np.float32(total)

    # Small weights: all tokens are about as likely, so no ratio is beyond the clip.
    params = transformer.init_params(SMALL, jax.random.key(0))
    batch, _ = pack_batch(sequences, config, version=0, max_tokens=8, row_tokens=24, rows_multiple=1)
    got, sums = jax.jit(jax.grad(partial(grpo_loss, Model(SMALL), config), has_aux=True))(params, None, batch)
    assert float(sums["clipped_low"]) == float(sums["clipped_high"]) == 0.0
    assert_close(got, jax.jit(jax.grad(loss))(params), 1e-5)


# ---- the step, of a loss whose gradient is given


def pulled(params, reference, batch):
    """A loss with the gradient `batch`."""
    del reference
    return sum(jnp.sum(params[name] * batch[name]) for name in params), {"pull_max": jnp.max(batch["w"])}


def simple_params():
    params = {"w": np.float32([[1.0, -2.0, 3.0]]), "b": np.float32([[0.5]])}
    return jax.device_put(params, sharding.replicated(sharding.serve_mesh()))


@functools.cache
def simple(config):
    return make_update(pulled, make_optimizer(config), sharding.serve_mesh(), simple_params())


def pulls(count):
    rng = np.random.default_rng(1)
    return [{"w": rng.normal(size=(1, 3)), "b": rng.normal(size=(1, 1))} for _ in range(count)]


def adamw(config, gradients, rates):
    """Clipped AdamW (1711.05101, algorithm 2, with the rate as schedule), float64."""
    params = {name: np.float64(leaf) for name, leaf in simple_params().items()}
    first, second = ({name: np.zeros_like(leaf) for name, leaf in params.items()} for _ in range(2))
    for i, (gradient, rate) in enumerate(zip(gradients, rates, strict=True), start=1):
        norm = np.sqrt(sum(np.sum(leaf**2) for leaf in gradient.values()))
        scale = min(1.0, config.max_grad_norm / norm) if config.max_grad_norm else 1.0
        for name, param in params.items():
            g = scale * gradient[name]
            first[name] = config.beta1 * first[name] + (1 - config.beta1) * g
            second[name] = config.beta2 * second[name] + (1 - config.beta2) * g**2
            mean, square = first[name] / (1 - config.beta1**i), second[name] / (1 - config.beta2**i)
            direction = mean / (np.sqrt(square) + config.epsilon) + config.weight_decay * param
            params[name] = param - rate * direction
    return params


@pytest.mark.parametrize(
    "changes",
    [{}, {"weight_decay": 0.5}, {"max_grad_norm": 0.0}, {"beta1": 0.5, "beta2": 0.8, "epsilon": 0.1}],
    ids=str,
)
def test_the_step_is_adamw(changes):
    config = TextLearnerConfig(**changes)
    update, params, rates = simple(config), simple_params(), [0.1, 0.3, 0.2]
    state = update.init(params)
    for gradient, rate in zip(pulls(3), rates, strict=True):
        sums = update.gradient(params, None, jax.tree.map(np.float32, gradient))
        stepped = update.step(params, state, sums.gradient, sums.loss, np.float32(rate))
        norm = np.sqrt(sum(np.sum(leaf**2) for leaf in gradient.values()))
        np.testing.assert_allclose(stepped.grad_norm, norm, rtol=1e-5)
        params, state = stepped.params, stepped.opt_state
    for name, want in adamw(config, pulls(3), rates).items():
        np.testing.assert_allclose(params[name], want, rtol=1e-5)


def test_sums_add_up_and_maxima_do_not():
    update, params = simple(TextLearnerConfig()), simple_params()
    parts = [jax.tree.map(np.float32, pull) for pull in pulls(2)]
    sums = [update.gradient(params, None, part) for part in parts]
    want = float(sums[0].loss) + float(sums[1].loss)
    total = update.add(*sums)
    np.testing.assert_allclose(total.loss, want, rtol=1e-6)
    assert float(total.metrics["pull_max"]) == max(part["w"].max() for part in parts)
    for name in params:
        np.testing.assert_allclose(total.gradient[name], parts[0][name] + parts[1][name], rtol=1e-6)


def test_all_but_the_parameters_is_donated_and_nothing_compiles_twice():
    update, params = simple(TextLearnerConfig()), simple_params()
    state, sizes = update.init(params), []
    for pull in pulls(4):
        part = jax.tree.map(np.float32, pull)
        first, second = (update.gradient(params, None, part) for _ in range(2))
        sums = update.add(first, second)
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(first))
        assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(second))
        stepped = update.step(params, state, sums.gradient, sums.loss, np.float32(0.1))
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves((state, sums.gradient)))
        assert not any(leaf.is_deleted() for leaf in jax.tree.leaves((params, stepped, sums.loss)))
        params, state = stepped.params, stepped.opt_state
        sizes.append(tuple(program._cache_size() for program in (update.gradient, update.add, update.step)))
    assert set(sizes[1:]) == {sizes[1]}
    assert sizes[0] == sizes[1]


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e30])
def test_a_step_that_is_not_finite_changes_nothing(value):
    update, params = simple(TextLearnerConfig(weight_decay=0.1)), simple_params()
    sums = update.gradient(params, None, jax.tree.map(np.float32, pulls(1)[0]))
    sound = update.step(params, update.init(params), sums.gradient, sums.loss, np.float32(0.1))
    before = jax.tree.map(np.array, (sound.params, sound.opt_state))
    spoilt = {"w": np.float32([[1.0, value, 2.0]]), "b": np.float32([[1.0]])}
    sums = update.gradient(sound.params, None, spoilt)
    result = update.step(sound.params, sound.opt_state, sums.gradient, sums.loss, np.float32(0.1))
    assert bool(sound.finite)
    assert not bool(result.finite)
    after = jax.tree.map(np.array, (result.params, result.opt_state))
    assert_bit_equal(before, after)

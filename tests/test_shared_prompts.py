"""Completions that share a prompt in a row are as if each had a row and a prompt of its own: values and gradients."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decode_harness import CONFIG, make_params
from hypothesis import example, given, settings
from hypothesis import strategies as st
from text_fakes import Completion, items_of, take

from seedx.agents.grpo import grpo_loss
from seedx.grpo_config import GrpoConfig
from seedx.learner.packing import place
from seedx.learner.text_batch import pack_batch, sequences_of
from seedx.learner.text_gae import with_gae
from seedx.learner.token_logprobs import Model
from seedx.networks import transformer

pytestmark = pytest.mark.slow  # many compilations, or whole pipelines

L, ROWS = 16, 12  # of all batches, so that there is one program
PLAIN = dataclasses.replace(CONFIG, width=16, num_heads=2, num_kv_heads=1, ffn_width=16)
CONFIGS = {
    "plain": PLAIN,
    "windows and caps": dataclasses.replace(
        PLAIN, sliding_window=4, sliding_layers=(True, False), attention_soft_cap=2.0, final_soft_cap=3.0
    ),
}


@st.composite
def shapes(draw):
    """Of up to three groups of one size, the tokens of the prompt and of each completion."""
    group_size = draw(st.integers(1, 4))
    prompts = draw(st.lists(st.integers(1, L - 1), min_size=1, max_size=3))
    return [(n, [draw(st.integers(1, L - n)) for _ in range(group_size)]) for n in prompts]


def examples(test):
    """One prompt and one completion; single tokens; a family that just fits a row, and one with a token too many."""
    for case in ([(3, [5])], [(1, [1, 1, 1])], [(4, [3, 4, 5])], [(4, [3, 4, 6])], [(6, [10, 1, 10, 10])]):
        test = example(case)(test)
    return settings(max_examples=10)(given(case=shapes())(test))


def batch_of(case, **changes):
    """Items, config and sequences; tokens in the middle of a long completion are the environment's."""
    rng = np.random.default_rng(len(str(case)))

    def completion(count):
        return Completion(rng.integers(0, 64, count).tolist(), float(rng.normal()), (1,) if count > 2 else ())

    items = items_of(*[(rng.integers(0, 64, n).tolist(), [completion(count) for count in rest]) for n, rest in case])
    config = GrpoConfig(**{"group_size": len(case[0][1]), "dynamic_sampling": False, "advantage": "gae", **changes})
    return config, sequences_of(items, config)


def packed(config, sequences):
    return pack_batch(sequences, config, version=0, max_tokens=L, row_tokens=L, rows_multiple=ROWS)


def weights(seed, name):
    return jax.tree.map(lambda leaf: leaf / 2, make_params(seed, CONFIGS[name]))


def random_head(seed):
    return {
        "weight": jnp.asarray(np.random.default_rng(seed).normal(0, 0.3, 16), jnp.float32),
        "bias": jnp.float32(0.2),
    }


def assert_close(got, want, tolerance):
    got, want = ([np.asarray(leaf) for leaf in jax.tree.leaves(tree)] for tree in (got, want))
    largest = max(np.abs(leaf).max() for leaf in want)
    assert largest > 0
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * largest)


@functools.cache
def in_rows(name):
    """Log-probability, entropy and value of each token of a packed batch, and the gradient of a weighted sum."""

    def total(params, head, batch, scales):
        found = Model(CONFIGS[name]).logprobs_and_values(params, head, batch)
        return sum(jnp.sum(scale * leaf) for scale, leaf in zip(scales, found, strict=True)), found

    return jax.jit(jax.grad(total, argnums=(0, 1), has_aux=True))


@functools.cache
def alone(name):
    """The same of texts `[ROWS, L]` in rows of their own, through plain forward passes."""
    config = CONFIGS[name]

    def total(params, head, texts, scales):
        positions = jnp.broadcast_to(jnp.arange(L, dtype=jnp.int32), texts.shape)
        x, _ = transformer.features(config, params, texts, positions)
        every = jax.nn.log_softmax(transformer.logits_of(config, params, x)[:, :-1])
        said = jnp.take_along_axis(every, texts[:, 1:, None], axis=2)[..., 0]
        found = (said, -jnp.sum(jnp.exp(every) * every, axis=2), x[:, :-1] @ head["weight"] + head["bias"])
        return sum(jnp.sum(scale[:, 1:] * leaf) for scale, leaf in zip(scales, found, strict=True)), found

    return jax.jit(jax.grad(total, argnums=(0, 1), has_aux=True))


@pytest.mark.parametrize("name", CONFIGS)
@examples
def test_log_probabilities_values_and_gradients_are_those_of_each_sequence_alone(name, case):
    config, sequences = batch_of(case)
    batch, packing = packed(config, sequences)
    assert packing.num_rows == ROWS
    told = np.arange(L) < sequences.lengths[:, None]
    texts, own = np.zeros((ROWS, L), np.int32), np.zeros((ROWS, L), bool)
    texts[: len(told)][told] = sequences.tokens
    own[: len(told)][told] = ~packing.in_prompt
    scales = np.random.default_rng(0).normal(size=(3, ROWS, L)).astype(np.float32) * own
    in_places = np.zeros((3, ROWS * L), np.float32)
    in_places[:, packing.places[~packing.in_prompt]] = scales[:, own]
    params, head = weights(0, name), random_head(0)
    gradient, found = in_rows(name)(params, head, batch, in_places.reshape(scales.shape))
    want_gradient, want = alone(name)(params, head, texts, scales)
    for leaf, wanted in zip(found, want, strict=True):
        got = take(packing, np.asarray(leaf))[~packing.in_prompt]
        np.testing.assert_allclose(got, np.asarray(wanted)[own[:, 1:]], rtol=1e-4, atol=1e-4)
    assert_close(gradient, want_gradient, 1e-5)


SETTINGS = {"loss": "gspo", "old": "recomputed", "importance": "truncate", "entropy_cost": 0.1, "value_clip": 0.1}
LEAVES = ("advantage", "target", "weight", "trained", "fresh")


@functools.cache
def loss():
    config = GrpoConfig(advantage="gae", dynamic_sampling=False, **SETTINGS)

    def total(params, head, batch):
        return grpo_loss(Model(PLAIN), config, params, None, batch, head)

    return jax.jit(jax.value_and_grad(total, argnums=(0, 1), has_aux=True))


def loss_of(config, sequences):
    """Leaves of the batch at sampled tokens; loss, sums and gradient. It is stale, and has values."""
    values, old = np.random.default_rng(1).normal(0, 0.3, (2, len(sequences.tokens))).astype(np.float32)
    batch, packing = packed(config, sequences)
    values, old = place(packing, values), place(packing, sequences.logprobs + old)
    batch = with_gae(batch._replace(value=values, old=old), packing, sequences, config)
    leaves = {name: take(packing, getattr(batch, name))[sequences.sampled] for name in LEAVES}
    return leaves, *loss()(weights(1, "plain"), random_head(1), batch)


@examples
def test_the_loss_of_sequences_and_their_values_is_as_if_no_prompt_was_shared(case):
    """GSPO, whose ratio is of whole sequences, importance weights, entropy, a value head and its advantages."""
    config, sequences = batch_of(case, **SETTINGS)
    apart = sequences._replace(prompts=np.zeros(len(sequences.lengths), np.int64))
    leaves, (got, sums), gradient = loss_of(config, sequences)
    want_leaves, (want, want_sums), want_gradient = loss_of(config, apart)
    for name in LEAVES:
        np.testing.assert_allclose(leaves[name], want_leaves[name], atol=1e-5, err_msg=name)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
    for name, value in want_sums.items():
        np.testing.assert_allclose(sums[name], value, rtol=1e-3, atol=1e-4, err_msg=name)
    assert_close(gradient, want_gradient, 1e-5)


def test_other_completions_have_no_part_in_one_and_the_prompt_has():
    config, sequences = batch_of([(3, [4, 2, 5])])
    batch, _ = packed(config, sequences)
    nothing = np.zeros((3, ROWS, L), np.float32)
    run = functools.partial(in_rows("windows and caps"), weights(0, "windows and caps"), random_head(0))
    _, want = run(batch, nothing)
    for segment in (4, 8, 10):
        own = batch.segments == segment
        for others, same in ((~own & (batch.segments != 1), True), (batch.segments == 1, False)):
            assert others.any()
            _, got = run(batch._replace(tokens=np.where(others, (batch.tokens + 17) % 64, batch.tokens)), nothing)
            for a, b in zip(got, want, strict=True):
                assert np.array_equal(np.asarray(a)[own], np.asarray(b)[own]) is same

"""Log-probabilities of packed tokens against each sequence alone, and what must make no difference."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decode_harness import CONFIG, full_logits, logprob_bound, random_prompts
from decode_harness import make_params as make_sharp_params
from text_fakes import take

from seedx.learner import token_logprobs as module
from seedx.learner.packing import lay_out, pack, place
from seedx.learner.token_logprobs import token_logprobs

pytestmark = pytest.mark.slow  # many compilations, or whole pipelines

TEXTS = random_prompts(7, 2, 14, seed=3)
LENGTHS = np.array([len(text) for text in TEXTS])
TOKENS = np.concatenate(TEXTS).astype(np.int32)
FIRSTS = np.cumsum(LENGTHS) - LENGTHS
TOLD = ~np.isin(np.arange(len(TOKENS)), FIRSTS)  # tokens with others before them
L = 24
SMALL = dataclasses.replace(CONFIG, num_layers=1, width=16, num_heads=2, num_kv_heads=1, ffn_width=16)


def rows_of_one(starts):
    return pack(LENGTHS, L)._replace(rows=np.arange(7), prompt_starts=starts, starts=starts, num_rows=7)


LAYOUTS = {
    "packed": pack(LENGTHS, L),
    "padded": rows_of_one(np.zeros(7, int)),
    "at the end of a row": rows_of_one(L - LENGTHS),
}


def make_params(seed, config=CONFIG):
    """Weights that make texts differ, but rounding no greater than the bound, wherever a text lies in its row."""
    return jax.tree.map(lambda leaf: leaf / 2, make_sharp_params(seed, config))


def rows_of(packing):
    return (place(packing, TOKENS), *lay_out(packing))


@functools.cache
def program(**options):
    return jax.jit(lambda params, *rows: token_logprobs(CONFIG, params, *rows, **options)[:2])


def computed(layout="packed", **options):
    """Log-probability and entropy of each token that has one, sequence after sequence."""
    packing = LAYOUTS[layout]
    found = program(**options)(make_params(0), *rows_of(packing))
    return tuple(take(packing, np.asarray(leaf))[TOLD] for leaf in found)


def oracle(temperature=1.0):
    """The same, each sequence alone, float64; and by how much programs may differ."""
    logits = full_logits(make_params(0), TEXTS)
    logprobs, entropies = [], []
    for text, row in zip(TEXTS, logits.astype(np.float64) / temperature, strict=True):
        row = row[: len(text) - 1]
        row = row - np.log(np.exp(row - row.max(1, keepdims=True)).sum(1, keepdims=True)) - row.max(1, keepdims=True)
        logprobs += row[np.arange(len(row)), text[1:]].tolist()
        entropies += (-np.sum(np.exp(row) * row, axis=1)).tolist()
    return np.array(logprobs), np.array(entropies), logprob_bound(logits) / min(temperature, 1.0)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_are_what_each_sequence_is_alone(layout):
    logprobs, entropy = computed(layout)
    want, want_entropy, bound = oracle()
    assert np.abs(logprobs - want).max() <= bound
    np.testing.assert_allclose(entropy, want_entropy, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("temperature", [0.7, 1.5])
def test_temperature(temperature):
    logprobs, entropy = computed(temperature=temperature)
    want, want_entropy, bound = oracle(temperature)
    assert np.abs(logprobs - want).max() <= bound
    np.testing.assert_allclose(entropy, want_entropy, rtol=1e-4, atol=1e-5)


def test_bfloat16_is_near_and_its_results_are_float32():
    logprobs, entropy = computed(dtype=jnp.bfloat16)
    assert logprobs.dtype == entropy.dtype == np.float32
    want, want_entropy, bound = oracle()
    error = np.abs(logprobs - want)
    assert bound < error.max() < 0.5  # of log-probabilities down to -10
    assert error.mean() < 0.1
    assert np.abs(entropy - want_entropy).mean() < 0.05


def test_without_weights_every_token_is_as_likely():
    params = jax.tree.map(jnp.zeros_like, make_params(0))
    for leaf, want in zip(program()(params, *rows_of(LAYOUTS["packed"])), (-np.log(64), np.log(64)), strict=True):
        np.testing.assert_allclose(leaf, want, rtol=1e-6)


def test_tokens_of_other_sequences_and_padding_have_no_influence():
    packing = LAYOUTS["packed"]
    tokens, positions, segments, parents, before_each = rows_of(packing)
    assert (segments == 0).any()
    before = program()(make_params(0), tokens, positions, segments, parents, before_each)
    for row, number in [(0, 0), (0, 1), (1, 1)]:
        segment = np.unique(segments[row][segments[row] > 0])[number]
        own = (np.arange(packing.num_rows)[:, None] == row) & (segments == segment)
        assert own.any()
        assert (segments[row] != segment).any()
        other = np.where(own, tokens, (tokens + 17) % CONFIG.vocab_size)
        elsewhere = np.where(own | (segments > 0), positions, 5)
        after = program()(make_params(0), other, elsewhere, segments, parents, before_each)
        told = own & (positions > 0)
        for a, b in zip(before, after, strict=True):
            np.testing.assert_array_equal(np.asarray(a)[told], np.asarray(b)[told])
            assert not np.array_equal(np.asarray(a)[~own], np.asarray(b)[~own])


# ---- gradients


def small_params():
    return make_params(1, SMALL)


def loss_of(**options):
    packing = LAYOUTS["packed"]
    rows = rows_of(packing)
    told = place(packing, TOLD)
    rng = np.random.default_rng(0)
    weights = [np.where(told, rng.normal(size=told.shape), 0.0).astype(np.float32) for _ in range(2)]

    def loss(params):
        logprobs, entropy, _ = token_logprobs(SMALL, params, *map(jnp.asarray, rows), **options)
        return jnp.sum(logprobs * weights[0] + entropy * weights[1]), (logprobs, entropy)

    return jax.value_and_grad(loss, has_aux=True)


@functools.cache
def plain():
    return jax.jit(loss_of())(small_params())


def assert_plain(result):
    ((loss, values), gradient), ((want, want_values), want_gradient) = result, plain()
    np.testing.assert_allclose(loss, want, rtol=1e-5)
    for a, b in zip(values, want_values, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=2e-6)
    largest = max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(want_gradient))
    for a, b in zip(jax.tree.leaves(gradient), jax.tree.leaves(want_gradient), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-6 * largest)


@pytest.mark.parametrize("parts", [3, 24, 1000])
def test_chunks_change_nothing_and_spare_the_logits_of_all_tokens(monkeypatch, parts):
    rows = LAYOUTS["packed"].num_rows
    whole = f"tensor<{rows}x{L}x{SMALL.vocab_size}xf32>"
    assert whole in jax.jit(loss_of()).lower(small_params()).as_text()
    monkeypatch.setattr(module, "_CHUNK_BYTES", rows * L * SMALL.vocab_size * 4 / parts)
    lowered = jax.jit(loss_of()).lower(small_params())
    assert whole not in lowered.as_text()
    assert f"tensor<{rows}x{L // min(parts, L)}x{SMALL.vocab_size}xf32>" in lowered.as_text()
    assert_plain(lowered.compile()(small_params()))


def test_rematerialisation_changes_nothing():
    assert "remat" not in str(jax.make_jaxpr(loss_of())(small_params()))
    assert "remat" in str(jax.make_jaxpr(loss_of(remat=True))(small_params()))
    assert_plain(jax.jit(loss_of(remat=True))(small_params()))


def test_the_gradient_of_the_entropy():
    """Of the entropy in the logits z, d H / d z = -p (log p + H); only the last layer's scale is moved."""
    packing = LAYOUTS["packed"]
    rows = [jnp.asarray(row) for row in rows_of(packing)]

    def total(scale):
        params = small_params()
        params["norm"]["weight"] *= scale
        return jnp.sum(jnp.where(place(packing, TOLD), token_logprobs(SMALL, params, *rows)[1], 0.0))

    got = float(jax.jit(jax.grad(total))(jnp.ones(())))
    logits = np.float64(full_logits(small_params(), TEXTS, SMALL))
    z = np.concatenate([row[: len(text) - 1] for row, text in zip(logits, TEXTS, strict=True)])
    logp = z - np.log(np.exp(z).sum(1, keepdims=True))
    entropy = -np.sum(np.exp(logp) * logp, axis=1, keepdims=True)
    want = np.sum(-np.exp(logp) * (logp + entropy) * z)  # z is proportional to the scale
    assert abs(want) > 1.0
    np.testing.assert_allclose(got, want, rtol=1e-4)

"""Sampling against the closed form: frequencies, log-probabilities, ties, and independence of the batch."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from seedx.inference.sampling import Sampling, sample, uniforms

VOCAB = 10
LOGITS = np.array([1.0, -0.5, 2.0, 2.0, 0.3, -3.0, 1.2, 0.3, -1.0, 0.0], np.float32)  # two pairs of ties
TEMPERATURES, TOP_KS, TOP_PS = (0.0, 0.5, 1.0, 1.7), (0, 1, 3, 5, 10), (0.05, 0.5, 0.9, 1.0)
COMBINATIONS = np.array(list(itertools.product(TEMPERATURES, TOP_KS, TOP_PS)))
DRAWS = 2000


@jax.jit
def jitted(logits, sampling, position):
    return sample(logits, sampling, uniforms(sampling.seed, position))


def distribution(logits, temperature, top_k, top_p):
    """The closed form in float64, with a stable sort."""
    logits = logits.astype(np.float64)
    if temperature == 0:
        return np.eye(len(logits))[np.argmax(logits)]
    weights = np.exp((logits - logits.max()) / temperature)
    order = np.argsort(-logits, kind="stable")
    if top_k:
        weights[order[int(top_k) :]] = 0
    weights /= weights.sum()
    before = np.cumsum(weights[order]) - weights[order]
    if top_p < 1:
        weights[order[before >= top_p - 1e-9]] = 0
    return weights / weights.sum()


def settings(rows, *, temperature=1.0, top_k=0, top_p=1.0, seed=0):
    return Sampling(
        jnp.broadcast_to(jnp.float32(temperature), rows),
        jnp.broadcast_to(jnp.int32(top_k), rows),
        jnp.broadcast_to(jnp.float32(top_p), rows),
        jnp.broadcast_to(jnp.uint32(seed), rows),
    )


@pytest.fixture(scope="module")
def draws():
    """Tokens and log-probabilities `[combination, draw]`, all from one call."""
    count = len(COMBINATIONS)
    columns = np.repeat(COMBINATIONS, DRAWS, axis=0)
    sampling = Sampling(
        jnp.float32(columns[:, 0]),
        jnp.int32(columns[:, 1]),
        jnp.float32(columns[:, 2]),
        jnp.full(count * DRAWS, 3, "uint32"),
    )
    logits = jnp.broadcast_to(LOGITS, (count * DRAWS, VOCAB))
    drawn = jitted(logits, sampling, jnp.arange(count * DRAWS, dtype=jnp.int32))
    return [np.asarray(leaf).reshape(count, DRAWS) for leaf in drawn]


@pytest.fixture(scope="module")
def closed_form():
    return np.stack([distribution(LOGITS, *combination) for combination in COMBINATIONS])


def test_frequencies_match_the_closed_form(draws, closed_form):
    counts = np.stack([np.bincount(row, minlength=VOCAB) for row in draws[0]])
    expected = closed_form * DRAWS
    possible = expected > 0
    assert not counts[~possible].any(), "a token outside of top-k or top-p was drawn"
    squares = np.where(possible, (counts - expected) ** 2 / np.where(possible, expected, 1), 0).sum(axis=1)
    freedom = possible.sum(axis=1) - 1
    # Wilson and Hilferty's normal approximation of chi-square: no combination beyond 4.5 sigma.
    free = freedom > 0
    scores = (np.cbrt(squares[free] / freedom[free]) - 1 + 2 / (9 * freedom[free])) / np.sqrt(2 / (9 * freedom[free]))
    assert scores.max() < 4.5, COMBINATIONS[free][scores.argmax()]
    assert scores.std() > 0.5  # they vary as independent draws do


def test_logprobs_match_the_closed_form(draws, closed_form):
    tokens, logprob, raw = draws
    row = np.arange(len(COMBINATIONS))[:, None]
    np.testing.assert_allclose(logprob, np.log(closed_form[row, tokens]), atol=3e-6)
    np.testing.assert_allclose(raw, np.log(distribution(LOGITS, 1.0, 0, 1.0))[tokens], atol=3e-6)


def test_a_vocabulary_of_many_blocks():
    """Drawn tokens are possible, have the right log-probability, and the likeliest comes as often as it should."""
    vocab, rows = 600, 500
    logits = np.random.default_rng(0).normal(size=vocab).astype(np.float32) * 3
    logits[7] = -np.inf
    cuts = ((0, 1.0), (40, 1.0), (0, 0.8), (40, 0.8))
    top_k, top_p = np.repeat(cuts, rows, axis=0).T
    shape = (len(cuts) * rows,)
    sampling = settings(shape, temperature=0.8, top_k=np.int32(top_k), top_p=np.float32(top_p))
    drawn = jitted(jnp.broadcast_to(logits, (*shape, vocab)), sampling, jnp.arange(*shape, dtype=jnp.int32))
    for i, cut in enumerate(cuts):
        expected = distribution(logits, 0.8, *cut)
        tokens, logprob = (np.asarray(leaf)[i * rows : (i + 1) * rows] for leaf in drawn[:2])
        assert expected[tokens].min() > 0
        np.testing.assert_allclose(logprob, np.log(expected[tokens]), atol=2e-5)
        likeliest = expected.argmax()
        share, p = np.mean(tokens == likeliest), expected[likeliest]
        assert abs(share - p) < 4.5 * np.sqrt(p * (1 - p) / rows)


def test_ties_go_to_the_lower_id():
    flat = jnp.zeros((300, VOCAB))
    position = jnp.arange(300, dtype=jnp.int32)
    assert set(np.asarray(jitted(flat, settings((300,), top_k=3), position).token)) == {0, 1, 2}
    assert set(np.asarray(jitted(flat, settings((300,), top_p=0.35), position).token)) == {0, 1, 2, 3}
    for least in (1e-30, 1e-40, 1e-50):  # the last two are no normal float32
        drawn = jitted(flat, settings((300,), top_p=least), position)
        assert set(np.asarray(drawn.token)) == {0}
        np.testing.assert_array_equal(drawn.logprob, 0.0)
    assert set(np.asarray(jitted(flat, settings((300,), temperature=0.0), position).token)) == {0}


def test_a_row_does_not_depend_on_its_batch():
    """The same row alone, and among rows that make the batch search for thresholds."""
    logits = jax.random.normal(jax.random.key(0), (32, 300)) * 4
    position = jnp.arange(32, dtype=jnp.int32)
    sampling = settings((32,), temperature=0.9, seed=11)
    mixed = sampling._replace(top_k=jnp.where(position % 2 == 0, 0, 5).astype(jnp.int32))
    alone, among = jitted(logits, sampling, position), jitted(logits, mixed, position)
    for leaf, other in zip(alone, among, strict=True):
        np.testing.assert_array_equal(leaf[::2], other[::2])
    one = jitted(logits[4:5], jax.tree.map(lambda leaf: leaf[4:5], sampling), position[4:5])
    assert one.token[0] == alone.token[4]


def test_seed_and_position_both_matter():
    logits = jnp.zeros((64, 1000))
    position = jnp.arange(64, dtype=jnp.int32)
    first = jitted(logits, settings((64,), seed=1), position).token
    assert len(set(np.asarray(first))) > 50
    assert np.mean(np.asarray(first == jitted(logits, settings((64,), seed=2), position).token)) < 0.1
    np.testing.assert_array_equal(first, jitted(logits, settings((64,), seed=1), position).token)

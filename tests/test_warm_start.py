"""The warm start: it learns a toy task, measures what sampling would score, and says where it cannot."""

import functools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decode_harness import CONFIG
from text_fakes import Bigram

from seedx import sharding
from seedx.agents.grpo import grpo_loss
from seedx.checks import ConfigError
from seedx.grpo_config import GrpoConfig, WarmStartConfig
from seedx.learner.packing import pack, place
from seedx.learner.warm_start import _batch, imitation_loss, warm_start

V, ROW_TOKENS = 64, 12
MODEL = Bigram(CONFIG)
TABLE = np.random.default_rng(0).normal(size=(V, V)).astype(np.float32)


def text_of(prompt, *answers):
    """A text and which of its tokens are the model's: a prompt, answers of it and replies to it in turn."""
    tokens, own = list(prompt), [False] * len(prompt)
    for i, part in enumerate(answers):
        tokens, own = tokens + part, own + [i % 2 == 0] * len(part)
    return tokens, own


# Answers of 1 to 4 tokens; the third has two turns, and the last fills its row.
TEXTS = [
    text_of([5], [6, 7]),
    text_of([1, 2, 3], [4]),
    text_of([9, 9], [8, 7], [20, 21], [6, 5]),
    text_of([63] * 8, [0] * 4),
]


def count_on(batch_number, size=6):
    """Prompts n; the answer is n + 1, n + 2."""
    rng = np.random.default_rng(batch_number)
    return [counted_from(int(n)) for n in rng.integers(0, V, size)]


def counted_from(n):
    return text_of([n], [(n + 1) % V, (n + 2) % V])


def probability(table, text):
    """Of the model's tokens, float64."""
    tokens, own = text
    logits = np.float64(table)
    logprobs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    return np.exp(sum(logprobs[tokens[t - 1], tokens[t]] for t in np.flatnonzero(own)))


@functools.cache
def program():
    loss = jax.value_and_grad(partial(imitation_loss, MODEL), has_aux=True)
    return jax.jit(loss)


def test_the_loss_and_what_sampling_would_score():
    batch = _batch(TEXTS, ROW_TOKENS, 5)
    assert batch.tokens.shape == (5, ROW_TOKENS)
    assert batch.trained.sum() == 11
    (loss, metrics), _ = program()({"table": TABLE}, batch)
    wanted = [probability(TABLE, text) for text in TEXTS]
    np.testing.assert_allclose(metrics["solved"], sum(wanted), rtol=1e-5)
    assert float(metrics["sequences"]) == len(TEXTS)
    np.testing.assert_allclose(loss, -np.sum(np.log(wanted)) / 11, rtol=1e-5)


def test_prompts_replies_and_padding_are_not_learned():
    packing = pack(np.array([len(tokens) for tokens, _ in TEXTS]), ROW_TOKENS, 5)
    batch = _batch(TEXTS, ROW_TOKENS, 5)
    own = place(packing, np.concatenate([own for _, own in TEXTS]))
    np.testing.assert_array_equal(batch.trained, own)
    np.testing.assert_allclose(batch.weight, own / np.float32(11))
    (_, _), gradient = program()({"table": TABLE}, batch)
    before = np.zeros(V, bool)  # tokens that one of the model's comes after
    for tokens, own in TEXTS:
        before[np.array(tokens)[np.flatnonzero(own) - 1]] = True
    assert not before[[1, 2, 20]].any()
    np.testing.assert_array_equal(np.any(np.asarray(gradient["table"]) != 0, axis=1), before)


def test_its_gradient_is_that_of_the_policy_loss_with_advantage_1():
    batch = _batch(TEXTS, ROW_TOKENS, 5)
    params = {"table": jnp.asarray(TABLE)}
    _, want = program()(params, batch)
    logprobs, _ = MODEL.logprobs(params, batch)
    on_policy = batch._replace(advantage=np.ones_like(batch.weight), old=logprobs, behaviour=logprobs)
    config = GrpoConfig()
    got = jax.jit(jax.grad(lambda params, batch: grpo_loss(MODEL, config, params, None, batch)[0]))(params, on_policy)
    np.testing.assert_allclose(got["table"], want["table"], rtol=1e-5, atol=1e-8)


def placed(table):
    """Parameters on one device."""
    return jax.device_put({"table": table}, sharding.replicated(sharding.serve_mesh()))


@pytest.mark.parametrize("mesh", [{}, {"data": 4, "fsdp": 2}], ids=str)
def test_it_learns_until_the_answers_are_as_likely_as_wanted(mesh):
    mesh = sharding.serve_mesh(**mesh)
    config = WarmStartConfig(reward=0.7, batch_size=6, learning_rate=0.5, max_updates=500)
    params = jax.device_put({"table": TABLE}, sharding.replicated(mesh))
    asked, told = [], []

    def shown(i):
        asked.append(i)
        return count_on(i)

    def progress(updates, solved):
        told.append((updates, solved))

    after = warm_start(MODEL, config, params, shown, mesh=mesh, row_tokens=ROW_TOKENS, progress=progress)
    assert asked == [i for i, _ in told] == list(range(len(told)))
    assert told[-1][1] >= 0.7 > max(solved for _, solved in told[:-1])
    assert 10 < len(told) < 500
    np.testing.assert_array_equal(params["table"], TABLE)  # not donated
    fresh = [probability(after["table"], counted_from(n)) for n in range(V)]
    assert np.mean(fresh) > 0.7
    assert np.mean([probability(TABLE, counted_from(n)) for n in range(V)]) < 0.01


def test_what_it_says_is_smoothed_over_batches_that_were_not_learned_from():
    config = WarmStartConfig(reward=0.999, batch_size=6, learning_rate=1e-9, max_updates=3)
    told, smoothed = [], 0.0
    params = placed(3 * np.roll(np.eye(V, dtype=np.float32), 1, axis=1))  # it counts on already
    with pytest.raises(ConfigError):
        warm_start(
            MODEL,
            config,
            params,
            count_on,
            mesh=sharding.serve_mesh(),
            row_tokens=ROW_TOKENS,
            progress=lambda _, solved: told.append(solved),
        )
    for i, solved in enumerate(told):
        smoothed = 0.8 * smoothed + 0.2 * np.mean([probability(params["table"], text) for text in count_on(i)])
        np.testing.assert_allclose(solved, smoothed, rtol=1e-4)
    assert len(told) == 3


def test_a_task_that_it_does_not_learn_in_time_is_refused():
    config = WarmStartConfig(reward=0.5, batch_size=6, learning_rate=1e-6, max_updates=4)
    wanted = r"came to 0\.0% right answers in 4 updates, not to 50\.0%; raise --warm-start\.max-updates"
    with pytest.raises(ConfigError, match=wanted):
        warm_start(
            MODEL,
            config,
            placed(TABLE),
            count_on,
            mesh=sharding.serve_mesh(),
            row_tokens=ROW_TOKENS,
            progress=lambda *_: None,
        )


def test_a_text_that_is_longer_than_a_row_is_refused():
    with pytest.raises(ValueError, match=r"each from 1 to row_tokens \(12\)"):
        _batch([text_of([1] * 8, [2] * 5)], ROW_TOKENS, 1)

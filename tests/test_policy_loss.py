"""Policy losses against numbers worked by hand and loops over sequences, in every layout, and what never leaks."""

from functools import cache
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import Mesh

from seedx.learner.aggregation import Aggregation, sequence_weights
from seedx.learner.policy_loss import (
    Bounding,
    cispo,
    clipped,
    gspo,
    importance_weights,
    loss_sums,
    mismatch_sums,
)
from seedx.sharding import replicated, split_axis

LENGTHS = np.array([3, 1, 0, 4, 2])
NUM = len(LENGTHS)
ONES = np.ones(NUM, np.float32)
GSPO_CLIP = {"clip_low": 0.05, "clip_high": 0.1}
MODES = get_args(Bounding)
LOSSES = {
    "clipped": lambda lp, old, a, mask, ids: clipped(lp, old, a, mask, clip_low=0.2, clip_high=0.28, dual_clip=1.5),
    "gspo": lambda lp, old, a, mask, ids: gspo(lp, old, a, mask, ids, NUM, **GSPO_CLIP, dual_clip=1.2),
    "cispo": lambda lp, old, a, mask, ids: cispo(lp, old, a, mask, clip_high=0.28),
}


def one(ratio, advantage, **names):
    """The clipped loss of one token, and its derivative with respect to log pi."""

    def loss(lp):
        return clipped(lp, jnp.zeros(1), jnp.full(1, advantage), jnp.ones(1, bool), **names)

    out = loss(jnp.log(jnp.full(1, ratio)))
    gradient = jax.grad(lambda lp: jnp.sum(loss(lp).loss))(jnp.log(jnp.full(1, ratio)))
    flags = [name for name in ("low", "high", "dual") if getattr(out, f"clipped_{name}")[0]]
    return float(out.loss[0]), float(gradient[0]), flags


def tokens(seed):
    """log pi, old, advantages, mask and ids of all sequences, one after another."""
    rng = np.random.default_rng(seed)
    ids = np.repeat(np.arange(NUM, dtype=np.int32), LENGTHS)
    old = rng.normal(-2, 1, len(ids))
    advantages = rng.normal(size=NUM)[ids]
    floats = (x.astype(np.float32) for x in (old + rng.normal(0, 0.4, len(ids)), old, advantages))
    return (*floats, np.ones(len(ids), bool), ids)


def place(where, arrays):
    """The tokens where `where` is True, in order; garbage, mask False and some id elsewhere."""
    garbage = (np.nan, -np.inf, np.nan, False, 1)
    placed = [np.full(where.shape, fill, x.dtype) for x, fill in zip(arrays, garbage, strict=True)]
    for out, x in zip(placed, arrays, strict=True):
        out[where] = x
    return tuple(placed)


LAYOUTS = {
    "padded": np.arange(LENGTHS.max()) < LENGTHS[:, None],
    "packed": np.arange(8) < np.array([[4], [6]]),  # the first three sequences in one row, the others in another
    "with tokens of an environment": np.arange(20) % 2 == 0,
}


@cache
def compiled(name):
    """Gradient of the aggregated loss, and the token losses."""

    def total(lp, old, advantages, mask, ids, weights):
        out = LOSSES[name](lp, old, advantages, mask, ids)
        return jnp.sum(out.loss * weights[ids]), out

    return jax.jit(jax.grad(total, has_aux=True))


@pytest.mark.parametrize(
    ("ratio", "advantage", "dual_clip", "loss", "gradient", "flags"),
    [
        (4.0, -1.0, None, 4.0, 4.0, []),
        (4.0, -1.0, 3.0, 3.0, 0.0, ["dual"]),
        (4.0, 1.0, None, -1.2, 0.0, ["high"]),
        (4.0, 1.0, 3.0, -1.2, 0.0, ["high"]),
        (0.5, 1.0, None, -0.5, -0.5, []),
        (0.5, -1.0, None, 0.8, 0.0, ["low"]),
        (1.0, 2.0, 3.0, -2.0, -2.0, []),
        (4.0, 0.0, 3.0, 0.0, 0.0, []),
    ],
)
def test_golden_values_of_one_token(ratio, advantage, dual_clip, loss, gradient, flags):
    got = one(ratio, advantage, clip_low=0.2, clip_high=0.2, dual_clip=dual_clip)
    np.testing.assert_allclose(got[:2], [loss, gradient], rtol=1e-6)
    assert got[2] == flags


@pytest.mark.parametrize("dual_clip", [None, 1.5])
def test_clipped_is_the_maximum_as_written(dual_clip):
    ratio, advantages = (x.ravel() for x in np.meshgrid(np.geomspace(0.01, 10, 30), np.linspace(-2, 2, 9)))
    want = np.maximum(-advantages * ratio, -advantages * np.clip(ratio, 0.8, 1.28))
    if dual_clip is not None:
        want = np.where(advantages < 0, np.minimum(want, -advantages * dual_clip), want)
    lp, old, a = (jnp.asarray(x, jnp.float32) for x in (np.log(ratio), 0 * ratio, advantages))
    got = clipped(lp, old, a, jnp.ones(len(ratio), bool), clip_low=0.2, clip_high=0.28, dual_clip=dual_clip)
    np.testing.assert_allclose(got.loss, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", LOSSES)
def test_on_policy_every_loss_has_the_policy_gradient(name):
    lp, _, advantages, mask, ids = tokens(0)
    gradient, _ = compiled(name)(lp, lp, advantages, mask, ids, ONES)
    np.testing.assert_allclose(gradient, -advantages, rtol=1e-6)


@jax.jit
def published_gspo(lp, old, advantages, ids):
    """Equation 5 and 7 of the paper: one term for each sequence, the mean over those that are not empty."""
    lengths = jnp.asarray(LENGTHS, jnp.float32)
    ratio = jnp.exp(jax.ops.segment_sum(lp - old, ids, NUM) / jnp.maximum(lengths, 1.0))
    a = jnp.where(lengths > 0, jax.ops.segment_max(advantages, ids, NUM), 0.0)
    return jnp.sum(jnp.maximum(-a * ratio, -a * jnp.clip(ratio, 0.95, 1.1))) / 4


@jax.jit
def aggregated_gspo(lp, old, advantages, ids):
    weights = jnp.asarray(sequence_weights("seq-mean-token-mean", LENGTHS))
    loss = gspo(lp, old, advantages, jnp.ones_like(ids, bool), ids, NUM, **GSPO_CLIP).loss
    return jnp.sum(loss * weights[ids])


@pytest.mark.parametrize("seed", range(20))
def test_gspo_is_the_clipped_ratio_of_sequences(seed):
    lp, old, advantages, _, ids = map(jnp.asarray, tokens(seed))
    got, want = (jax.value_and_grad(loss)(lp, old, advantages, ids) for loss in (aggregated_gspo, published_gspo))
    np.testing.assert_allclose(got[0], want[0], rtol=1e-5)
    np.testing.assert_allclose(got[1], want[1], rtol=1e-4, atol=1e-6)


def test_cispo_bounds_the_weight_and_keeps_every_gradient():
    ratio, advantages = jnp.array([0.1, 1.0, 4.0, 4.0]), jnp.array([1.0, 2.0, 1.0, -1.0])
    lp = jnp.array([-1.0, -2.0, -3.0, -4.0])

    def total(lp):
        out = cispo(lp, jax.lax.stop_gradient(lp) - jnp.log(ratio), advantages, jnp.ones(4, bool), clip_high=0.28)
        return jnp.sum(out.loss), out

    gradient, out = jax.jit(jax.grad(total, has_aux=True))(lp)
    np.testing.assert_allclose(out.loss, [0.1, 4.0, 3.84, -5.12], rtol=1e-5)
    np.testing.assert_allclose(gradient, [-0.1, -2.0, -1.28, 1.28], rtol=1e-5)
    np.testing.assert_array_equal(out.clipped_high, [False, False, True, True])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", LOSSES)
@given(seed=st.integers(0, 1000))
def test_layout_changes_neither_loss_nor_gradient(name, layout, seed):
    gradient, out = compiled(name)(*tokens(seed), ONES)
    where = LAYOUTS[layout]
    placed_gradient, placed = compiled(name)(*place(where, tokens(seed)), ONES)
    for got, want in zip((*placed, placed_gradient), (*out, gradient), strict=True):
        np.testing.assert_allclose(np.asarray(got)[where], want, rtol=1e-5, atol=1e-6)
    for masked in (placed.loss, placed_gradient, placed.clipped_low, placed.clipped_high, placed.clipped_dual):
        np.testing.assert_array_equal(np.asarray(masked)[~where], 0)
    np.testing.assert_array_equal(np.asarray(placed.ratio)[~where], 1.0)


@pytest.mark.parametrize("aggregation", get_args(Aggregation))
@pytest.mark.parametrize("name", LOSSES)
def test_microbatches_of_whole_sequences_add_up_to_the_batch(name, aggregation):
    arrays = place(LAYOUTS["padded"], tokens(5))
    weights = sequence_weights(aggregation, LENGTHS, 4)
    whole_gradient, whole = compiled(name)(*arrays, weights)
    for rows in ([3], [0, 4], [1, 2]):
        gradient, part = compiled(name)(*(x[rows] for x in arrays), weights)
        np.testing.assert_allclose(part.loss, whole.loss[np.array(rows)], rtol=1e-5)
        np.testing.assert_allclose(gradient, whole_gradient[np.array(rows)], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", LOSSES)
def test_sequences_may_lie_across_devices(name):
    arrays = place(LAYOUTS["with tokens of an environment"], tokens(6))
    mesh = Mesh(np.array(jax.devices()[:4]), ("data",))
    shards = jax.device_put(arrays, split_axis(mesh, 0))
    gradient, out = compiled(name)(*shards, jax.device_put(ONES, replicated(mesh)))
    want_gradient, want = compiled(name)(*arrays, ONES)
    np.testing.assert_allclose(gradient, want_gradient, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(out.loss, want.loss, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", LOSSES)
def test_only_the_loss_has_a_gradient_and_only_from_the_policy(name):
    lp, old, advantages, mask, ids = map(jnp.asarray, tokens(1))

    def total(lp, old, advantages):
        out = LOSSES[name](jax.lax.stop_gradient(lp), old, advantages, mask, ids)
        return jnp.sum(out.loss) + jnp.sum(LOSSES[name](lp, old, advantages, mask, ids).ratio)

    for gradient in jax.jit(jax.grad(total, argnums=(0, 1, 2)))(lp, old, advantages):
        np.testing.assert_array_equal(gradient, 0.0)


@pytest.mark.parametrize("name", ["clipped", "gspo"])
def test_a_token_the_policy_rules_out_is_finite_and_has_no_gradient(name):
    lp, old, advantages, mask, ids = tokens(2)
    lp[0] = -np.inf
    gradient, out = compiled(name)(lp, old, np.ones_like(advantages), mask, ids, ONES)
    assert np.isfinite(out.loss).all()
    assert gradient[0] == 0.0
    assert (gradient[1:3] < 0.0).all()  # of the same sequence


# Sequence 0 has ratios 4 and .5, so 2; sequence 1 has 1; sequence 2 has .25 and 1, so .25.
RATIOS = jnp.array([4.0, 0.5, 1.0, 0.25, 1.0])
IDS = jnp.array([0, 0, 1, 2, 2])
WEIGHED = {
    "truncate": ([2.0, 0.5, 1.0, 0.4, 1.0], [True, False, False, True, False]),
    "mask": ([0.0, 0.5, 1.0, 0.0, 1.0], [True, False, False, True, False]),
    "sequence-truncate": ([1.8, 1.8, 1.0, 0.4, 0.4], [True, True, False, True, True]),
    "sequence-mask": ([0.0, 0.0, 1.0, 0.0, 0.0], [True, True, False, True, True]),
}


def weigh(mode, prox, behaviour, mask, ids=IDS, low=0.4):
    high = 1.8 if mode.startswith("sequence") else 2.0
    return importance_weights(prox, behaviour, mask, ids, 3, mode=mode, high=high, low=low)


@pytest.mark.parametrize("mode", MODES)
def test_importance_weights_within_bounds(mode):
    weights, bounded = weigh(mode, jnp.log(RATIOS), jnp.zeros(5), jnp.ones(5, bool))
    np.testing.assert_allclose(weights, WEIGHED[mode][0], rtol=1e-6)
    np.testing.assert_array_equal(bounded, WEIGHED[mode][1])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("garbage", [np.nan, -np.inf, np.inf])
def test_importance_weights_of_masked_tokens(mode, garbage):
    """A masked token takes no part in the product of its sequence."""
    mask = jnp.array([True, False, True, True, True, False])
    prox = jnp.where(mask, jnp.log(jnp.append(RATIOS, 1.0)), garbage)
    weights, bounded = weigh(mode, prox, jnp.where(mask, 0.0, garbage), mask, jnp.append(IDS, 2))
    product = {"sequence-mask": 0.0, "mask": 0.0}.get(mode, 1.8 if mode.startswith("sequence") else 2.0)
    np.testing.assert_allclose(weights[0], product, rtol=1e-6)
    np.testing.assert_allclose(weights[2:5], WEIGHED[mode][0][2:], rtol=1e-6)
    np.testing.assert_array_equal(weights[~mask], 0.0)
    assert not bounded[~mask].any()


@pytest.mark.parametrize("mode", MODES)
def test_importance_weights_carry_no_gradient_and_never_overflow(mode):
    extreme, ids = jnp.array([-jnp.inf, 0.0] + [500.0] * 8), jnp.array([0, 1] + [2] * 8)  # exp(8 * 20) overflows

    def weights(prox, behaviour):
        return weigh(mode, prox, behaviour, jnp.ones(10, bool), ids, low=0.0).weights

    gradients = jax.grad(lambda *x: jnp.sum(weights(*x)), argnums=(0, 1))(extreme, jnp.zeros(10))
    high = {"truncate": 2.0, "sequence-truncate": 1.8}.get(mode, 0.0)
    np.testing.assert_allclose(weights(extreme, jnp.zeros(10)), [0.0, 1.0] + [high] * 8, atol=1e-8)
    for gradient in gradients:
        np.testing.assert_array_equal(gradient, 0.0)


def test_decoupled_loss_of_truncated_tokens_keeps_its_denominator():
    """w max(-A r, ...) summed with weights of all tokens: leaving a token out does not make the others count more."""
    lp, prox = jnp.log(jnp.array([1.1, 0.9, 1.0, 1.5, 1.0])), jnp.zeros(5)
    mask = jnp.ones(5, bool)
    loss = clipped(lp, prox, jnp.ones(5), mask, clip_low=0.2, clip_high=0.2).loss
    w = weigh("mask", prox, prox - jnp.log(RATIOS), mask).weights
    total = jnp.sum(w * loss * sequence_weights("token-mean", np.array([2, 1, 2]))[IDS])
    np.testing.assert_allclose(total, -(0 * 1.1 + 0.5 * 0.9 + 1.0 + 0 * 1.2 + 1.0) / 5, rtol=1e-6)


def test_sums_for_metrics():
    mask = jnp.array([True, True, True, True, False])
    old = jnp.where(mask, jnp.full(5, -1.0), jnp.nan)
    ratio = jnp.array([1.0, 2.0, 0.5, 4.0, 9.0])
    lp = jnp.log(ratio) + old
    advantages = jnp.array([1.0, 1.0, -1.0, -1.0, 1.0])
    loss = clipped(lp, old, advantages, mask, clip_low=0.2, clip_high=0.2, dual_clip=3.0)
    sums = {name: float(x) for name, x in loss_sums(loss, lp, old, mask).items()}
    want = {"tokens": 4, "ratio": 7.5, "clipped_low": 1, "clipped_high": 1, "clipped_dual": 1}
    want |= {"kl_k1": -np.log(4), "kl_k3": 3.5 - np.log(4)}  # the logs sum to log 4, ratios less 1 to 3.5
    assert sums == pytest.approx(want, rel=1e-5)

    importance = weigh("truncate", lp, old, mask)
    sums = {name: float(x) for name, x in mismatch_sums(importance, lp, old, mask).items()}
    want = {"weight": 5.5, "weight_squared": 9.25, "weight_bounded": 1, "gap": np.log(16), "gap_max": np.log(4)}
    assert sums == pytest.approx(want, rel=1e-5)


def test_sums_of_no_tokens_are_zero():
    nothing, mask = jnp.full(5, jnp.nan), jnp.zeros(5, bool)
    loss = clipped(nothing, nothing, nothing, mask, clip_low=0.2, clip_high=0.2)
    sums = loss_sums(loss, nothing, nothing, mask)
    sums |= mismatch_sums(weigh("truncate", nothing, nothing, mask), nothing, nothing, mask)
    assert set(map(float, sums.values())) == {0.0}

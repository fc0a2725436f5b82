"""V-trace against an O(T^2) transcription of the paper, published numbers, and identities."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seedx.learner.vtrace import vtrace

T = 12
jitted = jax.jit(vtrace, static_argnames=("lambda_", "clip_rho", "clip_pg_rho"))


def eager(**inputs):
    return vtrace(**{k: jnp.asarray(v) for k, v in inputs.items()})


def random_inputs(seed, shape=(T,), mask=None):
    rng = np.random.default_rng(seed)

    def f32(x):
        return np.asarray(x, np.float32)

    return {
        "log_rhos": f32(rng.normal(size=shape)),
        "discounts": f32(rng.uniform(0.5, 1, shape) * (rng.uniform(size=shape) < 0.8)),
        "rewards": f32(rng.normal(size=shape)),
        "values": f32(rng.normal(size=(shape[0] + 1, *shape[1:]))),
        "mask": np.ones(shape, bool) if mask is None else mask,
    }


def quadratic_vtrace(log_rhos, discounts, rewards, values, mask, lambda_=1.0, clip_rho=1.0, clip_pg_rho=1.0):
    """Equation 1 as it stands, one row of `[T]` inputs; a trace also ends at a masked row."""
    rhos, steps = np.exp(log_rhos), len(rewards)
    targets = np.array(values, np.float64)
    for t in range(steps):
        trace = 1.0
        for k in range(t, steps):
            if not mask[k]:
                break
            delta = min(clip_rho, rhos[k]) * (rewards[k] + discounts[k] * values[k + 1] - values[k])
            targets[t] += trace * delta
            trace *= discounts[k] * lambda_ * min(1.0, rhos[k])
    advantages = np.minimum(clip_pg_rho, rhos) * (rewards + discounts * targets[1:] - values[:-1])
    return targets[:-1], np.where(mask, advantages, 0.0)


@pytest.mark.parametrize(
    ("lambda_", "targets", "advantages"),
    [
        (1.0, [0.345, -0.9, -1.0, 2.088], [-0.155, -1.1, -0.7, 1.088]),
        (0.95, [0.383216, -0.8685, -1.0, 2.088], [-0.140825, -1.1, -0.7, 1.088]),
    ],
)
def test_golden_values_of_seed_rl(lambda_, targets, advantages):
    got = vtrace(
        log_rhos=jnp.log(jnp.array([0.5, 2, 1.5, 0.8])),
        discounts=jnp.array([0.9, 0.9, 0, 0.9]),
        rewards=jnp.array([1.0, 0, -1, 2]),
        values=jnp.array([0.5, 0.2, -0.3, 1, 0.4]),
        mask=jnp.ones(4, bool),
        lambda_=lambda_,
    )
    np.testing.assert_allclose(got.targets, targets, atol=1e-6)
    np.testing.assert_allclose(got.advantages, advantages, atol=1e-6)


@settings(deadline=None, max_examples=50)
@given(
    seed=st.integers(0, 10_000),
    mask=st.lists(st.booleans(), min_size=T, max_size=T),
    scalars=st.sampled_from([(1.0, 1.0, 1.0), (0.95, 1.0, 1.0), (0.5, 2.0, 3.0), (0.0, 1.5, 0.7)]),
)
def test_equals_the_quadratic_sum(seed, mask, scalars):
    inputs = random_inputs(seed, mask=np.array(mask))
    names = dict(zip(("lambda_", "clip_rho", "clip_pg_rho"), scalars, strict=True))
    got, want = jitted(**inputs, **names), quadratic_vtrace(**inputs, **names)
    np.testing.assert_allclose(got.targets, want[0], atol=2e-5)
    np.testing.assert_allclose(got.advantages, want[1], atol=2e-5)


def test_on_policy_is_the_n_step_return():
    inputs = random_inputs(0, (T, 3)) | {"log_rhos": np.zeros((T, 3), np.float32)}
    returns = np.array(inputs["values"], np.float64)
    for t in reversed(range(T)):
        returns[t] = inputs["rewards"][t] + inputs["discounts"][t] * returns[t + 1]
    got = eager(**inputs)
    np.testing.assert_allclose(got.targets, returns[:-1], atol=1e-5)
    np.testing.assert_allclose(got.advantages, returns[:-1] - inputs["values"][:-1], atol=1e-5)


@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 10_000), episodes=st.lists(st.tuples(st.integers(1, 5), st.booleans()), min_size=1))
def test_a_packed_unroll_equals_its_episodes(seed, episodes):
    """Episodes of n transitions have n+1 rows, the last one masked; they end by termination or by truncation."""
    inputs, slices, row = random_inputs(seed), [], 0
    inputs["discounts"][:] = 0.9
    inputs["mask"][:] = True
    for length, terminated in episodes:
        end = min(row + length, T)
        slices.append(slice(row, end))
        if row + length > T:  # unfinished: bootstraps from the last row of the unroll
            break
        if terminated:
            inputs["discounts"][end - 1] = 0.0
        row = end + 1
        if end < T:
            inputs["mask"][end] = False
        if row >= T:
            break
    else:
        slices.append(slice(row, T))
    packed = jitted(**inputs)
    for rows in slices:
        with_bootstrap = slice(rows.start, rows.stop + 1)
        part = {k: v[with_bootstrap if k == "values" else rows] for k, v in inputs.items()}
        want = quadratic_vtrace(**part)
        np.testing.assert_allclose(packed.targets[rows], want[0], atol=2e-5)
        np.testing.assert_allclose(packed.advantages[rows], want[1], atol=2e-5)


@pytest.mark.parametrize(("discount", "bootstrap"), [(0.9, 5.0), (0.0, 0.0)], ids=["truncated", "terminated"])
def test_the_end_of_an_episode_bootstraps_only_where_truncated(discount, bootstrap):
    got = vtrace(
        log_rhos=jnp.zeros(4),
        discounts=jnp.array([0.9, discount, 0.9, 0.9]),
        rewards=jnp.array([1.0, 2.0, 100.0, 100.0]),
        values=jnp.array([0.0, 0.0, 5.0, -50.0, -50.0]),
        mask=jnp.array([True, True, False, True]),
    )
    np.testing.assert_allclose(got.targets[:2], [1 + 0.9 * (2 + 0.9 * bootstrap), 2 + 0.9 * bootstrap], rtol=1e-6)
    assert got.targets[2] == 5.0
    assert got.advantages[2] == 0.0


def test_a_reward_reaches_exactly_the_rows_before_it_in_its_episode():
    mask = np.ones(T, bool)
    mask[4] = False
    inputs = random_inputs(1, mask=mask)
    inputs["discounts"][:] = 0.9
    changed = inputs | {"rewards": inputs["rewards"] + np.eye(T, dtype=np.float32)[-1]}
    moved = np.asarray(eager(**inputs).targets != eager(**changed).targets)
    np.testing.assert_array_equal(moved, np.arange(T) > 4)


def test_nothing_masked_leaks():
    mask = np.arange(T) % 4 != 3
    clean = random_inputs(2, mask=mask)
    dirty = {k: np.where(mask, v, np.nan) if k in ("log_rhos", "discounts", "rewards") else v for k, v in clean.items()}
    for got, want in zip(jitted(**dirty), jitted(**clean), strict=True):
        np.testing.assert_array_equal(got, want)


def test_carries_no_gradient():
    inputs = random_inputs(3)

    def total(log_rhos, values):
        return sum(jnp.sum(x) for x in eager(**inputs | {"log_rhos": log_rhos, "values": values}))

    for gradient in jax.grad(total, argnums=(0, 1))(inputs["log_rhos"], inputs["values"]):
        np.testing.assert_array_equal(gradient, 0.0)


def test_jit_changes_nothing_and_batch_axes_are_independent():
    inputs = random_inputs(4, (T, 2, 3), np.random.default_rng(4).uniform(size=(T, 2, 3)) < 0.8)
    uncompiled, compiled = eager(**inputs), jitted(**inputs)
    row = eager(**{k: v[:, 1, 2] for k, v in inputs.items()})
    for a, b, c in zip(uncompiled, compiled, row, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)
        np.testing.assert_allclose(a[:, 1, 2], c, atol=1e-6)

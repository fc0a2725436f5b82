"""Action distributions against closed forms, SciPy, numerical integration and sampling frequencies."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from seedx.checks import ConfigError
from seedx.networks.distributions import distribution_for
from seedx.types import ArraySpec

DISCRETE = ArraySpec((), "int64", num_values=3)
MULTI = ArraySpec((2,), "int64", num_values=3)
GAUSSIAN = ArraySpec((2,), "float32")
BOUNDED = ArraySpec((), "float32", minimum=-1.0, maximum=3.0)
TREE = (ArraySpec((), "int32", num_values=2), {"box": ArraySpec((2,), "float32", None, -1.0, (2.0, 3.0)), "m": MULTI})
ALL = {"discrete": DISCRETE, "multi": MULTI, "gaussian": GAUSSIAN, "bounded": BOUNDED, "tree": TREE}


@functools.cache
def distribution_of(name):
    """With compiled methods."""
    distribution = distribution_for(ALL[name])
    methods = {method: jax.jit(getattr(distribution, method)) for method in ("sample", "mode", "log_prob", "entropy")}
    return types.SimpleNamespace(num_parameters=distribution.num_parameters, **methods)


def parameters_of(distribution, key, *leading):
    return jax.random.normal(key, (*leading, distribution.num_parameters))


def test_categorical_matches_its_formulas(key):
    distribution = distribution_of("discrete")
    logits = parameters_of(distribution, key, 5, 4)
    p = np.asarray(jax.nn.softmax(logits))
    action = np.random.default_rng(0).integers(0, 3, (5, 4))
    np.testing.assert_allclose(
        distribution.log_prob(logits, action), np.log(np.take_along_axis(p, action[..., None], -1))[..., 0], rtol=1e-5
    )
    np.testing.assert_allclose(distribution.entropy(logits), scipy.stats.entropy(p, axis=-1), rtol=1e-5)
    np.testing.assert_array_equal(distribution.mode(logits), p.argmax(-1))


def test_masked_actions_contribute_nothing():
    distribution = distribution_for(MULTI)
    logits = jnp.array([[0.5, -jnp.inf, 1.0, -jnp.inf, 2.0, -jnp.inf]])
    action = jnp.array([[2, 1]])
    p = jax.nn.sigmoid(0.5)  # of the third action of the first element; the second has no choice
    log_prob, gradient = jax.value_and_grad(lambda x: distribution.log_prob(x, action)[0])(logits)
    np.testing.assert_allclose(log_prob, np.log(p), rtol=1e-5)
    np.testing.assert_allclose(gradient, [[p - 1, 0, 1 - p, 0, 0, 0]], atol=1e-6)
    entropy, gradient = jax.value_and_grad(lambda x: distribution.entropy(x)[0])(logits)
    np.testing.assert_allclose(entropy, scipy.stats.entropy([p, 1 - p]), rtol=1e-5)
    slope = -p * (1 - p) * 0.5  # of the binary entropy, where the logits differ by 0.5
    np.testing.assert_allclose(gradient, [[-slope, 0, slope, 0, 0, 0]], atol=1e-6)
    assert distribution.log_prob(logits, jnp.array([[1, 1]]))[0] == -jnp.inf


def test_multi_discrete_is_independent_categoricals(key):
    multi, single = distribution_of("multi"), distribution_for(DISCRETE)
    logits = parameters_of(multi, key, 5)
    action = np.random.default_rng(0).integers(0, 3, (5, 2))
    parts = [(logits[:, :3], action[:, 0]), (logits[:, 3:], action[:, 1])]
    np.testing.assert_allclose(multi.log_prob(logits, action), sum(single.log_prob(*p) for p in parts), rtol=1e-6)
    np.testing.assert_allclose(multi.entropy(logits), sum(single.entropy(p) for p, _ in parts), rtol=1e-6)
    np.testing.assert_array_equal(multi.mode(logits), np.stack([single.mode(p) for p, _ in parts], -1))


def test_gaussian_matches_scipy(key):
    distribution = distribution_of("gaussian")
    parameters = parameters_of(distribution, key, 5)
    mean = np.asarray(parameters[:, :2])
    scale = np.log1p((np.e - 1) * np.exp(np.asarray(parameters[:, 2:]))) + 1e-3
    action = np.random.default_rng(0).normal(size=(5, 2)).astype(np.float32)
    reference = scipy.stats.norm(mean, scale)
    np.testing.assert_allclose(distribution.log_prob(parameters, action), reference.logpdf(action).sum(-1), rtol=1e-4)
    np.testing.assert_allclose(distribution.entropy(parameters), reference.entropy().sum(-1), rtol=1e-4)
    np.testing.assert_allclose(distribution.mode(parameters), mean)


@pytest.mark.parametrize(("mean", "raw_scale"), [(0.0, 0.0), (1.5, -1.0), (-4.0, 1.0), (8.0, 0.0), (0.0, 4.0)])
def test_bounded_density_integrates_to_one_and_to_its_entropy(mean, raw_scale):
    distribution = distribution_of("bounded")
    grid = np.linspace(-1, 3, 400_001, dtype=np.float64)
    action = ((grid[1:] + grid[:-1]) / 2).astype(np.float32)
    parameters = jnp.broadcast_to(jnp.array([mean, raw_scale]), (len(action), 2))
    log_density = np.asarray(distribution.log_prob(parameters, action), np.float64)
    density = np.exp(log_density)
    width = grid[1] - grid[0]
    np.testing.assert_allclose(density.sum() * width, 1.0, atol=2e-3)
    if abs(mean) < 2 and raw_scale <= 0:  # where the constant tail beyond 0.999 holds next to nothing
        np.testing.assert_allclose(
            distribution.entropy(parameters[:1])[0], -(density * log_density).sum() * width, atol=1e-2
        )


def test_bounded_gradients_are_finite_at_the_bounds():
    distribution = distribution_of("bounded")
    action = jnp.array([-1.0, 3.0, 2.9999998, 1.0])
    parameters = jnp.array([[0.3, 0.2], [-40.0, -3.0], [40.0, -3.0], [0.0, 50.0]])
    value, gradient = jax.value_and_grad(lambda p: jnp.sum(distribution.log_prob(p, action)))(parameters)
    assert np.isfinite(value)
    assert np.isfinite(gradient).all()
    # Off both bounds, a higher mean makes the upper bound likelier and the lower one less likely.
    assert gradient[0, 0] < 0 < gradient[1, 0]


def test_bounded_samples_keep_the_bounds_of_each_element(key):
    distribution = distribution_for(ArraySpec((2,), "float32", minimum=(-1.0, 0.1), maximum=(1.0, 0.7)))
    parameters = jnp.tile(jnp.array([[0.0, 9.0, 5.0, 5.0]]), (1000, 1))
    action = np.asarray(distribution.sample(parameters, jax.random.split(key, 1000)))
    assert (action >= np.float32([-1, 0.1])).all()
    assert (action <= np.float32([1, 0.7])).all()
    np.testing.assert_allclose(distribution.mode(parameters)[0], [0.0, 0.7], atol=1e-5)


def test_frequencies_are_the_probabilities(key):
    n = 20_000
    discrete, bounded = distribution_of("discrete"), distribution_of("bounded")
    logits = jnp.tile(jnp.array([[0.0, 1.0, -1.0]]), (n, 1))
    action = np.asarray(discrete.sample(logits, jax.random.split(key, n)))
    p = np.asarray(jax.nn.softmax(logits[0]))
    assert scipy.stats.chisquare(np.bincount(action, minlength=3), p / p.sum() * n).pvalue > 1e-3

    parameters = jnp.tile(jnp.array([[0.4, 0.0]]), (n, 1))
    action = np.asarray(bounded.sample(parameters, jax.random.split(key, n)))
    pre_tanh = np.arctanh((np.clip(action, -0.99999, 2.99999) - 1) / 2)
    assert scipy.stats.kstest(pre_tanh, scipy.stats.norm(0.4, 1.001).cdf).pvalue > 1e-3


@pytest.mark.parametrize("name", ALL)
def test_a_row_samples_the_same_in_any_batch(name, key):
    distribution = distribution_of(name)
    parameters, keys = parameters_of(distribution, key, 6), jax.random.split(key, 6)
    whole = distribution.sample(parameters, keys)
    rows = np.array([4, 1])
    part = distribution.sample(parameters[rows], keys[rows])
    for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(part), strict=True):
        np.testing.assert_array_equal(a[rows], b)
    assert any(len(np.unique(a, axis=0)) > 1 for a in jax.tree.leaves(whole))


@pytest.mark.parametrize("name", ALL)
def test_shapes_dtypes_and_leading_axes(name, key):
    spec, distribution = ALL[name], distribution_of(name)
    parameters = parameters_of(distribution, key, 2, 3)
    action = distribution.mode(parameters)
    sample = distribution.sample(parameters[0], jax.random.split(key, 3))
    for leaf, a, b in zip(*map(jax.tree.leaves, (spec, action, sample)), strict=True):
        assert a.shape == (2, *b.shape) == (2, 3, *leaf.shape)
        assert a.dtype == b.dtype == jax.dtypes.canonicalize_dtype(leaf.dtype)
    assert jax.tree.structure(action) == jax.tree.structure(spec)
    assert distribution.log_prob(parameters, action).shape == distribution.entropy(parameters).shape == (2, 3)


def test_a_tree_is_its_leaves(key):
    joint = distribution_of("tree")
    parameters = parameters_of(joint, key, 4)
    action = joint.sample(parameters, jax.random.split(key, 4))
    log_prob = entropy = start = 0
    for spec, leaf in zip(jax.tree.leaves(TREE), jax.tree.leaves(action), strict=True):
        part = distribution_for(spec)
        own = parameters[:, start : start + part.num_parameters]
        start += part.num_parameters
        log_prob, entropy = log_prob + part.log_prob(own, leaf), entropy + part.entropy(own)
    np.testing.assert_allclose(joint.log_prob(parameters, action), log_prob, rtol=1e-5)
    np.testing.assert_allclose(joint.entropy(parameters), entropy, rtol=1e-5)


def test_equal_leaves_draw_independently(key):
    first, second = distribution_for((DISCRETE, DISCRETE)).sample(jnp.zeros((200, 6)), jax.random.split(key, 200))
    assert 0.2 < np.mean(first == second) < 0.45  # independent: 1/3


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (ArraySpec((), "int32"), "num_values"),
        (ArraySpec((), "float32", minimum=0.0), "finite bounds"),
        (ArraySpec((2,), "float32", minimum=0.0, maximum=(1.0, np.inf)), "finite bounds"),
        ({}, "no leaves"),
    ],
)
def test_refuses_what_it_cannot_model(spec, message):
    with pytest.raises(ConfigError, match=message):
        distribution_for(spec)

"""Action distributions: one for each leaf of an action spec, and one for the tree of them.

A distribution is a function of the policy head's output, `parameters [..., P]`, with any leading axes. Sampling takes
one key for each row: what a row samples depends on its own key and parameters only, never on the batch around it.
A leaf's `sample` is of one row, `[P]` and one key.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Key, PyTree, Shaped

from seedx.checks import ConfigError
from seedx.types import ArraySpec

_MIN_SCALE = 1e-3
_UNIT_SCALE_BIAS = math.log(math.e - 1)  # softplus of it is 1
_THRESHOLD = 0.999
_NODES, _WEIGHTS = (x.tolist() for x in np.polynomial.hermite_e.hermegauss(8))


@dataclass(frozen=True)
class Categorical:
    """Independent categoricals of `num_values` each, one for each element of `shape`. Parameters: the logits.

    A logit of -inf masks its action: probability 0, no part in the entropy, no gradient.
    """

    shape: tuple[int, ...]
    num_values: int
    dtype: Any

    @property
    def num_parameters(self) -> int:
        """`num_values` logits for each element."""
        return math.prod(self.shape) * self.num_values

    def sample(self, parameters: Float[Array, "P"], key: Key[Array, ""]) -> Array:
        """Gumbel-max."""
        return jax.random.categorical(key, self._logits(parameters)).astype(self.dtype)

    def mode(self, parameters: Float[Array, "*B P"]) -> Array:
        """The first of the largest logits."""
        return jnp.argmax(self._logits(parameters), axis=-1).astype(self.dtype)

    def log_prob(self, parameters: Float[Array, "*B P"], action: Shaped[Array, "..."]) -> Float[Array, "*B"]:
        """Log-probability, summed over the elements."""
        log_probs = jax.nn.log_softmax(self._logits(parameters))
        # Not a gather, whose gradient is a scatter; nor a product, as 0 times the -inf of a masked action is NaN.
        chosen = jnp.where(jax.nn.one_hot(action, self.num_values, dtype=bool), log_probs, 0.0)
        return _sum_event(jnp.sum(chosen, axis=-1), self.shape)

    def entropy(self, parameters: Float[Array, "*B P"]) -> Float[Array, "*B"]:
        """-sum p log p, summed over the elements."""
        log_probs = jax.nn.log_softmax(self._logits(parameters))
        p = jnp.exp(log_probs)
        return -_sum_event(jnp.sum(p * jnp.where(p > 0, log_probs, 0.0), axis=-1), self.shape)

    def _logits(self, parameters: Array) -> Array:
        return parameters.reshape(*parameters.shape[:-1], *self.shape, self.num_values)


@dataclass(frozen=True)
class Gaussian:
    """Independent Gaussians. Parameters: the means, then the scales before softplus (0 means a scale of 1)."""

    shape: tuple[int, ...]
    dtype: Any

    @property
    def num_parameters(self) -> int:
        """A mean and a scale for each element."""
        return 2 * math.prod(self.shape)

    def sample(self, parameters: Float[Array, "P"], key: Key[Array, ""]) -> Array:
        """Mean plus scale times noise."""
        mean, scale = self.mean_and_scale(parameters)
        return (mean + scale * jax.random.normal(key, self.shape)).astype(self.dtype)

    def mode(self, parameters: Float[Array, "*B P"]) -> Array:
        """The mean."""
        return self.mean_and_scale(parameters)[0].astype(self.dtype)

    def log_prob(self, parameters: Float[Array, "*B P"], action: Shaped[Array, "..."]) -> Float[Array, "*B"]:
        """Log-density, summed over the elements."""
        mean, scale = self.mean_and_scale(parameters)
        return _sum_event(jax.scipy.stats.norm.logpdf(action.astype(mean.dtype), mean, scale), self.shape)

    def entropy(self, parameters: Float[Array, "*B P"]) -> Float[Array, "*B"]:
        """Differential entropy, summed over the elements."""
        _, scale = self.mean_and_scale(parameters)
        return _sum_event(0.5 * math.log(2 * math.pi * math.e) + jnp.log(scale), self.shape)

    def mean_and_scale(self, parameters: Float[Array, "*B P"]) -> tuple[Array, Array]:
        """Both `[*B, *shape]`."""
        mean, scale = jnp.split(parameters, 2, axis=-1)
        scale = jax.nn.softplus(scale + _UNIT_SCALE_BIAS) + _MIN_SCALE
        shape = (*parameters.shape[:-1], *self.shape)
        return mean.reshape(shape), scale.reshape(shape)


@dataclass(frozen=True)
class TanhGaussian:
    """Gaussians squashed by tanh and scaled to `[minimum, maximum]`. Parameters: as of `Gaussian`.

    The density is a function of the float32 action alone, so a stored action has the same density in `act` and in
    the loss. Near the bounds float32 cannot tell pre-tanh values apart; there, beyond |tanh| = 0.999, the density is
    constant: the mass of the tail over its width. It integrates to 1, and its gradient never vanishes or explodes.
    """

    shape: tuple[int, ...]
    dtype: Any
    minimum: np.ndarray  # float32 [*shape]
    maximum: np.ndarray  # float32 [*shape]

    @property
    def base(self) -> Gaussian:
        """The Gaussian before squashing."""
        return Gaussian(self.shape, jnp.float32)

    @property
    def num_parameters(self) -> int:
        """A mean and a scale for each element."""
        return self.base.num_parameters

    def sample(self, parameters: Float[Array, "P"], key: Key[Array, ""]) -> Array:
        """Squashes a sample of the Gaussian."""
        return self._squash(self.base.sample(parameters, key))

    def mode(self, parameters: Float[Array, "*B P"]) -> Array:
        """The squashed mean."""
        return self._squash(self.base.mode(parameters))

    def log_prob(self, parameters: Float[Array, "*B P"], action: Shaped[Array, "..."]) -> Float[Array, "*B"]:
        """Log-density with respect to the scaled action, summed over the elements."""
        mean, scale = self.base.mean_and_scale(parameters)
        low, high = self._bounds(mean.ndim)
        half_width = (high - low) / 2
        squashed = (action.astype(mean.dtype) - (low + high) / 2) / half_width
        inside = jnp.abs(squashed) < _THRESHOLD
        pre_tanh = jnp.arctanh(jnp.where(inside, squashed, 0.0))
        edge = math.atanh(_THRESHOLD)
        log_density = jax.scipy.stats.norm.logpdf(pre_tanh, mean, scale) - _log_det_tanh(pre_tanh)
        log_tail = jax.scipy.stats.norm.logcdf((jnp.sign(squashed) * mean - edge) / scale) - math.log(1 - _THRESHOLD)
        return _sum_event(jnp.where(inside, log_density, log_tail) - jnp.log(half_width), self.shape)

    def entropy(self, parameters: Float[Array, "*B P"]) -> Float[Array, "*B"]:
        """Entropy of the Gaussian plus the mean log-derivative of the squashing, by 8-point Gauss-Hermite.

        The log-derivative at the mean alone would let the bonus widen the Gaussian for ever.
        """
        mean, scale = self.base.mean_and_scale(parameters)
        low, high = self._bounds(mean.ndim)
        log_det = sum(
            weight / math.sqrt(2 * math.pi) * _log_det_tanh(mean + node * scale)
            for node, weight in zip(_NODES, _WEIGHTS, strict=True)
        )
        return self.base.entropy(parameters) + _sum_event(log_det + jnp.log((high - low) / 2), self.shape)

    def _squash(self, pre_tanh: Array) -> Array:
        low, high = self._bounds(pre_tanh.ndim)
        action = (low + high) / 2 + (high - low) / 2 * jnp.tanh(pre_tanh)
        return jnp.clip(action, low, high).astype(self.dtype)  # against rounding

    def _bounds(self, ndim: int) -> tuple[np.ndarray, np.ndarray]:
        """Minimum and maximum with leading axes of size 1 up to `ndim`."""
        leading = (1,) * (ndim - len(self.shape))
        return self.minimum.reshape(leading + self.shape), self.maximum.reshape(leading + self.shape)


Distribution = Categorical | Gaussian | TanhGaussian


@dataclass(frozen=True)
class ActionDistribution:
    """Independent distributions over the leaves of an action tree; the parameters of the leaves are concatenated."""

    leaves: Sequence[Distribution]
    treedef: Any

    @property
    def num_parameters(self) -> int:
        """P: how many parameters the policy head gives."""
        return sum(leaf.num_parameters for leaf in self.leaves)

    def sample(self, parameters: Float[Array, "B P"], keys: Key[Array, "B"]) -> PyTree:
        """An action tree, `[B, ...]` leaves, from one key a row."""
        parts = self._split(parameters)
        if len(parts) == 1:
            return self.treedef.unflatten([jax.vmap(self.leaves[0].sample)(parameters, keys)])
        keys = jax.vmap(lambda key: jax.random.split(key, len(parts)))(keys)
        actions = [jax.vmap(leaf.sample)(parts[i], keys[:, i]) for i, leaf in enumerate(self.leaves)]
        return self.treedef.unflatten(actions)

    def mode(self, parameters: Float[Array, "*B P"]) -> PyTree:
        """The greedy action tree, `[*B, ...]` leaves."""
        parts = self._split(parameters)
        return self.treedef.unflatten([leaf.mode(p) for leaf, p in zip(self.leaves, parts, strict=True)])

    def log_prob(self, parameters: Float[Array, "*B P"], action: PyTree) -> Float[Array, "*B"]:
        """Joint log-probability (log-density for continuous leaves) of an action tree with `[*B, ...]` leaves."""
        rows = zip(self.leaves, self._split(parameters), self.treedef.flatten_up_to(action), strict=True)
        return _sum([leaf.log_prob(p, jnp.asarray(a)) for leaf, p, a in rows])

    def entropy(self, parameters: Float[Array, "*B P"]) -> Float[Array, "*B"]:
        """Joint entropy, nats."""
        return _sum([leaf.entropy(p) for leaf, p in zip(self.leaves, self._split(parameters), strict=True)])

    def _split(self, parameters: Array) -> list[Array]:
        ends = np.cumsum([leaf.num_parameters for leaf in self.leaves])[:-1]
        return jnp.split(parameters, ends.tolist(), axis=-1)


def distribution_for(action_spec: PyTree) -> ActionDistribution:
    """The distribution over a tree of `ArraySpec`.

    A leaf with `num_values` is categorical (an action component with sizes of its own is a leaf of its own), a bounded
    one a squashed Gaussian and an unbounded one a Gaussian. Integer actions come out as int32 where the spec says
    int64: that is JAX's widest without x64.

    Raises:
        ConfigError: the tree is empty, or a leaf is neither discrete, nor bounded on both sides, nor unbounded.
    """
    leaves, treedef = jax.tree.flatten(action_spec)
    if not leaves:
        raise ConfigError(f"action spec {action_spec!r} has no leaves; it must hold at least one ArraySpec.")
    return ActionDistribution(tuple(_leaf_distribution(leaf) for leaf in leaves), treedef)


def _leaf_distribution(spec: ArraySpec) -> Distribution:
    dtype = jax.dtypes.canonicalize_dtype(spec.dtype)
    if spec.num_values is not None:
        return Categorical(spec.shape, spec.num_values, dtype)
    if not jnp.issubdtype(dtype, jnp.floating):
        raise ConfigError(f"action {spec} is an integer without num_values; give it num_values, or a float dtype.")
    low = np.broadcast_to(np.asarray(-np.inf if spec.minimum is None else spec.minimum, np.float32), spec.shape)
    high = np.broadcast_to(np.asarray(np.inf if spec.maximum is None else spec.maximum, np.float32), spec.shape)
    if np.isinf(low).all() and np.isinf(high).all():
        return Gaussian(spec.shape, dtype)
    if not (np.isfinite(low).all() and np.isfinite(high).all() and (low < high).all()):
        raise ConfigError(
            f"action {spec} must have finite bounds, minimum < maximum, for every element, or none at all; "
            "split it into leaves, or clip inside the environment."
        )
    return TanhGaussian(spec.shape, dtype, low, high)


def _log_det_tanh(x: Array) -> Array:
    """log(1 - tanh(x)^2), exact for large |x| too."""
    return 2 * (math.log(2) - x - jax.nn.softplus(-2 * x))


def _sum_event(x: Array, shape: tuple[int, ...]) -> Array:
    return jnp.sum(x, axis=tuple(range(x.ndim - len(shape), x.ndim)))


def _sum(terms: list[Array]) -> Array:
    return sum(terms[1:], start=terms[0])

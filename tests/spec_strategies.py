"""Hypothesis strategies for environment specs and for rows that fit them."""

import numpy as np
import optree
from hypothesis import strategies as st

from seedx.types import ArraySpec, EnvSpec, StepType, TimeStep

DTYPES = ["float32", "float16", "float64", "int8", "int32", "int64", "uint8", "uint32", "bool"]
_shapes = st.lists(st.integers(0, 3), max_size=3).map(tuple)
_bounds = st.none() | st.floats(-9, 9) | st.lists(st.floats(-9, 9), min_size=1, max_size=3).map(tuple)
_leaves = st.one_of(
    st.tuples(st.just("leaf"), _shapes, st.sampled_from(DTYPES), st.none(), _bounds, _bounds),
    st.tuples(st.just("leaf"), _shapes, st.sampled_from(["int32", "uint8"]), st.integers(1, 9)),
)
_names = st.text(st.characters(exclude_categories=["Cs"]), max_size=4)
_trees = st.recursive(
    _leaves,
    lambda child: st.dictionaries(_names, child, max_size=3) | st.lists(child, max_size=3).map(tuple),
    max_leaves=5,
)
# Plain data, for `build`: the type checks of seedx draw random numbers, which strategies must not.
raw_specs = st.tuples(_names, _trees, _trees, st.integers(1, 8))


def build(raw):
    """The `EnvSpec` of an example of `raw_specs`."""
    env, observation, action, frame_skip = raw
    return EnvSpec(env, _tree(observation), _tree(action), frame_skip)


def _tree(raw):
    if isinstance(raw, dict):
        return {key: _tree(child) for key, child in raw.items()}
    return ArraySpec(*raw[1:]) if raw[:1] == ("leaf",) else tuple(map(_tree, raw))


def values(spec, num_envs, rng):
    """Random finite leaves `[N, ...]` of a tree of specs."""

    def draw(leaf):
        size = (num_envs, *leaf.shape)
        if leaf.dtype.startswith("float"):
            return rng.normal(size=size).astype(leaf.dtype)
        return rng.integers(0, 2 if leaf.dtype == "bool" else leaf.num_values or 100, size).astype(leaf.dtype)

    return optree.tree_map(draw, spec)


def timestep(spec, num_envs, rng):
    """Random sound FIRST rows `[N]`."""
    return TimeStep(
        np.full(num_envs, StepType.FIRST, np.uint8),
        rng.normal(size=num_envs).astype(np.float32),
        rng.integers(0, 2, num_envs).astype(np.float32),
        values(spec.observation, num_envs, rng),
    )

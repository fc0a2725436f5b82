"""From any layout of a transformer's parameters to any other, and back to the host: every bit stays."""

import jax
import numpy as np
from bits import assert_bit_equal
from decode_harness import CONFIG
from hypothesis import given, settings
from hypothesis import strategies as st

from seedx import sharding
from seedx.llm_setup import layout_of
from seedx.networks import transformer

SIZES = [(d, f, t) for d in (1, 2, 4, 8) for f in (1, 2, 4, 8) for t in (1, 2) if d * f * t <= 8]
LAYOUTS = st.tuples(st.sampled_from(SIZES), st.sampled_from([1, 3]))  # ZeRO-2's is that of ZeRO-1


def layout(drawn):
    (data, fsdp, tensor), zero = drawn
    return layout_of(CONFIG, sharding.serve_mesh(data=data, fsdp=fsdp, tensor=tensor), zero)


def any_bits(seed):
    """Parameters of random bits, NaNs and negative zeros among them."""
    rng = np.random.default_rng(seed)
    shapes = transformer.abstract_params(CONFIG)
    return jax.tree.map(lambda leaf: rng.integers(0, 2**32, leaf.shape, np.uint32).view(np.float32), shapes)


@settings(max_examples=15)
@given(LAYOUTS, LAYOUTS, st.integers(0, 100))
def test_any_layout_becomes_any_other_bit_for_bit(first, second, seed):
    params, target = any_bits(seed), layout(second)
    placed = jax.device_put(params, layout(first))
    moved = sharding.reshard(placed, target)
    assert sharding.layout_of(moved) == target
    bits = [jax.tree.map(lambda leaf: np.asarray(leaf).view(np.uint32), tree) for tree in (moved, params)]
    assert_bit_equal(*bits)
    assert sharding.reshard(moved, target) is moved

"""Trees of arrays that must be equal bit for bit."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np


def assert_bit_equal(left: Any, right: Any) -> None:
    """Equal structures, dtypes, shapes and bits; says which leaf differs and where, which no diff of bytes does."""
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(left), jax.tree.leaves(right), strict=True):
        name, a, b = jax.tree_util.keystr(path), np.asarray(a), np.asarray(b)
        assert (a.dtype, a.shape) == (b.dtype, b.shape), name
        unequal = np.flatnonzero(_bytes(a) != _bytes(b)) // max(a.dtype.itemsize, 1)
        assert not unequal.size, f"{name}: {np.unique(unequal).size} of {a.size} differ, the first at {unequal[0]}"


def _bytes(array: np.ndarray) -> np.ndarray:
    return np.frombuffer(np.ascontiguousarray(array).tobytes(), np.uint8)

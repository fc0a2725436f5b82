"""Building blocks of `EnvSpec`, shared by the adapters: narrow dtypes, bounds and categorical leaves."""

from __future__ import annotations

from typing import Any

import numpy as np

from seedx.types import ArraySpec, Tree

_NARROW = {"float64": "float32", "float16": "float32", "int64": "int32", "uint64": "uint32"}
_LARGEST = float(np.finfo(np.float32).max)


def narrow(dtype: Any) -> str:
    """The dtype name that crosses the wire: 64-bit types become 32-bit ones, which is what accelerators compute in."""
    name = np.dtype(dtype).name
    return _NARROW.get(name, name)


def bounded(shape: tuple[int, ...], dtype: Any, low: Any, high: Any) -> ArraySpec:
    """A leaf that is not categorical; `low` and `high` are scalars or arrays of `shape`, infinite where unbounded."""
    return ArraySpec(shape, narrow(dtype), minimum=_bound(low, shape, np.min), maximum=_bound(high, shape, np.max))


def _bound(bound: Any, shape: tuple[int, ...], loosest: Any) -> tuple[float, ...] | float | None:
    values = np.asarray(bound, np.float64)
    if values.size == 0 or (np.abs(values) >= _LARGEST).all():
        return None
    if len(shape) == 1 and values.shape == shape and (values != values[0]).any():
        return tuple(values.tolist())
    return float(loosest(values))


def categorical(num_values: Any, dtype: Any) -> Tree:
    """The leaf or leaves of integers `0 .. num_values-1`; `num_values` is a scalar or an array.

    Elements that all have the same number of values make one leaf of their shape; others a tuple of scalar leaves,
    in C order.
    """
    counts = np.asarray(num_values)
    if (counts == counts.flat[0]).all():
        return ArraySpec(counts.shape, narrow(dtype), num_values=int(counts.flat[0]))
    return tuple(ArraySpec((), narrow(dtype), num_values=int(n)) for n in counts.flat)

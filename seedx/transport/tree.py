"""Trees of weights as lists of named tensors."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import ml_dtypes
import numpy as np

from seedx.types import Tree

Path = tuple[str, ...]

_INTS = ("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
_FLOATS = ("float16", "float32", "float64")
_OTHERS = ("bfloat16", "float8_e4m3fn", "float8_e5m2", "int4", "uint4")
DTYPES = {name: np.dtype(name) for name in _INTS + _FLOATS}
DTYPES |= {name: np.dtype(getattr(ml_dtypes, name)) for name in _OTHERS}


def name_of(path: Path) -> str:
    """For messages, for example "layers/0/kernel"."""
    return "/".join(path)


def flatten(tree: Tree) -> list[tuple[Path, Any]]:
    """The leaves of nested dicts with their paths, in the order of sorted keys.

    Raises:
        ValueError: the tree is no such thing, or a leaf no array of a dtype that travels; the message names it.
    """
    found: list[tuple[Path, Any]] = []
    _flatten(tree, (), found)
    return found


def _flatten(node: Tree, path: Path, found: list[tuple[Path, Any]]) -> None:
    here = name_of(path) or "the tree"
    if type(node) is dict:
        if not node or not all(isinstance(key, str) for key in node):
            raise ValueError(f"{here} has the keys {[*node]}; a dict of weights needs one, and all must be strings.")
        for key in sorted(node):
            _flatten(node[key], (*path, key), found)
        return
    dtype = getattr(node, "dtype", None)
    if dtype is None or not hasattr(node, "shape"):
        raise ValueError(f"{here} is a {type(node).__name__}; weights are nested dicts of arrays.")
    if DTYPES.get(str(dtype)) != dtype:
        raise ValueError(f"{here} has dtype {dtype}; {', '.join(DTYPES)} can be published.")
    if not getattr(node, "is_fully_addressable", True):
        raise ValueError(f"{here} lies on other hosts too; gather it first, so that this host has all of it.")
    found.append((path, node))


def unflatten(leaves: Iterable[tuple[Path, Any]]) -> Tree:
    """The tree of `flatten`."""
    root: dict[str, Any] = {}
    for path, leaf in leaves:
        if not path:
            return leaf
        node = root
        for key in path[:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = leaf
    return root


def bytes_of(array: np.ndarray) -> np.ndarray:
    """The bytes of an array in C order, uint8 `[n]`; a view."""
    return array.reshape(-1).view(np.uint8)

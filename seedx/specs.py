"""Environment specs as JSON, and what differs between two of them."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import numpy as np
import optree

from seedx.types import ArraySpec, EnvSpec, Tree

_MAX_AXES = 16
_MAX_LEAF_BYTES = 2**28  # of one environment


def to_json(spec: EnvSpec) -> str:
    """The spec as JSON text; trees may hold dicts with string keys, tuples and lists.

    Raises:
        TypeError: a tree holds something else, whose leaves could come back in another order.
    """
    return json.dumps(
        {
            "env": spec.env,
            "frame_skip": spec.frame_skip,
            "observation": _encode(spec.observation),
            "action": _encode(spec.action),
        }
    )


def from_json(text: str) -> EnvSpec:
    """The spec of `to_json`.

    Raises:
        ValueError: the text is not such a spec.
    """
    try:
        raw = json.loads(text)
        if not isinstance(raw["env"], str):
            raise ValueError(f"env is {raw['env']!r}; it must be a string")
        frame_skip = _size(raw["frame_skip"], at_least=1)
        return EnvSpec(raw["env"], _decode(raw["observation"]), _decode(raw["action"]), frame_skip)
    except (KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        raise ValueError(f"not an environment spec: {type(error).__name__} {error}") from error


def leaves(tree: Tree) -> list[tuple[str, ArraySpec]]:
    """`(path, spec)` of every leaf, in the order in which leaves travel; the path of a lone leaf is ""."""
    paths, specs, _ = optree.tree_flatten_with_path(tree)
    return [("/".join(map(str, path)), spec) for path, spec in zip(paths, specs, strict=True)]


def differences(expected: EnvSpec, actual: EnvSpec) -> list[str]:
    """A line for each difference that matters to a server made for `expected`; empty if there is none."""
    found = []
    for name in ("env", "frame_skip"):
        if getattr(expected, name) != getattr(actual, name):
            found.append(f"{name} is {getattr(actual, name)!r}, the server expects {getattr(expected, name)!r}")
    for name in ("observation", "action"):
        want, got = dict(leaves(getattr(expected, name))), dict(leaves(getattr(actual, name)))
        for path in sorted(want.keys() | got.keys()):
            if want.get(path) != got.get(path):
                label = f"{name}/{path}".rstrip("/")
                found.append(f"{label} is {_show(got.get(path))}, the server expects {_show(want.get(path))}")
    return found


def _show(spec: ArraySpec | None) -> str:
    if spec is None:
        return "absent"
    kind = f"{spec.dtype}{list(spec.shape)}"
    if spec.num_values is not None:
        return f"{kind} of {spec.num_values} values"
    if spec.minimum is not None or spec.maximum is not None:
        return f"{kind} in [{spec.minimum}, {spec.maximum}]"
    return kind


def _encode(tree: Tree) -> Any:
    if isinstance(tree, ArraySpec):
        return {"leaf": dataclasses.asdict(tree)}
    # Not subclasses: an OrderedDict's leaves travel in another order than a dict's.
    if type(tree) is dict and all(isinstance(key, str) for key in tree):
        return {"dict": {key: _encode(value) for key, value in tree.items()}}
    if isinstance(tree, (tuple, list)):
        return {"tuple": [_encode(value) for value in tree]}
    raise TypeError(
        f"a spec tree holds {type(tree).__name__} {tree!r}; allowed are dicts with string keys, tuples, lists and "
        "ArraySpec."
    )


def _decode(raw: Any) -> Tree:
    (kind, value), *more = raw.items()
    if more:
        raise ValueError(f"a spec node has {len(more) + 1} kinds, must have one")
    if kind == "dict":
        return {key: _decode(child) for key, child in value.items()}
    if kind == "tuple":
        return tuple(_decode(child) for child in value)
    if kind != "leaf":
        raise ValueError(f"a spec node is {kind!r}; allowed are 'leaf', 'dict' and 'tuple'")
    shape = tuple(_size(n) for n in value["shape"])
    dtype = np.dtype(value["dtype"]) if isinstance(value["dtype"], str) else None
    if dtype is None or dtype.kind not in "biuf":
        raise ValueError(f"a dtype is {value['dtype']!r}; it must name booleans, integers or real numbers")
    if len(shape) > _MAX_AXES or math.prod(shape) * dtype.itemsize > _MAX_LEAF_BYTES:
        raise ValueError(f"a shape is {list(shape)}; allowed are {_MAX_AXES} axes and {_MAX_LEAF_BYTES} bytes")
    return ArraySpec(
        shape=shape,
        dtype=dtype.name,
        num_values=None if value["num_values"] is None else _size(value["num_values"], at_least=1),
        minimum=_bound(value["minimum"]),
        maximum=_bound(value["maximum"]),
    )


def _size(value: Any, at_least: int = 0) -> int:
    if type(value) is not int or not at_least <= value <= _MAX_LEAF_BYTES:
        raise ValueError(f"a size is {value!r}; it must be an integer, {at_least} to {_MAX_LEAF_BYTES}")
    return value


def _bound(value: Any) -> tuple[float, ...] | float | None:
    if isinstance(value, list):
        return tuple(_number(x) for x in value)
    return None if value is None else _number(value)


def _number(value: Any) -> float:
    if type(value) not in (int, float) or value != value:
        raise ValueError(f"a bound is {value!r}; it must be a number, a list of numbers or null")
    return float(value)

"""Bytes that each device sends, counted in the text of a compiled program (`compiled.as_text()`).

Of each operation between devices it counts what a ring of n devices sends, for each device: 2 (n - 1) / n of the array
for an all-reduce, (n - 1) / n of the whole array for an all-gather, a reduce-scatter and an all-to-all, all of it for a
collective-permute. What is in a loop counts as often as it turns, which the compiler writes beside it; of branches the
one counts that sends most.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

OPERATIONS = ("all-reduce", "reduce-scatter", "all-gather", "all-to-all", "collective-permute")

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{$")
_OPCODE = re.compile(r"\s*([a-z][a-z\-]*)\(([^)]*)\)")
_ARRAY = re.compile(r"\b(pred|[a-z]+\d\w*)\[([\d,]*)\]")
_CALLED = re.compile(r"(?:calls|to_apply|body|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_TURNS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_LISTED = re.compile(r"replica_groups=(?:\{\{([\d,]+)\}|\[\d+,(\d+)\])")
_NAMED = re.compile(r"replica_groups=mesh\[([^\]]*)\][^{]*\{([^}]*)\}")


class Sent(NamedTuple):
    """What one device sends."""

    bytes: float
    operations: int


def sent(text: str, devices: int) -> dict[str, Sent]:
    """Of each operation that there is.

    Args:
        text: Of a compiled program.
        devices: That compute it; all take part in an operation that does not say which.

    Raises:
        ValueError: there is one in a loop of which the compiler does not say how often it turns.
    """
    computations, first = _computations(text)
    known: dict[str, Counter[str]] = {}

    def total(name: str) -> Counter[str]:
        if name not in known:
            known[name] = Counter()
            for line in computations[name]:
                known[name].update(_sent_by(line, name, devices, total))
        return known[name]

    counts = total(first)
    return {name: Sent(counts[f"{name} bytes"], int(counts[name])) for name in OPERATIONS if counts[name]}


def ring_bytes(operation: str, array_bytes: float, devices: int) -> float:
    """What each of n devices sends for an operation on an array: what an all-gather gives, a reduce-scatter takes."""
    if operation == "collective-permute":
        return array_bytes
    return (2 if operation == "all-reduce" else 1) * (devices - 1) / devices * array_bytes


def _computations(text: str) -> tuple[dict[str, list[str]], str]:
    """The instructions of each computation, and the name of the one that runs first."""
    found: dict[str, list[str]] = {}
    first, lines = "", []
    for line in text.splitlines():
        if begun := _COMPUTATION.match(line):
            lines = found[begun[2]] = []
            first = begun[2] if begun[1] else first
        elif " = " in line:
            lines.append(line)
    return found, first


def _sent_by(line: str, inside: str, devices: int, total: Callable[[str], Counter[str]]) -> Counter[str]:
    """What an instruction sends, with all that it calls, by operation: how many, and bytes."""
    shape, rest = _after_shape(line.partition(" = ")[2])
    opcode = _OPCODE.match(rest)
    if opcode is None:
        return Counter()
    name = opcode[1].removesuffix("-start")
    if name in OPERATIONS:
        size = _group_size(rest, devices)
        array_bytes = _bytes(shape, opcode[2].count("%") if name != opcode[1] != "all-reduce-start" else 0)
        if name == "reduce-scatter":
            array_bytes *= size
        if inside.startswith("all-reduce-scatter"):  # how TPUs fuse a sum with taking a part of it
            name = "reduce-scatter"
        return Counter({name: 1, f"{name} bytes": ring_bytes(name, array_bytes, size)}) if size > 1 else Counter()
    match name:
        case "while":
            body, turns = total(_CALLED.findall(rest)[0]), _TURNS.search(rest)
            if body and turns is None:
                raise ValueError(f"how often does this loop turn, which sends {dict(body)}? {line.strip()[:200]}")
            return Counter({key: value * int(turns[1]) for key, value in body.items()} if turns else {})
        case "conditional":
            branches = _BRANCHES.search(rest)
            names = re.findall(r"[\w.\-]+", branches[1]) if branches else _CALLED.findall(rest)
            return max(map(total, names), key=lambda counts: sum(counts.values()))
        case "fusion" | "call" | "async":
            return total(_CALLED.findall(rest)[0])
    return Counter()


def _group_size(instruction: str, devices: int) -> int:
    """How many devices take part together."""
    if listed := _LISTED.search(instruction):
        return int(listed[2] or len(listed[1].split(",")))
    if named := _NAMED.search(instruction):  # by axes of a mesh, or parts of them
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", named[1]))
        axes = re.findall(r"'(\w+)'(?::\(\d+\)(\d+))?", named[2])
        return math.prod(int(part or sizes[axis]) for axis, part in axes)
    return devices


def _after_shape(instruction: str) -> tuple[str, str]:
    """The shape of what an instruction gives, which has brackets too, and what comes after it."""
    depth = 0
    for i, letter in enumerate(instruction):
        depth += (letter in "({[") - (letter in ")}]")
        if depth == 0 and letter == " ":
            return instruction[:i], instruction[i:]
    return instruction, ""


def _bytes(shape: str, operands: int) -> float:
    """Of all arrays of a shape; that of an operation that is only begun names its operands before as many results."""
    arrays = [math.prod(map(int, filter(None, size.split(",")))) * _width(kind) for kind, size in _ARRAY.findall(shape)]
    return sum(arrays[operands : 2 * operands] if operands else arrays)


def _width(kind: str) -> float:
    return 1 if kind == "pred" else int(re.findall(r"\d+", kind)[0]) / 8

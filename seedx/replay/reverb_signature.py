"""The signature of a Reverb table: what whoever made it says of its items. Servers check none; clients do.

It is read as Reverb's TrajectoryWriter reads it: a nest of specs, in the order of columns, rows included.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from seedx.replay import reverb_pb2 as pb
from seedx.replay.reverb_layout import DTYPE_NUMBERS, Column, Layout

_NAMES = {number: str(dtype) for dtype, number in DTYPE_NUMBERS.items()}
_FIELD = re.compile(r"[^.\[\]']+")  # of a column's name, ".timestep['frame']"


class _UnknownKindError(Exception):
    """The signature says something that is not read here."""


class _Spec(NamedTuple):
    path: tuple[str, ...]  # names in dicts and named tuples, "" in lists and tuples
    tensor: pb.TensorSpec

    def __str__(self) -> str:
        shape = self.tensor.shape
        sizes = "..." if shape.unknown_rank else ", ".join("?" if dim.size < 0 else str(dim.size) for dim in shape.dim)
        name = ".".join(self.path)
        dtype = _NAMES.get(self.tensor.dtype, f"dtype {self.tensor.dtype}")
        return f"{name} {dtype}[{sizes}]".strip()

    def admits(self, column: Column) -> bool:
        """Whether a column is like this; unknown sizes are like any."""
        shape, names = self.tensor.shape, _FIELD.findall(column.name)
        same_names = all(not a or a == b for a, b in zip(reversed(self.path), reversed(names), strict=False))
        same_shape = shape.unknown_rank or (
            len(shape.dim) == len(column.shape)
            and all(dim.size < 0 or n in (None, dim.size) for dim, n in zip(shape.dim, column.shape, strict=True))
        )
        return same_names and same_shape and self.tensor.dtype == DTYPE_NUMBERS[column.dtype]


def check_signature(table: pb.TableInfo, layout: Layout, address: str) -> None:
    """Compares items with a table's signature, if it has one of a kind that is known here.

    Args:
        table: As its server describes it.
        layout: Of the items.
        address: The server's, for the message.

    Raises:
        ValueError: they differ in their number of columns, or in a name, dtype or shape.
    """
    if not table.HasField("signature"):
        return
    try:
        specs = list(_flatten(table.signature))
    except _UnknownKindError:
        return
    pairs = zip(specs, layout.columns, strict=False)
    found = [f"{column.name} {column} instead of {spec}" for spec, column in pairs if not spec.admits(column)]
    if len(specs) != len(layout.columns):
        found.append(f"{len(layout.columns)} columns instead of {len(specs)}")
    if found:
        raise ValueError(
            f"the signature of table {table.name!r} at {address} admits other items than this run's, which have "
            f"{'; '.join(found)}. Use a table for such items, or one without a signature."
        )


def _flatten(value: pb.StructuredValue, path: tuple[str, ...] = ()) -> Iterator[_Spec]:
    kind = value.WhichOneof("kind")
    match kind:
        case "tensor_spec_value" | "bounded_tensor_spec_value":
            yield _Spec(path, getattr(value, kind))
            return
        case "none_value":
            return
        case "list_value" | "tuple_value":
            fields = [("", each) for each in getattr(value, kind).values]
        case "dict_value":
            fields = sorted(value.dict_value.fields.items())
        case "named_tuple_value":
            fields = [(pair.key, pair.value) for pair in value.named_tuple_value.values]
        case _:
            raise _UnknownKindError
    for name, each in fields:
        yield from _flatten(each, (*path, name))

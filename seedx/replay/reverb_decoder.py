"""Puts samples together that come in messages, and turns them into items."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from seedx.replay import reverb_pb2 as pb
from seedx.replay.items import Ragged
from seedx.replay.reverb_codec import ReverbDataError, count_rows, read_item
from seedx.replay.reverb_layout import Layout
from seedx.types import Tree


class Received(NamedTuple):
    """A sample as it came."""

    info: pb.SampleInfo
    chunks: dict[int, pb.ChunkData]


def complete_samples(responses: Iterable[pb.SampleStreamResponse]) -> Iterator[Received]:
    """Puts samples together, which come in one or more entries, these in one or more messages.

    Raises:
        ReverbDataError: a sample came without saying which item it is.
    """
    info, chunks = None, {}
    for response in responses:
        for entry in response.entries:
            if entry.HasField("info"):
                info, chunks = entry.info, {}
            chunks.update((chunk.chunk_key, chunk) for chunk in entry.data)
            if entry.end_of_sequence:
                if info is None:
                    raise ReverbDataError("a sample came without its item.")
                yield Received(info, chunks)
                info = None


def decode(samples: Sequence[Received], layout: Layout, table: str) -> Tree:
    """The items of samples, leaves `[N, ...]`, or ragged.

    Raises:
        ReverbDataError: an item is damaged, or not of this layout.
    """

    def of_each(function: Callable[..., Any], *more: Sequence[Any]) -> list[Any]:
        results = []
        for sample, *each in zip(samples, *more, strict=True):
            item = sample.info.item
            try:
                results.append(function(item.flat_trajectory, sample.chunks, layout, *each))
            except ReverbDataError as error:
                raise ReverbDataError(f"item {item.key} of table {table!r}: {error}") from None
        return results

    lengths = of_each(count_rows)
    bounds = [0, *itertools.accumulate(lengths)]
    leaves = [
        np.empty((len(samples) if column.squeeze else bounds[-1], *column.row_shape), column.dtype)
        for column in layout.columns
    ]
    squeezed = [column.squeeze for column in layout.columns]
    places = [
        [leaf[n : n + 1] if one else leaf[start:stop] for leaf, one in zip(leaves, squeezed, strict=True)]
        for n, (start, stop) in enumerate(itertools.pairwise(bounds))
    ]
    of_each(read_item, places)
    if layout.rows is None:
        rows, state = jax.tree.unflatten(layout.structure, leaves)
        return Ragged(rows, np.array(lengths, np.int64), state)
    shaped = [leaf.reshape(len(samples), *c.shape) for leaf, c in zip(leaves, layout.columns, strict=True)]
    return jax.tree.unflatten(layout.structure, shaped)

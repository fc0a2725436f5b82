"""Packs sequences of different lengths into rows of one length, and rows into microbatches of one shape. NumPy.

Sequences that begin with the same prompt lie in a row as a *family*: the prompt once, then what follows it in each.

Letters: N sequences, P prompts, each of N / P sequences in a row; R rows, L tokens of a row.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from seedx.types import Tree


class Packing(NamedTuple):
    """Where each sequence lies: its prompt, which may be that of others too, and what follows it."""

    lengths: np.ndarray  # int64 [N], the prompt included
    prompts: np.ndarray  # int64 [N], tokens of the prompt
    rows: np.ndarray  # int64 [N]
    prompt_starts: np.ndarray  # int64 [N], in their rows
    starts: np.ndarray  # int64 [N], of what follows the prompt
    num_rows: int  # R, those that fill up the last microbatch included
    row_tokens: int  # L

    def of_tokens(self, values: np.ndarray) -> np.ndarray:
        """Values `[N]` of sequences as those of their tokens, one sequence after the other; `[sum(lengths)]`."""
        return np.repeat(values, self.lengths)

    @property
    def positions(self) -> np.ndarray:
        """Of each token in its sequence; int64 `[sum(lengths)]`."""
        return np.arange(self.lengths.sum()) - self.of_tokens(np.cumsum(self.lengths) - self.lengths)

    @property
    def in_prompt(self) -> np.ndarray:
        """Of each token; bool `[sum(lengths)]`."""
        return self.positions < self.of_tokens(self.prompts)

    @property
    def columns(self) -> np.ndarray:
        """Of each token its place in its row; int64 `[sum(lengths)]`. A family has its prompt's in common."""
        after = self.of_tokens(self.starts - self.prompts)
        return self.positions + np.where(self.in_prompt, self.of_tokens(self.prompt_starts), after)

    @property
    def places(self) -> np.ndarray:
        """Of each token its place in `[R * L]`; int64 `[sum(lengths)]`."""
        return self.of_tokens(self.rows * self.row_tokens) + self.columns


def pack(lengths: np.ndarray, row_tokens: int, rows_multiple: int = 1, *, prompts: np.ndarray | None = None) -> Packing:
    """First fit, longest first: each family goes to the first row with room for it.

    All sequences of a prompt are a family, or several, each of as many as fit into a row.

    Args:
        lengths: int `[N]`, tokens of each sequence, at least one.
        row_tokens: L.
        rows_multiple: What R is a multiple of: the rows of a microbatch.
        prompts: int `[P]`, tokens that a prompt's sequences begin with; None: each sequence is a family.

    Raises:
        ValueError: a sequence is longer than a row, or empty.
    """
    lengths = np.asarray(lengths, np.int64)
    if len(lengths) == 0 or lengths.min() < 1 or lengths.max() > row_tokens:
        raise ValueError(f"lengths ({lengths}) must be at least one, each from 1 to row_tokens ({row_tokens}).")
    prompts = np.zeros_like(lengths) if prompts is None else np.asarray(prompts, np.int64)
    per_prompt = len(lengths) // len(prompts)
    prompts = np.repeat(prompts, per_prompt)
    families, offsets, sizes = np.empty_like(lengths), np.empty_like(lengths), []
    for i, own in enumerate(lengths - prompts):
        if i % per_prompt == 0 or sizes[-1] + own > row_tokens:
            sizes.append(prompts[i])
        families[i], offsets[i] = len(sizes) - 1, sizes[-1]
        sizes[-1] += own
    rows, starts = _first_fit(np.array(sizes), row_tokens)
    num_rows = -(-(int(rows.max()) + 1) // rows_multiple) * rows_multiple
    starts = starts[families]
    return Packing(lengths, prompts, rows[families], starts, starts + offsets, num_rows, row_tokens)


def _first_fit(sizes: np.ndarray, row_tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Row and start of each family."""
    rows, starts = np.empty_like(sizes), np.empty_like(sizes)
    used = np.zeros_like(sizes)  # of each row
    for i in np.argsort(-sizes, kind="stable"):
        row = int(np.argmax(used + sizes[i] <= row_tokens))
        rows[i], starts[i] = row, used[row]
        used[row] += sizes[i]
    return rows, starts


class Layout(NamedTuple):
    """What attention and the loss must know of where tokens lie; leaves int32 `[R, L]`, 0 in the padding.

    Attributes:
        positions: Of a token in its sequence.
        segments: Which prompt, or what follows one, a token is part of: 1 + the place of its first token in the row.
        parents: The segment of the prompt that goes before a token's segment; without one, its own.
        before: The place in the row of the token before it in its sequence; 0 without one.
    """

    positions: np.ndarray
    segments: np.ndarray
    parents: np.ndarray
    before: np.ndarray


def lay_out(packing: Packing) -> Layout:
    """The layout of packed rows."""
    positions, in_prompt = packing.positions, packing.in_prompt
    parents = packing.of_tokens(packing.prompt_starts) + 1
    leaves = (
        positions,
        np.where(in_prompt, parents, packing.of_tokens(packing.starts) + 1),
        parents,
        np.where(positions > 0, np.roll(packing.columns, 1), 0),
    )
    return Layout(*(place(packing, leaf.astype(np.int32)) for leaf in leaves))


def place(packing: Packing, values: np.ndarray) -> np.ndarray:
    """Values of tokens `[sum(lengths)]`, one sequence after the other, as rows `[R, L]`; 0 between.

    Those of a prompt's tokens, which come once for each of its sequences, are to be the same or to mean nothing.
    """
    out = np.zeros(packing.num_rows * packing.row_tokens, values.dtype)
    out[packing.places] = values
    return out.reshape(packing.num_rows, packing.row_tokens)


def microbatches(batch: Tree, rows: int) -> list[Tree]:
    """A batch of NamedTuple leaves `[R, L]` as parts of `rows` rows."""
    return [type(batch)(*(leaf[i : i + rows] for leaf in batch)) for i in range(0, len(batch[0]), rows)]

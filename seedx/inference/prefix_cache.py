"""Keys and values of prompts' first chunks, which many prompts have in common: computed once, kept within a bound."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np

from seedx.networks.transformer import Cache


class PrefixCache:
    """The least recently used blocks go first. A block belongs to one version of the weights.

    A block holds one chunk; its key is all tokens up to its end, so equal chunks after different beginnings never meet.

    Args:
        chunk: Tokens of a block.
        block_bytes: Of a block.
        max_bytes: Of all blocks.
    """

    def __init__(self, chunk: int, block_bytes: int, max_bytes: int) -> None:
        self._chunk = chunk
        self.max_blocks = max_bytes // block_bytes
        self._blocks: OrderedDict[bytes, Cache] = OrderedDict()
        self._version: int | None = None
        self.hits = 0  # blocks that were found

    def __len__(self) -> int:
        return len(self._blocks)

    def find(self, version: int, tokens: np.ndarray) -> list[Cache]:
        """The blocks of the chunks that `tokens` begins with, as far as they are known.

        Args:
            version: Of the weights.
            tokens: int32 `[n]`; only whole chunks are looked for.
        """
        if version != self._version:
            return []
        keys = []
        for end in range(self._chunk, len(tokens) + 1, self._chunk):
            key = tokens[:end].tobytes()
            if key not in self._blocks:
                break
            keys.append(key)
        for key in reversed(keys):  # a block is of no use without those before it, so these are kept longer
            self._blocks.move_to_end(key)
        self.hits += len(keys)
        return [self._blocks[key] for key in keys]

    def add(self, version: int, tokens: np.ndarray, block: Cache) -> None:
        """Keeps the block of the last chunk of `tokens`; the first block of another version drops all others."""
        if self.max_blocks == 0:
            return
        if version != self._version:
            self.clear()
            self._version = version
        self._blocks[tokens.tobytes()] = block
        if len(self._blocks) > self.max_blocks:
            self._blocks.popitem(last=False)

    def clear(self) -> None:
        """Drops all blocks: the weights have changed."""
        self._blocks.clear()
        self._version = None

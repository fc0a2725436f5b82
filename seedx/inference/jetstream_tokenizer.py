"""One of our tokenizers behind JetStream's tokenizer interface."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from seedx.inference.jetstream_shims import token_utils, tokenizer_api
from seedx.tokenizer import Tokenizer


class JetStreamTokenizer(tokenizer_api.Tokenizer):
    """Texts to padded token ids, and one token at a time to its text.

    JetStream joins pieces like "<0xE2>" to characters, so a token of one such byte is written so. A token of several
    bytes that end within a character cannot be: its text has U+FFFD. Clients that want exact text ask for tokens.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def encode(self, s: str, **kwargs: Any) -> tuple[jax.Array | np.ndarray, int]:
        """Padded token ids `[bucket]`, and how many of them are the text's.

        Args:
            s: The text.
            kwargs: `is_bos`, `prefill_lengths`, `max_prefill_length`, `jax_padding`, as in JetStream's `pad_tokens`.
        """
        tokens = self._tokenizer.encode(s, add_bos=kwargs.pop("is_bos", True))
        return token_utils.pad_tokens(np.asarray(tokens, np.int32), self.bos_id, self.pad_id, is_bos=False, **kwargs)

    def decode(self, token_ids: list[int], **kwargs: Any) -> str:  # noqa: ARG002
        """The text of tokens."""
        data = b"".join(self._tokenizer.token_bytes(token) for token in token_ids)
        if len(data) == 1 and data[0] >= 0x80:
            return f"<0x{data[0]:02X}>"
        return self._tokenizer.decode(token_ids)

    @property
    def pad_id(self) -> int:
        """Fills prompts up to their bucket."""
        return self._tokenizer.pad_id

    @property
    def eos_id(self) -> int:
        """The first of the tokens that end a completion; -1 if there is none."""
        return next(iter(self._tokenizer.eos_ids), -1)

    @property
    def bos_id(self) -> int:
        """What JetStream's own driver puts before a list of tokens; the padding where the model has no such token."""
        return self.pad_id if self._tokenizer.bos_id is None else self._tokenizer.bos_id

    @property
    def stop_tokens(self) -> set[int]:
        """The tokens that end a completion; not the padding, which may be a word."""
        return set(self._tokenizer.eos_ids)

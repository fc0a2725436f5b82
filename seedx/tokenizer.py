"""What a tokenizer is, and text out of tokens that come one at a time."""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from typing import Protocol, runtime_checkable


@runtime_checkable
class Tokenizer(Protocol):
    """Text to token ids and back. Every token is a fixed string of bytes; special tokens are none.

    Attributes:
        vocab_size: Ids are below this; a model may have more.
        bos_id: What every prompt begins with; None: nothing.
        eos_ids: Each of these ends a completion.
        pad_id: Fills rows; never read.
    """

    @property
    def vocab_size(self) -> int: ...  # noqa: D102
    @property
    def bos_id(self) -> int | None: ...  # noqa: D102
    @property
    def eos_ids(self) -> tuple[int, ...]: ...  # noqa: D102
    @property
    def pad_id(self) -> int: ...  # noqa: D102

    def encode(self, text: str, add_bos: bool = True, parse_special: bool = False) -> list[int]:
        """Token ids of a text.

        Args:
            text: If it begins with the text of BOS, that is taken for the BOS which `add_bos` adds.
            add_bos: Begin with one BOS, if the model has one.
            parse_special: Whether "<|im_end|>" and the like in the text are those tokens, as in what a chat template
                made; in other texts they are characters like any others.
        """
        ...

    def literal(self, text: str) -> str:
        """The text so written that `encode` finds no special token in it even where it parses them."""
        ...

    def token_bytes(self, token: int) -> bytes:
        """The bytes that a token stands for; none for a special token, or for an id that only the model has."""
        ...

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of tokens, without special ones; bytes that are no UTF-8 become U+FFFD.

        A completion's text continues its prompt's: its first space is kept.
        """
        ...


class TextStream:
    """Text as tokens come: never half a character, and nothing is taken back.

    The texts of `push` and the last one of `flush` joined are what `decode` makes of all tokens.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """What is now final: perhaps nothing, while a character's bytes are incomplete."""
        return self._decoder.decode(self._tokenizer.token_bytes(token))

    def flush(self) -> str:
        """What was held back; no token comes after."""
        return self._decoder.decode(b"", final=True)

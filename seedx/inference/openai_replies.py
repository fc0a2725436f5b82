"""Replies of OpenAI's /v1/completions and /v1/chat/completions, whole and in chunks."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from seedx.tokenizer import Tokenizer

DONE = b"data: [DONE]\n\n"


@dataclass
class Choice:
    """One completion, as far as it has come.

    Attributes:
        text: Without the stop string.
        tokens: With the stop token.
        logprobs: Of the tokens, natural, under the model's distribution at temperature 1.
        finish_reason: "stop" or "length"; None: it goes on.
    """

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str | None = None


class Replies:
    """Makes the replies to one request.

    Args:
        chat: Whether it is a chat's.
        model: The model's name.
        logprobs: Whether tokens and their log-probabilities are shown.
        tokenizer: Gives their texts.
    """

    def __init__(self, *, chat: bool, model: str, logprobs: bool, tokenizer: Tokenizer) -> None:
        self._chat, self._model, self._logprobs, self._tokenizer = chat, model, logprobs, tokenizer
        self._id = f"{'chatcmpl' if chat else 'cmpl'}-{secrets.token_hex(12)}"
        self._created = int(time.time())
        self._opened: set[int] = set()  # choices of a chat whose first chunk has gone
        self._shown: dict[int, int] = {}  # characters of each choice's tokens so far, for their offsets

    def whole(self, choices: Sequence[Choice], prompt_tokens: int) -> dict[str, Any]:
        """The reply of a request that does not stream."""
        shown = [self._whole_choice(index, choice) for index, choice in enumerate(choices)]
        usage = usage_of(prompt_tokens, sum(len(choice.tokens) for choice in choices))
        return {**self._head("chat.completion" if self._chat else "text_completion"), "choices": shown, "usage": usage}

    def chunk(self, index: int, part: Choice) -> bytes:
        """An event with what came of one choice since its last one."""
        shown: dict[str, Any] = {"index": index, "logprobs": self._logprobs_of(index, part)}
        if self._chat:
            first = {} if index in self._opened else {"role": "assistant"}
            self._opened.add(index)
            shown["delta"] = {**first, "content": part.text} if part.text or first else {}
        else:
            shown["text"] = part.text
        return self._event([{**shown, "finish_reason": part.finish_reason}])

    def usage_chunk(self, prompt_tokens: int, completion_tokens: int) -> bytes:
        """The event that ends a stream which was asked to say how many tokens there were."""
        return self._event([], usage=usage_of(prompt_tokens, completion_tokens))

    def _event(self, choices: list, **more: Any) -> bytes:
        head = self._head("chat.completion.chunk" if self._chat else "text_completion")
        return event({**head, "choices": choices, **more})

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self._id, "object": kind, "created": self._created, "model": self._model}

    def _whole_choice(self, index: int, choice: Choice) -> dict[str, Any]:
        shown: dict[str, Any] = {"index": index, "logprobs": self._logprobs_of(index, choice)}
        if self._chat:
            shown["message"] = {"role": "assistant", "content": choice.text, "refusal": None}
        else:
            shown["text"] = choice.text
        return {**shown, "finish_reason": choice.finish_reason}

    def _logprobs_of(self, index: int, choice: Choice) -> dict[str, Any] | None:
        if not self._logprobs:
            return None
        raw = [self._tokenizer.token_bytes(token) for token in choice.tokens]
        texts = [part.decode("utf-8", "replace") for part in raw]
        if self._chat:
            rows = zip(texts, choice.logprobs, raw, strict=True)
            content = [{"token": t, "logprob": p, "bytes": list(b), "top_logprobs": []} for t, p, b in rows]
            return {"content": content, "refusal": None}
        offsets, shown = [], self._shown.get(index, 0)
        for text in texts:
            offsets.append(shown)
            shown += len(text)
        self._shown[index] = shown
        return {"tokens": texts, "token_logprobs": choice.logprobs, "top_logprobs": None, "text_offset": offsets}


def usage_of(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    """How many tokens there were; a prompt counts once, however many completions it has."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


def event(payload: dict[str, Any]) -> bytes:
    """A server-sent event, https://html.spec.whatwg.org/multipage/server-sent-events.html."""
    return b"data: " + json.dumps(payload, separators=(",", ":")).encode() + b"\n\n"

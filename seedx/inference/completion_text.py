"""The text of a completion as its tokens come, up to a stop text."""

from __future__ import annotations

from seedx.tokenizer import TextStream, Tokenizer


class CompletionText:
    """Decodes tokens and looks for stop texts, also where they lie across tokens.

    Args:
        tokenizer: Gives the tokens' bytes.
        stops: The text ends before the first of these.
    """

    def __init__(self, tokenizer: Tokenizer, stops: tuple[str, ...]) -> None:
        self._stream = TextStream(tokenizer)
        self._stops = stops
        self._held = ""  # may become a stop text
        self.stopped = False
        self.num_tokens = 0  # that it was made of, that which completed a stop text included
        self.text = ""  # all that is final

    def extend(self, tokens: list[int]) -> str:
        """Adds tokens up to one that completes a stop text; what is now final."""
        new = ""
        for token in tokens:
            new += self.push(token)
            if self.stopped:
                break
        return new

    def push(self, token: int) -> str:
        """Adds a token; what is now final. Sets `stopped` if a stop text is complete."""
        self.num_tokens += 1
        return self._add(self._stream.push(token))

    def flush(self) -> str:
        """Ends the text; what was held back and is no stop text."""
        if self.stopped:
            return ""
        new = self._add(self._stream.flush())
        rest, self._held = self._held, ""
        self.text += rest
        return new + rest

    def _add(self, text: str) -> str:
        pending = self._held + text
        found = [at for stop in self._stops if (at := pending.find(stop)) >= 0]
        if found:
            self.stopped, end = True, min(found)
            self._held = ""
        else:
            end = len(pending) - max((_overlap(pending, stop) for stop in self._stops), default=0)
            self._held = pending[end:]
        self.text += pending[:end]
        return pending[:end]


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of `text` that `stop` begins with."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)

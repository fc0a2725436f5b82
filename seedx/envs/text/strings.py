"""Small tasks with strings, which a model that reads bytes can learn: reverse, sort, sums."""

from __future__ import annotations

from collections.abc import Callable

from seedx.envs.text.distinct_codes import distinct_codes
from seedx.envs.text.lazy_prompts import LazyPrompts
from seedx.envs.text.task import Prompt, Split
from seedx.envs.text.verifiers import exact

TEST_SIZE = 500
_LENGTHS = (4, 5, 6)  # of words
_LETTERS = "abcdefghijklmnopqrstuvwxyz"


class Reverse:
    """ "abcde=" asks for "edcba". Words have 4 to 6 letters, each length as often."""

    max_tokens = 8

    def __init__(self) -> None:
        self._words = _Words(stream=1)

    def prompts(self, split: Split) -> LazyPrompts:
        """20,000 to train on and 500 others to test with."""
        return self._words.prompts(split, lambda word: word[::-1])

    def reward(self, prompt: Prompt, completion: str) -> float:
        """1 for the answer, spaces around it aside; else 0."""
        return exact(prompt.answer, completion)


class Sort:
    """ "bacab=" asks for "aabbc". Words have 4 to 6 letters, each length as often."""

    max_tokens = 8

    def __init__(self) -> None:
        self._words = _Words(stream=2)

    def prompts(self, split: Split) -> LazyPrompts:
        """20,000 to train on and 500 others to test with."""
        return self._words.prompts(split, lambda word: "".join(sorted(word)))

    def reward(self, prompt: Prompt, completion: str) -> float:
        """1 for the answer, spaces around it aside; else 0."""
        return exact(prompt.answer, completion)


class Sums:
    """ "37+58=" asks for "95". Both numbers are below 100; a sum is another one than with its numbers swapped."""

    max_tokens = 6

    def __init__(self) -> None:
        self._codes = distinct_codes(stream=3, count=100 * 100, high=100 * 100)

    def prompts(self, split: Split) -> LazyPrompts:
        """9,500 to train on and the 500 others to test with."""
        codes = self._codes[:TEST_SIZE] if split == "test" else self._codes[TEST_SIZE:]

        def make(index: int) -> Prompt:
            left, right = divmod(int(codes[index]), 100)
            return Prompt(f"{left}+{right}=", answer=str(left + right))

        return LazyPrompts(len(codes), make)

    def reward(self, prompt: Prompt, completion: str) -> float:
        """1 for the answer, spaces around it aside; else 0."""
        return exact(prompt.answer, completion)


class _Words:
    """20,500 different words; the first 500 are for tests. A word is its length and a number in base 26."""

    def __init__(self, stream: int) -> None:
        per_length = -(-(20_000 + TEST_SIZE) // len(_LENGTHS))
        self._codes = [distinct_codes(100 * stream + length, per_length, 26**length) for length in _LENGTHS]

    def prompts(self, split: Split, answer: Callable[[str], str]) -> LazyPrompts:
        first, count = (0, TEST_SIZE) if split == "test" else (TEST_SIZE, 20_000)

        def make(index: int) -> Prompt:
            word = self._word(first + index)
            return Prompt(f"{word}=", answer=answer(word))

        return LazyPrompts(count, make)

    def _word(self, index: int) -> str:
        row, kind = divmod(index, len(_LENGTHS))
        code, letters = int(self._codes[kind][row]), []
        for _ in range(_LENGTHS[kind]):
            code, letter = divmod(code, 26)
            letters.append(_LETTERS[letter])
        return "".join(letters)

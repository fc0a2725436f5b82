"""A small task of two turns: the model asks a calculator, then answers."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from seedx.envs.text.distinct_codes import distinct_codes
from seedx.envs.text.lazy_prompts import LazyPrompts
from seedx.envs.text.task import Prompt, Split
from seedx.envs.text.verifiers import exact

TRAIN_SIZE, TEST_SIZE = 20_000, 500
_OPERATORS = "+-*"
_NUMBERS = range(10, 100)
_CALL = re.compile(r"\s*calc:([0-9]{1,4})([-+*])([0-9]{1,4});\s*")
_CALLED = re.compile(rf"{_CALL.pattern}=-?[0-9]+\n")


class Calculator:
    """ "37*58?" asks for the call "calc:37*58;", which is replied to with "=2146" and a line end, then for "2146".

    Any other call of that form gets its result too; what is no call ends the conversation. Of the reward, 0.8 is for
    the right answer after a call and 0.2 for having called with what was asked.
    """

    max_tokens = 24  # of a whole conversation
    reward_weights: Mapping[str, float] = {"answer": 0.8, "call": 0.2}

    def __init__(self) -> None:
        high = len(_OPERATORS) * len(_NUMBERS) ** 2
        self._codes = distinct_codes(stream=4, count=TRAIN_SIZE + TEST_SIZE, high=high)

    def prompts(self, split: Split) -> LazyPrompts:
        """20,000 to train on and 500 others to test with."""
        first, count = (0, TEST_SIZE) if split == "test" else (TEST_SIZE, TRAIN_SIZE)

        def make(index: int) -> Prompt:
            code, operator = divmod(int(self._codes[first + index]), len(_OPERATORS))
            left, right = (_NUMBERS[number] for number in divmod(code, len(_NUMBERS)))
            sign = _OPERATORS[operator]
            return Prompt(f"{left}{sign}{right}?", answer=_result(str(left), sign, str(right)))

        return LazyPrompts(count, make)

    def reply(self, prompt: Prompt, turns: Sequence[str]) -> str | None:  # noqa: ARG002
        """The result of a call in the first turn; nothing afterwards."""
        call = _CALL.fullmatch(turns[0])
        return f"={_result(*call.groups())}\n" if call and len(turns) == 1 else None

    def demonstrate(self, prompt: Prompt) -> list[str]:
        """The call and the answer."""
        return [f"calc:{prompt.text.removesuffix('?')};", prompt.answer]

    def reward(self, prompt: Prompt, completion: str) -> dict[str, float]:
        """Whether the calculator was asked for what the prompt asks for, and whether the answer after it is right."""
        called = _CALLED.match(completion)
        if called is None:
            return {"answer": 0.0, "call": 0.0}
        return {
            "answer": exact(prompt.answer, completion[called.end() :]),
            "call": float("".join(called.groups()) + "?" == prompt.text),
        }


def _result(left: str, sign: str, right: str) -> str:
    a, b = int(left), int(right)
    return str(a + b if sign == "+" else a - b if sign == "-" else a * b)

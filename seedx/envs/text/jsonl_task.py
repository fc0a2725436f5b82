"""Tasks from a file: a prompt and its answer in each line."""

from __future__ import annotations

import codecs
import hashlib
import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from seedx.chat import check_messages
from seedx.checks import ConfigError
from seedx.envs.text.last_number import last_number
from seedx.envs.text.task import Prompt, Split
from seedx.envs.text.verifiers import VERIFIERS, check_verifier, verify

_SPLITS = ("train", "test")
_FIELDS = ("prompt", "messages", "answer", "split", "verifier")
_LEAST = 20  # different prompts, of which a tenth is set aside for tests
_MOST_TOLD = 10


class _Line(NamedTuple):
    """A line: its number in the file, and `split` as it says, None if it does not."""

    number: int
    prompt: Prompt
    split: Split | None


class JsonlTask:
    """Prompts from a file of JSON objects, one in each line; blank lines are passed over.

    Fields of a line:
        prompt: A text; or
        messages: a list of {"role": ..., "content": ...}. One of the two.
        answer: A text: what the verifier compares with. `code` does without.
        split: "train" (if left out) or "test".
        verifier: One of `VERIFIERS`; "exact" if left out.

    All other fields go to `Prompt.extra`, also `tests`, a list that `code` wants: of texts like "assert f(1) == 2", or
    of {"stdin": ..., "stdout": ...}.

    If no line says "test", a tenth of the prompts is for tests, chosen by a hash of the prompt, so equal ones stay
    together. With fewer than 20 different prompts nothing can be set aside: tests are then done with what is trained
    on, and that is said on stderr. Lines with equal prompts stay different prompts.

    Args:
        path: Of the file, UTF-8.

    Attributes:
        prompt_lines: The line of each prompt of a split, from 1.

    Raises:
        ConfigError: it cannot be read, lines are wrong (all are named), or there is nothing to train on.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        lines = _read(path)
        for verifier in sorted({line.prompt.extra["verifier"] for line in lines}):
            check_verifier(verifier)
        splits, self._set_aside = _split(lines)
        self._prompts = {split: [line.prompt for line in found] for split, found in splits.items()}
        self.prompt_lines = {split: [line.number for line in found] for split, found in splits.items()}
        if not self._prompts["train"]:
            raise ConfigError(
                f'{path} has no prompt to train on: all {len(lines)} lines say "split": "test"; leave it out of some.'
            )

    def prompts(self, split: Split) -> Sequence[Prompt]:
        """In the order of the lines."""
        if split == "test" and not self._set_aside:
            print(
                f"{self._path}: no line is for tests, and with fewer than {_LEAST} different prompts none are set "
                'aside; tests are done with what is trained on. Mark lines with "split": "test".',
                file=sys.stderr,
            )
            return self._prompts["train"]
        return self._prompts[split]

    def reward(self, prompt: Prompt, completion: str) -> float:
        """1 if the line's verifier finds the completion right, else 0."""
        extra = prompt.extra
        return verify(extra["verifier"], prompt.answer, completion, extra.get("tests", ()))


def _split(lines: Sequence[_Line]) -> tuple[dict[Split, list[_Line]], bool]:
    """The lines of each split, and whether those for tests are others than those to train on."""
    if any(line.split == "test" for line in lines):
        train = [line for line in lines if line.split != "test"]
        return {"train": train, "test": [line for line in lines if line.split == "test"]}, True
    digests = [_digest(line.prompt) for line in lines]
    different = sorted(set(digests))
    if len(different) < _LEAST:
        return {"train": list(lines), "test": []}, False
    last = different[len(different) // 10 - 1]
    splits: dict[Split, list[_Line]] = {"train": [], "test": []}
    for digest, line in zip(digests, lines, strict=True):
        splits["test" if digest <= last else "train"].append(line)
    return splits, True


def _digest(prompt: Prompt) -> bytes:
    asked = prompt.text or [[message["role"], message["content"]] for message in prompt.messages]
    return hashlib.sha256(json.dumps(asked).encode()).digest()


def _read(path: str) -> list[_Line]:
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(
            f"task 'jsonl:{path}' cannot be read: {error.strerror}. The path is relative to the current directory."
        ) from error
    lines, wrong = [], []
    for number, line in enumerate(content.removeprefix(codecs.BOM_UTF8).split(b"\n"), start=1):
        try:
            lines += [_parse(number, line)] if line.strip() else []
        except ConfigError as error:
            wrong.append(f"{path}:{number}: {error}")
    if wrong:
        more = f"\nand {len(wrong) - _MOST_TOLD} lines more." if len(wrong) > _MOST_TOLD else ""
        raise ConfigError("\n".join(wrong[:_MOST_TOLD]) + more)
    if not lines:
        raise ConfigError(f'{path} is empty; each line must be like {{"prompt": "1+1=", "answer": "2"}}.')
    return lines


def _parse(number: int, line: bytes) -> _Line:
    try:
        fields = json.loads(line.decode(), parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        raise ConfigError(f"byte {error.start + 1} is no UTF-8; save the file as UTF-8.") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"this is no JSON ({error}); each line must be one object.") from error
    if not isinstance(fields, dict):
        raise ConfigError(f"this is {_kind(fields)}; each line must be an object with prompt and answer.")
    try:
        json.dumps(fields, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            "it has half of a surrogate pair (\\ud800 to \\udfff alone), which is no character."
        ) from error
    if ("prompt" in fields) == ("messages" in fields):
        both = "both prompt and messages" if "prompt" in fields else "neither prompt nor messages"
        raise ConfigError(f"it has {both}; it must have one of them.")
    split = _one_of(fields, "split", _SPLITS, None)
    verifier = _one_of(fields, "verifier", VERIFIERS, "exact")
    if verifier == "code":
        _check_tests(fields.get("tests"))
    answer = _text(fields, "answer") if verifier != "code" or "answer" in fields else ""
    _check_answer(verifier, answer)
    return _Line(
        number,
        Prompt(
            text=_prompt(fields) if "prompt" in fields else "",
            messages=_messages(fields["messages"]) if "messages" in fields else (),
            answer=answer,
            extra={"verifier": verifier} | {key: value for key, value in fields.items() if key not in _FIELDS},
        ),
        split,
    )


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is none of its numbers")


def _one_of(fields: Mapping[str, Any], name: str, allowed: Sequence[str], default: str | None) -> Any:
    value = fields.get(name, default)
    if name in fields and value not in allowed:
        raise ConfigError(f"{name} ({json.dumps(value)[:100]}) must be one of {', '.join(allowed)}, or left out.")
    return value


def _text(fields: Mapping[str, Any], name: str) -> str:
    value = fields.get(name)
    if isinstance(value, str):
        return value
    if name not in fields:
        raise ConfigError(f"it has no {name}; it must be a string.")
    hint = f': write "{json.dumps(value)}"' if isinstance(value, int | float) else ""
    raise ConfigError(f"{name} is {_kind(value)}; it must be a string{hint}.")


def _prompt(fields: Mapping[str, Any]) -> str:
    text = _text(fields, "prompt")
    if not text:
        raise ConfigError('prompt ("") is empty; it must be a text.')
    return text


def _messages(value: Any) -> tuple[Mapping[str, str], ...]:
    try:
        check_messages(value)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return tuple(value)


def _check_answer(verifier: str, answer: str) -> None:
    """Refuses an answer that the verifier could compare nothing with."""
    match verifier:
        case "numeric" if last_number(answer) is None:
            raise ConfigError(f'answer ("{answer[:100]}") has no number, which the verifier "numeric" compares with.')
        case "regex":
            try:
                re.compile(answer)
            except (re.error, OverflowError, RecursionError) as error:
                raise ConfigError(f'answer ("{answer[:100]}") is no regular expression: {error}.') from error
        case "math" if not answer.strip():
            raise ConfigError('answer ("") is empty; the verifier "math" compares with a formula.')


def _check_tests(tests: Any) -> None:
    kinds = {_test_kind(test) for test in tests} if isinstance(tests, list) else set()
    if kinds not in ({"assert"}, {"pair"}):
        raise ConfigError(
            'tests must be a list, for the verifier "code", either of strings like "assert f(1) == 2" or of objects '
            'like {"stdin": "1", "stdout": "2"}, and not be empty.'
        )


def _test_kind(test: Any) -> str:
    if isinstance(test, str):
        return "assert"
    is_pair = isinstance(test, dict) and test.keys() == {"stdin", "stdout"}
    return "pair" if is_pair and all(isinstance(text, str) for text in test.values()) else "neither"


def _kind(value: Any) -> str:
    """What JSON calls it."""
    match value:
        case None:
            return "null"
        case bool():
            return "a boolean"
        case int() | float():
            return "a number"
        case str():
            return "a string"
        case list():
            return "a list"
    return "an object"

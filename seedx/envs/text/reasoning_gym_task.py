"""Tasks of the package reasoning-gym, with its own scorers."""

from __future__ import annotations

import difflib
import hashlib
import json
import re
from collections.abc import Callable, Mapping
from fractions import Fraction
from functools import lru_cache
from itertools import islice
from typing import Any

from seedx.checks import ConfigError
from seedx.envs.text.lazy_prompts import LazyPrompts
from seedx.envs.text.task import Prompt, Split

SIZES: Mapping[Split, int] = {"train": 10_000, "test": 200}
_SEEDS: Mapping[Split, int] = {"train": 0, "test": 1_000_000_000}  # entries are often functions of seed + index
_NUM_ENTRIES = 10_000  # of each dataset; some make all of them at once
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


class ReasoningGymTask:
    """A dataset of reasoning-gym: 10,000 prompts to train on and 200 to test with, which may repeat.

    No question is in both splits: a quarter of all questions, by their hash, is for tests alone. The question and a
    line end are the prompt; with `shots` or `system` it is a conversation for a chat model, which holds that many
    questions of the train split with their answers before the question. A completion is scored as the dataset scores
    answers, without spaces around it; if it has <answer>...</answer>, what stands in the last of them is. Some
    datasets give a part of 1 for a part of the answer.

    Args:
        name: Of the dataset, and perhaps what it does not leave as it is: "NAME?KEY=VALUE&KEY=VALUE". The keys are
            `shots`, `system` (a text) and the dataset's own; values are JSON, or else texts.

    Raises:
        ConfigError: the package is not installed, or has no such dataset; a setting is none.
    """

    def __init__(self, name: str) -> None:
        self._name, settings = _parse(name)
        self._shots, self._system = settings.pop("shots", 0), settings.pop("system", None)
        if type(self._shots) is not int or not 0 <= self._shots <= 100:
            raise ConfigError(f"task 'reasoning_gym:{name}': shots ({self._shots!r}) must be a number from 0 to 100.")
        create = _creator(self._name)
        try:
            create(self._name, seed=0, size=1, **settings)
        except (AssertionError, TypeError, ValueError) as error:  # what its settings are checked with
            raise ConfigError(f"task 'reasoning_gym:{name}': the dataset refuses its settings: {error}") from error
        self._dataset = lru_cache(None)(
            lambda split: create(self._name, seed=_SEEDS[split], size=_NUM_ENTRIES, **settings)
        )
        self._examples = lru_cache(None)(self._make_examples)
        self._test_prompt = lru_cache(None)(lambda index: self._prompt("test", index))  # four times as dear to make

    def prompts(self, split: Split) -> LazyPrompts:
        """Makes each prompt when it is asked for.

        Raises:
            ConfigError: the dataset has too few different questions.
        """
        make = self._test_prompt if split == "test" else lambda index: self._prompt("train", index)
        make(0)  # a dataset that cannot be used is refused here, rather than amid a run
        return LazyPrompts(SIZES[split], make)

    def reward(self, prompt: Prompt, completion: str) -> float:
        """The dataset's own score, 0 to 1."""
        found = _ANSWER.findall(completion)
        answer = (found[-1] if found else completion).strip()
        return float(self._dataset("train").score_answer(answer, _from_plain(prompt.extra["entry"])))

    def _prompt(self, split: Split, index: int) -> Prompt:
        """Of the entry at `index`, or else every 200th after it, the first that is for this split."""
        step, error = SIZES["test"], None
        for shift in range(0, _NUM_ENTRIES, step):
            try:
                entry = self._dataset(split)[(index + shift) % _NUM_ENTRIES]
            except Exception as failure:  # a few datasets cannot make some of their entries (codeio: 1 of 1,000)
                error = failure
                continue
            if _split_of(entry["question"]) == split:
                return self._asked(entry)
        raise ConfigError(
            f"task 'reasoning_gym:{self._name}' has too few different questions to test with others than it trains on: "
            f"of {_NUM_ENTRIES // step}, none is for {split}"
            + (f" (and some cannot be made: {error!r})" if error else "")
            + ". Take another dataset."
        ) from error

    def _asked(self, entry: Mapping[str, Any]) -> Prompt:
        answer, extra = entry["answer"], {"entry": _to_plain(entry)}
        answer = answer if isinstance(answer, str) else ""
        if not self._shots and self._system is None:
            return Prompt(f"{entry['question']}\n", answer=answer, extra=extra)
        messages = (*self._examples(), {"role": "user", "content": entry["question"]})
        return Prompt(messages=messages, answer=answer, extra=extra)

    def _make_examples(self) -> tuple[Mapping[str, str], ...]:
        """What each conversation begins with."""
        messages = [] if self._system is None else [{"role": "system", "content": str(self._system)}]
        entries = (entry for entry in self._dataset("train") if _split_of(entry["question"]) == "train")
        for entry in islice(entries, self._shots):
            if not isinstance(entry["answer"], str):
                raise ConfigError(f"task 'reasoning_gym:{self._name}' names no answers to show; leave out shots.")
            messages.append({"role": "user", "content": entry["question"]})
            messages.append({"role": "assistant", "content": entry["answer"]})
        return tuple(messages)


def _parse(name: str) -> tuple[str, dict[str, Any]]:
    """The dataset's name and the settings that follow it."""
    dataset, _, query = name.partition("?")
    settings: dict[str, Any] = {}
    for pair in filter(None, query.split("&")):
        key, equals, value = pair.partition("=")
        if not key.isidentifier() or not equals or key in ("seed", "size") or key in settings:
            raise ConfigError(
                f"task 'reasoning_gym:{name}': {pair!r} is no setting; write NAME?KEY=VALUE&KEY=VALUE, each key once "
                "and neither seed nor size."
            )
        try:
            settings[key] = json.loads(value)
        except ValueError:
            settings[key] = value
    return dataset, settings


def _split_of(question: str) -> Split:
    return "test" if hashlib.sha256(question.encode()).digest()[0] % 4 == 0 else "train"


def _creator(name: str) -> Callable[..., Any]:
    """What makes the package's datasets, and there is one of this name."""
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise ConfigError(
            f"task 'reasoning_gym:{name}' needs the package reasoning-gym ({error}): pip install -e \".[tasks]\"."
        ) from error
    known = sorted(DATASETS.keys() - {"composite"})  # which is made of others, by settings
    if name not in known:
        matches = difflib.get_close_matches(name, known)
        hint = f" Did you mean {', '.join(map(repr, matches))}?" if matches else ""
        raise ConfigError(f"task 'reasoning_gym:{name}' is unknown.{hint} reasoning-gym has {', '.join(known)}.")
    return reasoning_gym.create_dataset


def _to_plain(value: Any) -> Any:
    """As JSON that keeps what JSON has not: scorers tell a tuple from a list and 1 from "1"."""
    if isinstance(value, Mapping):
        return {"dict": [[_to_plain(key), _to_plain(item)] for key, item in value.items()]}
    if isinstance(value, tuple):
        return {"tuple": [_to_plain(item) for item in value]}
    if isinstance(value, list):
        return [_to_plain(item) for item in value]
    if isinstance(value, Fraction):
        return {"fraction": str(value)}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(
        f"an entry of reasoning-gym holds {type(value).__name__} ({value!r}), which has no form in JSON here."
    )


def _from_plain(plain: Any) -> Any:
    """What `_to_plain` made this of."""
    match plain:
        case {"dict": pairs}:
            return {_from_plain(key): _from_plain(item) for key, item in pairs}
        case {"tuple": items}:
            return tuple(map(_from_plain, items))
        case {"fraction": text}:
            return Fraction(text)
        case list():
            return list(map(_from_plain, plain))
    return plain

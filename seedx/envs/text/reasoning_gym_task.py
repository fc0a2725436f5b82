"""Tasks of the package reasoning-gym, with its own scorers."""

from __future__ import annotations

import difflib
import hashlib
import re
from collections.abc import Mapping
from fractions import Fraction
from functools import lru_cache
from typing import Any

from seedx.checks import ConfigError
from seedx.envs.text.lazy_prompts import LazyPrompts
from seedx.envs.text.task import Prompt, Split

SIZES: Mapping[Split, int] = {"train": 20_000, "test": 200}
_SEEDS: Mapping[Split, int] = {"train": 0, "test": 1_000_000_000}  # entries are often functions of seed + index
_MAX_TRIES = 200
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


class ReasoningGymTask:
    """A dataset of reasoning-gym: 20,000 prompts to train on and 200 to test with, which may repeat.

    No question is in both splits: an eighth of all questions, by their hash, is for tests alone. The question and a
    line end are the prompt. A completion is scored as the dataset scores answers, without spaces around it; if it has
    <answer>...</answer>, what stands in the last of them is. Some datasets give a part of 1 for a part of the answer.

    Args:
        name: Of the dataset, whose settings are its defaults.

    Raises:
        ConfigError: the package is not installed, or has no such dataset.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._datasets = {split: _dataset(name, _SEEDS[split], SIZES[split] * _MAX_TRIES) for split in SIZES}
        self._test_prompt = lru_cache(None)(lambda index: self._prompt("test", index))  # eight times as dear to make

    def prompts(self, split: Split) -> LazyPrompts:
        """Makes each prompt when it is asked for.

        Raises:
            ConfigError: when a prompt is asked for, the dataset has too few different questions.
        """
        return LazyPrompts(
            SIZES[split], self._test_prompt if split == "test" else lambda index: self._prompt("train", index)
        )

    def reward(self, prompt: Prompt, completion: str) -> float:
        """The dataset's own score, 0 to 1."""
        found = _ANSWER.findall(completion)
        answer = (found[-1] if found else completion).strip()
        return float(self._datasets["train"].score_answer(answer, _from_plain(prompt.extra["entry"])))

    def _prompt(self, split: Split, index: int) -> Prompt:
        """The first of a sequence of its own that is of this split."""
        for attempt in range(_MAX_TRIES):
            entry = self._datasets[split][attempt * SIZES[split] + index]
            if _split_of(entry["question"]) == split:
                answer = entry["answer"]
                return Prompt(
                    f"{entry['question']}\n",
                    answer=answer if isinstance(answer, str) else "",
                    extra={"entry": _to_plain(entry)},
                )
        raise ConfigError(
            f"task 'reasoning_gym:{self._name}' has too few different questions to test with others than it trains on: "
            f"none of {_MAX_TRIES} is for {split}. Take another dataset."
        )


def _split_of(question: str) -> Split:
    return "test" if hashlib.sha256(question.encode()).digest()[0] % 8 == 0 else "train"


def _dataset(name: str, seed: int, size: int) -> Any:
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
    return reasoning_gym.create_dataset(name, seed=seed, size=size)


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

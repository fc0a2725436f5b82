"""Rewards from the name of a task: what follows the "?" of "TASK?reward=REWARD&weight=0.5&reward=REWARD"."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote

from seedx.checks import ConfigError
from seedx.envs.text.rewarded import Rewarded, RewardFunction
from seedx.envs.text.task import Task
from seedx.imports import load

MARK = re.compile(r"[?&]reward=")  # "&" after a dataset's own settings
KINDS = '"judge:ADDRESS[,ADDRESS]", "model:PATH", "module:function", or "task" for the task\'s own'


class _Reward(NamedTuple):
    """A reward as it is written; `text` for messages."""

    text: str
    source: str
    options: dict[str, str]


def rewarded(task: Task, query: str) -> Rewarded:
    """The task with the rewards that a query names.

    Args:
        task: Whose prompts they are.
        query: REWARD[&OPTION=VALUE...][&reward=REWARD...]; options belong to the reward before them, and %26 is "&" in
            a value.

    Raises:
        ConfigError: there is no such reward, an option is unknown or wrong, or two rewards have one name.
    """
    functions: dict[str, RewardFunction] = {}
    weights: dict[str, float] = {}
    own = False
    for reward in map(_split, query.split("&reward=")):
        if reward.source == "task":
            _take(reward, {})
            own = True
            continue
        name, function, weight = _load(reward)
        if name in functions:
            raise ConfigError(
                f"two rewards are called {name!r} ({reward.text!r} is the second); give one of them another name in a "
                "task of your own, with seedx.envs.text.rewarded.Rewarded."
            )
        functions[name], weights[name] = function, weight
    if own and "reward" in functions:
        raise ConfigError(
            "a reward is called 'reward', as a task's own is that is one number; give the function another name."
        )
    return Rewarded(task, functions, weights, own=own)


def _split(text: str) -> _Reward:
    source, *pairs = text.split("&")
    options: dict[str, str] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or key in options:
            raise ConfigError(f"reward {text!r}: {pair!r} must be OPTION=VALUE, and each option be there once.")
        options[key] = unquote(value)
    return _Reward(text, unquote(source), options)


def _load(reward: _Reward) -> tuple[str, RewardFunction, float]:
    """Its name, the function and its weight."""
    match reward.source.partition(":"):
        case ("judge", ":", addresses):
            from seedx.envs.text.judge import Judge
            from seedx.security import Access

            kinds = {"lowest": _number, "highest": _number, "max_tokens": int, "timeout_s": _number}
            files = {"template": _read, "tls_ca": str, "token_file": str}
            weight, options = _take(reward, kinds | files)
            access = Access(tls_ca=options.pop("tls_ca", None), token_file=options.pop("token_file", None))
            return "judge", Judge(addresses.split(","), access=access, **options), weight
        case ("model", ":", path):
            from seedx.envs.text.reward_model import RewardModel

            weight, options = _take(reward, {"max_tokens": int})
            return "model", RewardModel(path, **options), weight
        case (_, ":", name):
            weight, _ = _take(reward, {})
            try:
                return name, load(reward.source, "reward"), weight
            except ConfigError as error:
                raise ConfigError(f"{error} A reward is {KINDS}.") from error
    raise ConfigError(f"reward {reward.text!r} is unknown; a reward is {KINDS}.")


def _take(reward: _Reward, kinds: Mapping[str, Callable[[str], Any]]) -> tuple[float, dict[str, Any]]:
    """The weight and the other options."""
    allowed = kinds if reward.source == "task" else {"weight": _number, **kinds}
    found: dict[str, Any] = {}
    for key, value in reward.options.items():
        if key not in allowed:
            raise ConfigError(
                f"reward {reward.text!r} has the option {key!r}; it takes {', '.join(allowed) or 'none'}."
            )
        try:
            found[key] = allowed[key](value)
        except ConfigError:
            raise
        except ValueError as error:
            what = "whole" if allowed[key] is int else "finite"
            raise ConfigError(f"reward {reward.text!r}: {key} ({value!r}) must be a {what} number.") from error
    return found.pop("weight", 1.0), found


def _number(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError(text)
    return value


def _read(path: str) -> str:
    try:
        return Path(path).read_text("utf-8")
    except OSError as error:
        raise ConfigError(f"the template {path!r} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"the template {path!r} is no UTF-8 (byte {error.start + 1}); save it as UTF-8.") from error

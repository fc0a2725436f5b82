"""Makes a task from its name."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from typing import Any

from seedx.checks import ConfigError
from seedx.envs.text.load_rewards import MARK, rewarded
from seedx.envs.text.task import Task
from seedx.imports import load

_BUILT_IN = ("reverse", "sort", "sums", "calculator")
_KINDS = (
    '"reverse", "sort", "sums", "calculator", "jsonl:PATH", "reasoning_gym:NAME", or "module:function" for your own, '
    'and after it "?reward=REWARD" for other rewards'
)


def load_task(name: str) -> Task:
    """Makes the task `name`; "TASK?reward=REWARD..." is one with other rewards than its own, see `load_rewards`.

    A user's own, "module:function", comes from the current directory or any installed package; the function takes
    nothing and returns a `seedx.envs.text.task.Task`. An error inside it is raised as it is.

    Raises:
        ConfigError: there is no such task or reward, what it needs is not installed, its file is wrong, or it is no
            task.
    """
    if mark := MARK.search(name):
        return rewarded(load_task(name[: mark.start()]), name[mark.end() :])
    match name.partition(":"):
        case ("reverse", "", _):
            from seedx.envs.text.strings import Reverse

            return Reverse()
        case ("sort", "", _):
            from seedx.envs.text.strings import Sort

            return Sort()
        case ("sums", "", _):
            from seedx.envs.text.strings import Sums

            return Sums()
        case ("calculator", "", _):
            from seedx.envs.text.calculator import Calculator

            return Calculator()
        case ("jsonl", ":", path):
            from seedx.envs.text.jsonl_task import JsonlTask

            return JsonlTask(path)
        case ("reasoning_gym", ":", dataset):
            from seedx.envs.text.reasoning_gym_task import ReasoningGymTask

            return ReasoningGymTask(dataset)
        case (_, ":", _):
            return _load_own(name)
        case _:
            matches = difflib.get_close_matches(name.lower(), _BUILT_IN)
            hint = f" Did you mean {', '.join(map(repr, matches))}?" if matches else ""
            raise ConfigError(f"task {name!r} is unknown.{hint} --task takes {_KINDS}.")


def _load_own(name: str) -> Task:
    try:
        function = load(name, "task")
    except ConfigError as error:
        raise ConfigError(f"{error} --task takes {_KINDS}.") from error
    made = function()
    missing = [method for method in ("prompts", "reward") if not callable(getattr(made, method, None))]
    if missing or isinstance(made, type):
        what = f"{made.__name__}, a class" if isinstance(made, type) else type(made).__name__
        lacks = f"; it lacks {' and '.join(missing)}" if missing else ""
        raise ConfigError(
            f"{name} returned {what}; it must return a seedx.envs.text.task.Task, an object with prompts(split) and "
            f"reward(prompt, completion){lacks}."
        )
    _check_attributes(made, name)
    return made


def _check_attributes(task: Any, name: str) -> None:
    """Refuses what stands under the name of an attribute of tasks and is none."""
    max_tokens = getattr(task, "max_tokens", 1)
    if type(max_tokens) is not int or max_tokens < 1:
        raise ConfigError(f"{name}: max_tokens ({max_tokens!r}) must be a positive int, or left out.")
    waits = getattr(task, "reward_waits", False)
    if not isinstance(waits, bool):
        raise ConfigError(f"{name}: reward_waits ({waits!r}) must be True or False, or left out.")
    weights = getattr(task, "reward_weights", {})
    if not isinstance(weights, Mapping) or not all(
        isinstance(key, str) and isinstance(weight, int | float) and math.isfinite(weight)
        for key, weight in weights.items()
    ):
        raise ConfigError(f"{name}: reward_weights ({weights!r}) must map names to finite numbers, or be left out.")
    for method, arguments in (("reply", "(prompt, turns)"), ("prepare", "()")):
        found = getattr(task, method, None)
        if found is not None and not callable(found):
            raise ConfigError(f"{name}: {method} ({found!r}) must be a method of {arguments}, or left out.")

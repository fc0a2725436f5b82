"""A task with other rewards than its own, each a component of the reward. No jax."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

from seedx.envs.text.task import Prompt, Split, Task
from seedx.reward_config import RewardConfig

_OF_THE_TASK = ("max_tokens", "demonstrate", "reply", "prompt_lines")


class Score(NamedTuple):
    """A reward, and the version of what gave it, which is logged beside it."""

    value: float
    version: float


@runtime_checkable
class RewardFunction(Protocol):
    """A function, or an object that can be called, which may have some of these attributes.

    Attributes that may be left out:
        version: A number, or a text that is one; of functions that return no `Score`.
        reward_waits: As of tasks: whether it mostly waits.
        prepare: () -> None, called in each process that computes rewards, before the first one.
        check_config: (RewardConfig) -> None, called before all else of a run: raises ConfigError where the function
            cannot work with these settings.
    """

    def __call__(self, prompt: Prompt, completion: str) -> float | Score:
        """The reward of a completion. Runs in a worker process; may raise."""
        ...


class Rewarded:
    """The prompts and turns of a task; the reward is the weighted sum of some functions.

    Component NAME is what the function of that name returned, and NAME_version, which counts nothing in the reward, its
    version if it has one. Rewards are computed at the same time if one of them waits.

    Args:
        task: Whose prompts they are.
        rewards: Functions by name.
        weights: What each counts; 1 where nothing is said.
        own: Whether the task's own reward counts too, as the task weighs it.
    """

    def __init__(
        self,
        task: Task,
        rewards: Mapping[str, RewardFunction],
        weights: Mapping[str, float] | None = None,
        *,
        own: bool = False,
    ) -> None:
        self._task, self._rewards, self._own = task, dict(rewards), own
        works = own or hasattr(task, "reply")  # in the processes that compute rewards, where replies are made too
        sources: list[Any] = [*self._rewards.values(), *([task] if works else [])]
        self.reward_waits = any(getattr(source, "reward_waits", False) for source in sources)
        own_weights: Mapping[str, float] = getattr(task, "reward_weights", {}) if own else {}
        unweighted = {f"{name}_version": 0.0 for name in rewards}
        self.reward_weights: Mapping[str, float] = {**own_weights, **unweighted, **(weights or {})}
        self._prepares = [source.prepare for source in sources if hasattr(source, "prepare")]
        self._checks = [reward.check_config for reward in rewards.values() if hasattr(reward, "check_config")]
        for name in _OF_THE_TASK:  # as attributes, which a look for the protocol finds
            if hasattr(task, name):
                setattr(self, name, getattr(task, name))

    def prompts(self, split: Split) -> Sequence[Prompt]:
        """Those of the task."""
        return self._task.prompts(split)

    def check_config(self, config: RewardConfig) -> None:
        """Has the functions refuse what they cannot work with.

        Raises:
            ConfigError: one of them does.
        """
        for check in self._checks:
            check(config)

    def prepare(self) -> None:
        """Has what computes rewards load what it needs."""
        for prepare in self._prepares:
            prepare()

    def reward(self, prompt: Prompt, completion: str) -> Mapping[str, float]:
        """The components by name.

        Raises:
            ValueError: the task has a component of the same name.
        """
        scores: dict[str, float] = {}
        for name, function in self._rewards.items():
            result = function(prompt, completion)
            version = result.version if isinstance(result, Score) else getattr(function, "version", None)
            scores[name] = result.value if isinstance(result, Score) else result
            if version is not None:
                scores[f"{name}_version"] = float(version)
        if not self._own:
            return scores
        reward = self._task.reward(prompt, completion)
        own = reward if isinstance(reward, Mapping) else {"reward": reward}
        if twice := own.keys() & scores.keys():
            raise ValueError(
                f"the task's own reward has {', '.join(sorted(twice))}, and so have the others; rename one of them."
            )
        return {**own, **scores}

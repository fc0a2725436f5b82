"""What a text task is. No jax: rewards are computed in processes of their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

Split = Literal["train", "test"]
Scores = dict[str, float]  # the components of a reward, by name


@dataclass(frozen=True)
class Prompt:
    """What a model is asked. Holds only what JSON can, since whoever computes the reward lives in another process.

    Attributes:
        text: Given to the model as it is; "" where there are messages.
        messages: A conversation, each {"role": ..., "content": ...}, for the model's chat template.
        answer: The right answer, "" where the reward needs none.
        extra: What else the reward wants to know.
    """

    text: str = ""
    messages: tuple[Mapping[str, str], ...] = ()
    answer: str = ""
    extra: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """As plain JSON."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Prompt:
        """The prompt of `to_json`."""
        return cls(values["text"], tuple(values["messages"]), values["answer"], values["extra"])


@runtime_checkable
class Task(Protocol):
    """A task is one file and one import path; beside these methods it may have some of the attributes below.

    Attributes that may be left out:
        max_tokens: int, tokens of a completion that suffice; a run's own setting goes before.
        reward_weights: Mapping[str, float], what each component counts in the reward; 1 where nothing is said.
        reward_waits: bool, whether computing a reward mostly waits (a judge, a sandbox elsewhere): such rewards share
            processes, others have a process to themselves.
        prepare: () -> None, called in each process that computes rewards, before the first one: loads what they need.
        demonstrate: (prompt) -> Sequence[str], the model's turns in a right conversation, for a warm start; the answer
            alone where it is left out.
    """

    def prompts(self, split: Split) -> Sequence[Prompt]:
        """All prompts of a split, always in the same order; may make them when they are asked for."""
        ...

    def reward(self, prompt: Prompt, completion: str) -> float | Mapping[str, float]:
        """The reward of a completion, or its components by name. Runs in a worker process; may raise."""
        ...


@runtime_checkable
class MultiTurnTask(Task, Protocol):
    """A task that answers: the model's turn, the environment's text, the model's next turn, and so on.

    The completion that `reward` gets is the whole conversation after the prompt: the texts of all turns and of what the
    environment said between them, joined as they are. `max_tokens` is of all this, too.
    """

    def reply(self, prompt: Prompt, turns: Sequence[str]) -> str | None:
        """The environment's text after the model's turns so far; None: the conversation is over.

        Runs in a worker process, as `reward` does, perhaps another one each time; may raise. A warm start calls it too,
        in the learner's process.
        """
        ...

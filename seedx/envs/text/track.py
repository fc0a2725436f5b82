"""A completion on its way: what the model and the environment said so far, token for token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from seedx.envs.text.group import Sample
from seedx.envs.text.task import Scores
from seedx.inference.requests import Completion


@dataclass(eq=False)
class Track:
    """Parts of its tokens, what is known of each, and the model's turns as text.

    `is_redundant`: it stands by for others; `is_lost`: it will not be complete; `is_asked`, `is_settled`: its reward
    was asked for, and came or could not be computed.
    """

    is_redundant: bool = False
    is_lost: bool = False
    is_asked: bool = False
    is_settled: bool = False
    tokens: list[np.ndarray] = field(default_factory=list)
    sampled: list[np.ndarray] = field(default_factory=list)
    logprobs: list[np.ndarray] = field(default_factory=list)
    versions: list[np.ndarray] = field(default_factory=list)
    turns: list[str] = field(default_factory=list)
    text: str = ""
    finish_reason: str = ""
    scores: Scores | None = None

    @property
    def length(self) -> int:
        """Tokens so far."""
        return sum(len(part) for part in self.tokens)

    @property
    def is_unscored(self) -> bool:
        """Whether its reward could not be computed."""
        return self.is_settled and self.scores is None

    def add(self, completion: Completion) -> None:
        """The model's turn."""
        self.tokens.append(completion.tokens)
        self.sampled.append(np.ones(len(completion.tokens), bool))
        self.logprobs.append(completion.logprobs)
        self.versions.append(completion.versions)
        self.turns.append(completion.text or "")
        self.text += self.turns[-1]

    def reply(self, text: str, tokens: Sequence[int]) -> None:
        """The environment's turn, which nobody sampled."""
        part = np.array(tokens, np.int32)
        self.tokens.append(part)
        self.sampled.append(np.zeros(len(part), bool))
        self.logprobs.append(np.zeros(len(part), np.float32))
        self.versions.append(np.zeros(len(part), np.int32))
        self.text += text

    def sample(self, reward: float) -> Sample:
        """The completion, which is over."""
        return Sample(
            np.concatenate(self.tokens),
            np.concatenate(self.sampled),
            np.concatenate(self.logprobs),
            np.concatenate(self.versions),
            self.finish_reason,
            self.text,
            self.scores,
            reward,
        )

"""The completions of one prompt, scored; and groups as the items of a replay."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from seedx.envs.text.task import Scores
from seedx.replay.items import Ragged

REASONS = ("stop", "length")  # how a completion may end that is trained on


class Sample(NamedTuple):
    """A completion; arrays are `[n]`, one entry for each token after the prompt.

    Attributes:
        tokens: int32.
        sampled: bool; False: the environment's, of a task with several turns.
        logprobs: float32, under the distribution that it was drawn from; 0 where it was not sampled.
        versions: int32, of the weights that made it; 0 where it was not sampled.
        finish_reason: One of `REASONS`.
        text: Of all tokens.
        scores: The components of its reward; None: it could not be scored.
        reward: Their weighted sum; NaN where there is none.
    """

    tokens: np.ndarray
    sampled: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray
    finish_reason: str
    text: str
    scores: Scores | None
    reward: float


class Group(NamedTuple):
    """A prompt and its completions.

    Attributes:
        position: Of the prompt in the order of the run (`prompts.PromptSource`).
        prompt: int32 `[n]`.
        samples: G of them.
    """

    position: int
    prompt: np.ndarray
    samples: Sequence[Sample]


def to_item(group: Group) -> Ragged:
    """A group as one item: rows are the tokens of the prompt, then those of each completion."""
    prompt, samples = group.prompt, group.samples
    none = np.zeros(len(prompt), np.int32)
    rows = {
        "token": [prompt, *(sample.tokens for sample in samples)],
        "sampled": [none.astype(bool), *(sample.sampled for sample in samples)],
        "logprob": [none.astype(np.float32), *(sample.logprobs for sample in samples)],
        "version": [none, *(sample.versions for sample in samples)],
    }
    columns = {name: np.concatenate(parts) for name, parts in rows.items()}
    state = {
        "position": np.array([group.position], np.int64),
        "lengths": np.array([[len(part) for part in rows["token"]]], np.int32),
        "reward": np.array([[sample.reward for sample in samples]], np.float32),
        "truncated": np.array([[sample.finish_reason == "length" for sample in samples]]),
    }
    return Ragged(columns, np.array([len(columns["token"])], np.int64), state)


def example_item(group_size: int) -> Ragged:
    """An item like those of `to_item`, to tell a replay what they look like."""
    some = np.zeros(1, np.int32)
    sample = Sample(some, some.astype(bool), some.astype(np.float32), some, "stop", "", None, 0.0)
    return to_item(Group(0, some, [sample] * group_size))

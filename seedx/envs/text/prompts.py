"""The order in which a run takes its prompts: endless, and a function of one number."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from seedx.checks import require
from seedx.envs.counter_rng import draw
from seedx.envs.text.blame import blame
from seedx.envs.text.task import Prompt


class Taken(NamedTuple):
    """A prompt in its turn.

    Attributes:
        epoch: How often all prompts were taken before.
        uid: Its index in the split, which tells it from all others, from one of the same text too.
        prompt: The prompt.
    """

    epoch: int
    uid: int
    prompt: Prompt


class PromptSource:
    """Prompts by position: in each epoch all of them once, in an order of its own.

    Nothing is used up, so the position of the next prompt is all that a checkpoint has to keep, and the end of an epoch
    is the begin of the next. Threads may share a source.

    Args:
        prompts: Of a split.
        seed: Of the orders, 0 or more.

    Raises:
        ConfigError: there are no prompts.
    """

    def __init__(self, prompts: Sequence[Prompt], seed: int) -> None:
        require(len(prompts) > 0, "the task has no prompts (0) in this split; it must have at least one.")
        require(seed >= 0, f"the seed of the prompts' order ({seed}) must not be negative.")
        self._prompts = prompts
        self._seed = seed
        self._kept = (0, self._order(0))  # of the epoch asked for last: made anew it would be the same

    @property
    def num_prompts(self) -> int:
        """Of an epoch."""
        return len(self._prompts)

    def at(self, position: int) -> Taken:
        """The prompt at a position: 0, 1, 2, ... without end.

        Raises:
            ValueError: the position is negative.
            ConfigError: the task fails at making the prompt.
        """
        if position < 0:
            raise ValueError(f"a position ({position}) must not be negative.")
        epoch, index = divmod(position, len(self._prompts))
        kept_epoch, order = self._kept
        if epoch != kept_epoch:
            order = self._order(epoch)
            self._kept = (epoch, order)
        uid = int(order[index])
        with blame(f"prompt {uid} of the task"):
            return Taken(epoch, uid, self._prompts[uid])

    def _order(self, epoch: int) -> np.ndarray:
        """A permutation, int64 `[N]`: the prompts by a number drawn for each and epoch."""
        num_prompts = len(self._prompts)
        counters = np.arange(num_prompts, dtype=np.uint64) + np.uint64(epoch * num_prompts)
        drawn = draw(np.full(num_prompts, self._seed, np.uint64), counters, 2**63)
        return np.argsort(drawn, kind="stable")

"""A group on its way: its completions, those that stand by, and which of them it is made of.

A group is made of the first G by index of its completions, not of the first G that are done: those are the short ones.
A redundant one takes the place of one that is lost, late or without a reward.
"""

from __future__ import annotations

import math
from concurrent.futures import Future
from dataclasses import dataclass, field

from seedx.envs.text.group import Group
from seedx.envs.text.task import Prompt
from seedx.envs.text.track import Track
from seedx.inference.requests import Handle


@dataclass(eq=False)
class Job:
    """A group that is asked for.

    Attributes:
        position: Of its prompt, which names it.
        prompt: Of the task.
        tokens: The prompt as the model reads it.
        group_size: G, completions that it is made of.
        redundant: Completions beyond these.
        seed: Of the whole group.
        shaped: Whether long completions are punished.
        future: Of the group.
        tracks: Of all completions, the redundant ones last.
        handles: Of this attempt; those of earlier ones are ignored.
        is_cut: Whether it makes do with the completions that are there, and what is under way is lost.
        attempt: How often it was asked for before.
        asked_at: When, on the monotonic clock.
    """

    position: int
    prompt: Prompt
    tokens: tuple[int, ...]
    group_size: int
    redundant: int
    seed: int
    shaped: bool
    future: Future[Group]
    tracks: list[Track] = field(default_factory=list)
    handles: set[Handle] = field(default_factory=set)
    is_cut: bool = False
    attempt: int = 0
    asked_at: float = math.inf

    def reset(self) -> None:
        """Begins the next attempt."""
        self.tracks = [Track(is_redundant=i >= self.group_size) for i in range(self.group_size + self.redundant)]
        self.handles, self.is_cut, self.asked_at = set(), False, math.inf

    @property
    def has_enough(self) -> bool:
        """Whether completions that are lost can be done without."""
        return sum(not track.is_lost for track in self.tracks) >= self.group_size

    def wanted(self) -> list[Track]:
        """Those that the group is to be made of, as things are: the first by index, in this order.

        Those whose reward could not be computed are among them for want of others alone. Needs `has_enough`.
        """
        left = [track for track in self.tracks if not track.is_lost]
        chosen = set(sorted(left, key=lambda track: track.is_unscored)[: self.group_size])  # a stable sort
        return [track for track in left if track in chosen]

    def drop_handles(self) -> None:
        """Cancels what is under way."""
        for handle in self.handles:
            handle.cancel()

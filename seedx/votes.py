"""What the hosts of one learner tell each other with every update.

They compute it together, so none may leave out one that the others have begun. Who wants to stop, or has no batch,
therefore says so in a vote that travels with the update; all read the same votes and act alike after it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

# What stops a run on all hosts; if they differ, the first one here that a host has.
REASONS = ("failed", "SIGTERM", "SIGINT", "steps", "seconds")


class Vote(NamedTuple):
    """What one host says with an update."""

    stop: str | None  # one of `REASONS`
    learns: bool  # whether its batch holds transitions
    env_steps: int  # that are new with its batch
    return_mean: float
    episodes: int  # that the mean is over

    def row(self) -> np.ndarray:
        """As float32 `[5]`."""
        stop = 0 if self.stop is None else REASONS.index(self.stop) + 1
        return np.array(
            [stop, self.learns, self.env_steps, self.return_mean if self.episodes else 0.0, self.episodes], np.float32
        )


class Votes:
    """The votes of all hosts with one update; equal on all hosts.

    Args:
        rows: float32 `[hosts, 5]`, of `Vote.row`.

    Attributes:
        learners: Hosts that learned something.
        env_steps: That are new with this update.
        stop: What stops the run, or None.
        stopper: The host that says so first.
        returns: Mean return over the windows of all hosts (NaN without episodes), and how many episodes they hold.
    """

    def __init__(self, rows: np.ndarray) -> None:
        stops, learns, steps, means, episodes = rows.T.astype(np.float64)
        self.learners = int(learns.sum())
        self.env_steps = int(steps.sum())
        self.stopper = int(np.argmin(np.where(stops > 0, stops, np.inf)))
        self.stop = REASONS[int(stops[self.stopper]) - 1] if stops.any() else None
        count = int(episodes.sum())
        self.returns = (float(np.dot(means, episodes)) / count if count else float("nan")), count

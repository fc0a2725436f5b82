"""Ape-X DQN (arXiv 1803.00933): n-step double Q-learning from prioritized replay of single transitions."""

import dataclasses
from typing import Any

from seedx.agents.r2d2 import R2D2
from seedx.config import Config, R2D2Config, require
from seedx.types import EnvSpec


class Apex(R2D2):
    """An `Agent`: R2D2 without burn-in, rescaling and sequences.

    An item is `num_steps` transitions, and one begins at every row (`learner.period` 1). The first transition is what
    is learned from, the others are its horizon.
    """

    def __init__(self, config: Config, spec: EnvSpec) -> None:
        steps, length, burn_in = config.apex.num_steps, config.learner.unroll_length, config.learner.burn_in
        require(
            steps == length and burn_in == 0,
            f"agent 'apex' learns from the first of learner.unroll_length ({length}) transitions, the others are its "
            f"horizon of apex.num_steps ({steps}): the two must be equal, and learner.burn_in ({burn_in}) 0.",
        )
        r2d2 = R2D2Config(**dataclasses.asdict(config.apex), rescale=False, priority_eta=1.0)
        super().__init__(dataclasses.replace(config, r2d2=r2d2), spec)

    def _trained(self, executed: Any) -> Any:
        """The rows whose whole horizon is in the unroll."""
        xp = executed.__array_namespace__()
        rows = xp.arange(executed.shape[0]) <= executed.shape[0] - self._config.num_steps
        return executed & rows[:, None]

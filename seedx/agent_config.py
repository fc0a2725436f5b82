"""The settings of the agents, one frozen dataclass for each."""

from __future__ import annotations

from dataclasses import dataclass

from seedx.checks import not_negative, positive, require


@dataclass(frozen=True)
class ImpalaConfig:
    """V-trace actor-critic (1802.01561). Losses are means over executed transitions.

    Attributes:
        discount: gamma.
        lambda_: lambda of the trace.
        clip_rho: rho-bar of the value target, at least 1: c-bar is fixed at 1, and rho-bar >= c-bar.
        clip_pg_rho: rho-bar of the policy gradient.
        entropy_cost: Weight of the entropy bonus.
        value_cost: Weight of the value loss (half squared error).
        max_abs_reward: Rewards are clipped to +- this in the loss; 0: not clipped.
    """

    discount: float = 0.99
    lambda_: float = 1.0
    clip_rho: float = 1.0
    clip_pg_rho: float = 1.0
    entropy_cost: float = 0.01
    value_cost: float = 0.5
    max_abs_reward: float = 0.0

    def __post_init__(self) -> None:
        require(0 <= self.discount <= 1, f"impala.discount ({self.discount}) must lie in [0, 1].")
        require(0 <= self.lambda_ <= 1, f"impala.lambda_ ({self.lambda_}) must lie in [0, 1].")
        require(
            self.clip_rho >= 1,
            f"impala.clip_rho ({self.clip_rho}) must be >= 1: V-trace needs rho-bar >= c-bar, and c-bar is 1.",
        )
        positive(self, "clip_pg_rho")
        not_negative(self, "max_abs_reward")


@dataclass(frozen=True)
class ApexConfig:
    """Ape-X DQN (1803.00933). An item must be `num_steps` transitions long (`learner.unroll_length`).

    Attributes:
        discount: gamma.
        num_steps: n of the n-step targets.
        epsilon: Exploration of the first environment; that of the last is epsilon^epsilon_power, geometric in between.
        epsilon_power: See `epsilon`.
        max_abs_reward: Rewards are clipped to +- this in the loss; 0: not clipped.
    """

    discount: float = 0.99
    num_steps: int = 3
    epsilon: float = 0.4
    epsilon_power: float = 8.0
    max_abs_reward: float = 0.0

    def __post_init__(self) -> None:
        require(0 <= self.discount <= 1, f"{type(self).__name__}.discount ({self.discount}) must lie in [0, 1].")
        require(0 <= self.epsilon <= 1, f"{type(self).__name__}.epsilon ({self.epsilon}) must lie in [0, 1].")
        positive(self, "num_steps", "epsilon_power")
        not_negative(self, "max_abs_reward")


@dataclass(frozen=True)
class R2D2Config(ApexConfig):
    """Recurrent replay distributed DQN (Kapturowski et al., ICLR 2019, OpenReview r1lyTjAqYX).

    Attributes:
        discount: gamma.
        num_steps: n of the n-step targets.
        epsilon: Exploration of the first environment; that of the last is epsilon^epsilon_power, geometric in between.
        epsilon_power: See `epsilon`.
        max_abs_reward: Rewards are clipped to +- this in the loss; 0: not clipped.
        rescale: Whether values are learned under the rescaling h.
        priority_eta: Share of the largest error in a priority; the mean error has the rest.
    """

    discount: float = 0.997
    num_steps: int = 5
    rescale: bool = True
    priority_eta: float = 0.9

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 <= self.priority_eta <= 1, f"r2d2.priority_eta ({self.priority_eta}) must lie in [0, 1].")

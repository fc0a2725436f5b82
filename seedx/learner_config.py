"""The settings of the learner."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from seedx.checks import not_negative, positive, require


@dataclass(frozen=True)
class LearnerConfig:
    """The learner.

    Attributes:
        batch_size: Unrolls of one update.
        unroll_length: T, transitions that an unroll is trained on; see `Config.unroll_rows`.
        burn_in: Rows before these that only warm up the recurrent state.
        period: Rows from the start of one unroll to that of the next; 0: T, so that every transition is trained on in
            one unroll.
        microbatches: Parts that a batch is split into; their gradients are accumulated.
        optimizer: "rmsprop" (eps outside the root, as PyTorch) or "adam".
        learning_rate: Step size at the start.
        learning_rate_end: Step size at `learning_rate_steps`, linear in between.
        learning_rate_steps: Environment steps of the schedule; 0: constant.
        rmsprop_decay: Decay of RMSProp's second moment.
        epsilon: Epsilon of the optimizer, against gradients of the mean loss.
        max_grad_norm: Global-norm clip of the mean loss's gradient; 0: none.
        target_period: Updates between copies of the network to the target network; 0: there is none.
        devices: Devices that learn; 0: all.
        inference_devices: Devices set aside for inference; 0: shared with learning. Of several hosts, each has so many
            devices, and gives an equal part of `batch_size`.
        host_wait_s: How long the hosts of one learner wait for each other at the start, seconds.
        batch_wait_s: How long they wait for one that is short of data, seconds; then the others learn without it.
    """

    batch_size: int = 32
    unroll_length: int = 20
    burn_in: int = 0
    period: int = 0
    microbatches: int = 1
    optimizer: Literal["rmsprop", "adam"] = "adam"
    learning_rate: float = 1e-3
    learning_rate_end: float = 0.0
    learning_rate_steps: int = 0
    rmsprop_decay: float = 0.99
    epsilon: float = 1e-5
    max_grad_norm: float = 0.5
    target_period: int = 0
    devices: int = 0
    inference_devices: int = 0
    host_wait_s: float = 300.0
    batch_wait_s: float = 1.0

    def __post_init__(self) -> None:
        positive(self, "batch_size", "unroll_length", "microbatches", "learning_rate", "epsilon")
        positive(self, "host_wait_s", "batch_wait_s")
        not_negative(self, "learning_rate_end", "learning_rate_steps", "max_grad_norm", "target_period")
        not_negative(self, "burn_in", "period")
        require(
            self.period <= self.unroll_length,
            f"learner.period ({self.period}) must not exceed learner.unroll_length ({self.unroll_length}): transitions "
            "in between would never be trained on.",
        )
        not_negative(self, "devices", "inference_devices")
        require(0 <= self.rmsprop_decay < 1, f"learner.rmsprop_decay ({self.rmsprop_decay}) must lie in [0, 1).")
        require(
            self.batch_size % self.microbatches == 0,
            f"learner.batch_size ({self.batch_size}) must be divisible by learner.microbatches ({self.microbatches}).",
        )

    @property
    def stride(self) -> int:
        """Rows from the start of one unroll to that of the next."""
        return self.period or self.unroll_length

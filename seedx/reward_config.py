"""The settings of reward workers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from seedx.checks import not_negative, positive, require


@dataclass(frozen=True)
class RewardConfig:
    """The processes that compute rewards.

    Attributes:
        workers: Processes. Each computes one reward at a time, or `concurrency` of them if the task's rewards wait.
        timeout_s: From the start of a reward or reply until its process is killed and replaced, seconds.
        retries: How often a reward that raised, took too long or was no number is computed again; then the completion
            stays without a score.
        memory_bytes: Address space of one process, bytes; beyond it a reward gets MemoryError.
        concurrency: Rewards that a process computes at the same time if the task says that they wait (`reward_waits`).
        sandbox: "strict": code of a model runs in namespaces of its own, or not at all where the system refuses them;
            "unsafe": it runs as an ordinary process, with this user's rights and network.
    """

    workers: int = 1
    timeout_s: float = 10.0
    retries: int = 1
    memory_bytes: int = 4 * 2**30
    concurrency: int = 64
    sandbox: Literal["strict", "unsafe"] = "strict"

    def __post_init__(self) -> None:
        positive(self, "workers", "timeout_s", "memory_bytes", "concurrency")
        not_negative(self, "retries")
        require(
            self.timeout_s <= 600,
            f"reward.timeout_s ({self.timeout_s}) must be at most 600 seconds: for so long a reward that never ends "
            "holds its worker.",
        )
        require(
            self.memory_bytes >= 2**28,
            f"reward.memory_bytes ({self.memory_bytes}) must be at least {2**28} (256 MiB): Python itself needs some.",
        )

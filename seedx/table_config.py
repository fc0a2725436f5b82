"""The settings of the table between acting and learning."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from seedx.checks import not_negative, positive, require


@dataclass(frozen=True)
class TableConfig:
    """The table between acting and learning, in Reverb's words (2102.04736). Defaults: a queue of two batches.

    Attributes:
        sampler: Which items are sampled.
        remover: Which item makes room when the table is full.
        priority_exponent: alpha of the prioritized sampler: P(i) = p_i^alpha / sum p^alpha.
        importance_exponent: beta of the loss's weights (N P(i))^-beta, divided by the batch's largest; 0: all 1.
        max_size: Items that the table holds; 0: two batches.
        max_times_sampled: An item is removed when it was sampled so often; 0: never.
        min_size: Items before the first sample.
        samples_per_insert: How often an item is sampled on average, which inserts and samples wait for; 0: as it comes.
        error_buffer: Samples by which that may be exceeded or missed at a time; 0: four batches.
        max_bytes: Bytes that the table holds; rows that unrolls share count once. Where they are used up before
            `max_size`, items make room as if that were smaller.
        give_up_s: How long a Reverb server that is not to be had is waited for, seconds.
    """

    sampler: Literal["fifo", "lifo", "uniform", "prioritized"] = "fifo"
    remover: Literal["fifo", "lifo", "uniform"] = "fifo"
    priority_exponent: float = 0.6
    importance_exponent: float = 0.4
    max_size: int = 0
    max_times_sampled: int = 1
    min_size: int = 1
    samples_per_insert: float = 0.0
    error_buffer: float = 0.0
    max_bytes: int = 2**30
    give_up_s: float = 120.0

    def __post_init__(self) -> None:
        positive(self, "min_size", "max_bytes", "give_up_s")
        not_negative(self, "max_size", "max_times_sampled", "samples_per_insert", "error_buffer")
        not_negative(self, "priority_exponent", "importance_exponent")
        require(
            self.max_size == 0 or self.min_size <= self.max_size,
            f"table.min_size ({self.min_size}) must not exceed table.max_size ({self.max_size}).",
        )

    @property
    def is_queue(self) -> bool:
        """Whether items leave in the order in which they came, each exactly once."""
        return self.sampler == "fifo" and self.max_times_sampled == 1

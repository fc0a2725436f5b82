"""When inserts and samples of a table have to wait: Reverb's rate limiter (2102.04736, section 3.4), for batches."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import NamedTuple

from seedx.checks import require
from seedx.config import TableConfig

UNBOUNDED = sys.float_info.max  # what Reverb has where a difference is not limited


class Limits(NamedTuple):
    """The four figures of Reverb's `RateLimiter`. Difference: inserted items * samples_per_insert - sampled items."""

    samples_per_insert: float
    min_size: int  # items before the first sample; up to it inserts never wait
    min_diff: float  # samples wait rather than push the difference below it
    max_diff: float  # inserts wait rather than push the difference above it


def limits_for(table: TableConfig, batch_size: int) -> Limits:
    """The limits of a table: Reverb's `Queue` for a queue, `SampleToInsertRatio` for a ratio, else `MinSize`.

    Args:
        table: Its settings.
        batch_size: Items of a sample.

    Raises:
        ConfigError: inserts and samples would come to wait for each other.
    """
    max_size = table.max_size or 2 * batch_size
    samples, ratio = table.max_times_sampled, table.samples_per_insert
    require(
        table.min_size <= max_size,
        f"table.min_size ({table.min_size}) must not exceed the {max_size} items that the table holds; "
        "raise --table.max-size.",
    )
    require(
        samples == 0 or batch_size <= samples * max_size,
        f"learner.batch_size ({batch_size}) does not fit: a table of {max_size} items that are each sampled at most "
        f"{samples} times never gives so many. Raise --table.max-size to at least {-(-batch_size // max(samples, 1))}.",
    )
    if table.is_queue:
        require(
            table.min_size == 1 and ratio in (0, 1),
            f"a queue gives each item once and as soon as it can: table.min_size ({table.min_size}) must be 1 and "
            f"table.samples_per_insert ({ratio:g}) 0. For a replay raise --table.max-times-sampled, or 0: no limit.",
        )
        return Limits(1.0, 1, 0.0, float(max_size))
    if ratio == 0:
        return Limits(1.0, table.min_size, -UNBOUNDED, UNBOUNDED)
    require(
        samples == 0 or ratio <= samples,
        f"table.samples_per_insert ({ratio:g}) cannot be reached: an item is sampled at most "
        f"table.max_times_sampled ({samples}) times. Lower the first or raise the second, or 0: no limit.",
    )
    error = table.error_buffer or 4.0 * batch_size
    least = max(1.0, ratio, float(batch_size))
    require(
        error >= least,
        f"table.error_buffer ({error:g} samples) must be at least {least:g}: a batch has {batch_size} samples, an "
        f"insert gives {ratio:g}, and either must fit while the other waits. Raise --table.error-buffer.",
    )
    middle = ratio * table.min_size
    return Limits(ratio, table.min_size, middle - error, middle + error)


@dataclass
class RateLimiter:
    """Counts what a table did, and says what it may do.

    Attributes:
        limits: Its limits.
        inserted: Items inserted.
        deleted: Items that left, for whatever reason.
        sampled: Items sampled.
    """

    limits: Limits
    inserted: int = 0
    deleted: int = 0
    sampled: int = 0

    @property
    def difference(self) -> float:
        """What the limits hold in bounds."""
        return self.inserted * self.limits.samples_per_insert - self.sampled

    def settle(self) -> None:
        """Brings the difference into its bounds, as if there had been more or fewer samples; after they were changed.

        Else all that the new ones ask more or less of the past would have to be made up for first.
        """
        earned = self.inserted * self.limits.samples_per_insert
        lowest, highest = earned - self.limits.max_diff, earned - self.limits.min_diff
        self.sampled = round(min(max(self.sampled, lowest), highest))

    def may_insert(self, count: int) -> bool:
        """Whether so many items may be inserted together.

        An insert of more than half the band is let in where half of it would be: it could not wait for more room,
        since from the middle of the band a batch of samples need not be possible.
        """
        ratio, min_size, min_diff, max_diff = self.limits
        if self.inserted - self.deleted + count <= min_size:
            return True
        half = max_diff / 2 - min_diff / 2
        return self.difference + min(count * ratio, max(half, ratio)) <= max_diff

    def may_sample(self, count: int) -> bool:
        """Whether so many items may be sampled together; one decision, even if items leave on the way."""
        enough = self.inserted - self.deleted >= self.limits.min_size
        return enough and self.difference - count >= self.limits.min_diff

    def describe(self) -> str:
        """The counters and limits, for an error."""
        ratio, _, min_diff, max_diff = self.limits
        counters = f"{self.inserted} inserted, {self.deleted} deleted, {self.sampled} sampled"
        if max_diff == UNBOUNDED:
            return counters
        return (
            f"{counters}, so that inserted * samples_per_insert ({ratio:g}) - sampled is {self.difference:g}, which "
            f"stays in {min_diff:g} to {max_diff:g}"
        )

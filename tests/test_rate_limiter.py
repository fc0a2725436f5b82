"""The rate limiter: Reverb's figures, and no limits under which inserts and samples wait for each other."""

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seedx.checks import ConfigError
from seedx.config import TableConfig
from seedx.replay.rate_limiter import UNBOUNDED, Limits, RateLimiter, limits_for


def config(**changes):
    return dataclasses.replace(TableConfig(sampler="uniform", max_size=100, max_times_sampled=0), **changes)


def test_limits_are_those_of_reverb():
    """Figures that a Reverb server reports for its own constructors."""
    assert limits_for(config(sampler="fifo", max_times_sampled=1, max_size=3), 2) == Limits(1.0, 1, 0.0, 3.0)
    assert limits_for(config(sampler="fifo", max_times_sampled=1, max_size=0), 2) == Limits(1.0, 1, 0.0, 4.0)
    ratio = config(samples_per_insert=2.0, min_size=2, error_buffer=4.0)
    assert limits_for(ratio, 2) == Limits(2.0, 2, 0.0, 8.0)
    assert limits_for(dataclasses.replace(ratio, error_buffer=0.0), 16) == Limits(2.0, 2, -60.0, 68.0)
    assert limits_for(config(min_size=7), 2) == Limits(1.0, 7, -UNBOUNDED, UNBOUNDED)
    assert math.isfinite(UNBOUNDED)


@pytest.mark.parametrize(
    ("changes", "batch_size", "message"),
    [
        ({"samples_per_insert": 8.0, "error_buffer": 7.0}, 2, r"error_buffer \(7 samples\) must be at least 8"),
        ({"samples_per_insert": 0.1, "error_buffer": 0.5}, 1, r"error_buffer \(0\.5 samples\) must be at least 1"),
        ({"samples_per_insert": 1.0, "error_buffer": 31.0}, 32, r"error_buffer \(31 samples\) must be at least 32"),
        ({"samples_per_insert": 4.0, "max_times_sampled": 3}, 2, r"samples_per_insert \(4\) cannot be reached"),
        ({"max_times_sampled": 2, "max_size": 10}, 21, r"batch_size \(21\) does not fit.*at least 11"),
        ({"max_size": 0, "min_size": 9}, 4, r"min_size \(9\) must not exceed the 8 items"),
        ({"sampler": "fifo", "max_times_sampled": 1, "max_size": 3}, 4, r"batch_size \(4\) does not fit"),
        ({"sampler": "fifo", "max_times_sampled": 1, "min_size": 2}, 4, r"table\.min_size \(2\) must be 1"),
        ({"sampler": "fifo", "max_times_sampled": 1, "samples_per_insert": 0.5}, 4, r"samples_per_insert \(0\.5\) 0"),
    ],
)
def test_limits_under_which_both_sides_would_wait_are_refused(changes, batch_size, message):
    with pytest.raises(ConfigError, match=message):
        limits_for(config(**changes), batch_size)


@given(
    ratio=st.sampled_from([0.1, 0.3, 1.0, 1.7, 8.0]),
    min_size=st.integers(1, 20),
    batch_size=st.integers(1, 8),
    error=st.floats(0, 20),
    chunks=st.lists(st.integers(1, 50), min_size=1, max_size=5),
    greed=st.lists(st.booleans(), min_size=1, max_size=7),
)
def test_inserts_and_samples_never_wait_for_each_other(ratio, min_size, batch_size, error, chunks, greed):
    """Whatever the sizes of inserts are, one side may always go on, and the realised ratio comes out."""
    error += max(batch_size, ratio, 1.0)
    settings_ = config(samples_per_insert=ratio, min_size=min_size, error_buffer=error, max_size=10_000)
    limits = limits_for(settings_, batch_size)
    limiter, steps = RateLimiter(limits), 300
    for i in range(steps):
        chunk = chunks[i % len(chunks)]
        insert_, sample = limiter.may_insert(chunk), limiter.may_sample(batch_size)
        assert insert_ or sample
        if insert_ and (greed[i % len(greed)] or not sample):
            limiter.inserted += chunk
        else:
            limiter.sampled += batch_size
        over = max(0.0, max(chunks) * ratio - error) if limiter.inserted > min_size else math.inf
        assert limiter.inserted <= min_size + max(chunks) or limiter.difference <= limits.max_diff + over + 1e-9
        assert limiter.sampled == 0 or limiter.difference >= limits.min_diff - 1e-9


def test_one_item_at_a_time_the_limiter_is_reverbs():
    limiter = RateLimiter(Limits(2.0, 2, 0.0, 8.0))
    for inserted, sampled in [(4, 0), (4, 6), (7, 6), (7, 14), (20, 3)]:
        limiter.inserted, limiter.sampled = inserted, sampled
        assert limiter.may_insert(1) == ((inserted + 1) * 2 - sampled <= 8)
        assert limiter.may_sample(1) == (inserted * 2 - sampled - 1 >= 0)
    limiter.deleted = 19  # one item left: up to min_size inserts never wait, and samples always do
    assert limiter.may_insert(1)
    assert not limiter.may_insert(2)
    assert not limiter.may_sample(1)

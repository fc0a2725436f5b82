"""Many different numbers out of a range, always the same ones: what the built-in tasks make their prompts of."""

from __future__ import annotations

import numpy as np

from seedx.envs.counter_rng import draw


def distinct_codes(stream: int, count: int, high: int) -> np.ndarray:
    """`count` different integers of `0 .. high-1` in random order, int64 `[count]`; a function of its arguments alone.

    Does not depend on NumPy's generators, whose numbers may change with its version.
    """
    assert 0 < count <= high
    num_draws = count
    while True:
        num_draws *= 2
        drawn = draw(np.full(num_draws, stream, np.uint64), np.arange(num_draws, dtype=np.uint64), high)
        _, first = np.unique(drawn, return_index=True)
        if len(first) >= count:
            return drawn[np.sort(first)[:count]]

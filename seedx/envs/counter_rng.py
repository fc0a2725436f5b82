"""Random numbers for vectorised environments: each is a function of (seed, counter), so rows never share a stream."""

from __future__ import annotations

import numpy as np

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def draw(seeds: np.ndarray, counter: np.ndarray, high: int) -> np.ndarray:
    """Integers uniform in `0 .. high-1`, int64 `[N]`: numbers `counter` (uint64 `[N]`) of streams `seeds` (likewise).

    SplitMix64 (Steele, Lea, Flood 2014) with its seed mixed first, so that neighbouring seeds are unrelated.
    """
    return (_mix(_mix(seeds + _GOLDEN) + counter * _GOLDEN) % np.uint64(high)).astype(np.int64)


def _mix(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))

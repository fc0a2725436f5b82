"""PRNG keys of a run: one for each purpose, so that no two uses ever share a key."""

from __future__ import annotations

from enum import IntEnum

import jax


class Purpose(IntEnum):
    """What a key is for."""

    INIT = 0
    ACT = 1
    LOSS = 2


def run_key(seed: int, purpose: Purpose) -> jax.Array:
    """The key of a purpose in the run of a seed."""
    return jax.random.fold_in(jax.random.key(seed), purpose)

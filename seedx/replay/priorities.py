"""Which priorities a table takes."""

from __future__ import annotations

import numpy as np

from seedx.replay.sum_tree import MAX_VALUE


def checked(priorities: np.ndarray, count: int, exponent: float = 1.0) -> np.ndarray:
    """Priorities as float64 `[count]`.

    Args:
        priorities: As many.
        count: Items.
        exponent: alpha of the weights p^alpha that a table makes of them.

    Raises:
        ValueError: one is negative, not finite, or too large for p^alpha; or they are not so many.
    """
    largest = MAX_VALUE ** (1 / max(exponent, 1.0))
    priorities = np.asarray(priorities, np.float64)
    if priorities.shape != (count,):
        raise ValueError(f"priorities {list(priorities.shape)} must be a vector, one for each of {count} items.")
    wrong = ~((priorities >= 0) & (priorities <= largest))
    if wrong.any():
        raise ValueError(
            f"priority {priorities[wrong][0]} (item {int(wrong.argmax())} of {len(priorities)}) must lie in 0 to "
            f"{largest:.3g}; see what the agent's initial_priorities or loss made it from."
        )
    return priorities

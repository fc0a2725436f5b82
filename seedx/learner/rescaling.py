"""The invertible rescaling of values that stands in for reward clipping in R2D2 (arXiv 1805.11593, section 3.2)."""

from typing import TypeVar

import jax
import numpy as np
from jaxtyping import Float

A = TypeVar("A", jax.Array, np.ndarray)
EPSILON = 1e-3


def rescale(x: Float[A, "*B"]) -> Float[A, "*B"]:
    """h(x) = sign(x) (sqrt(|x| + 1) - 1) + epsilon x, in a form without cancellation near 0."""
    xp = x.__array_namespace__()
    size = xp.abs(x)
    return xp.sign(x) * size / (xp.sqrt(size + 1) + 1) + EPSILON * x


def unscale(x: Float[A, "*B"]) -> Float[A, "*B"]:
    """The inverse of `rescale`: w (w + 2), where epsilon w^2 + (1 + 2 epsilon) w = |x|.

    The root is written without a difference of nearly equal numbers, which costs the textbook form five digits at .001.
    """
    xp = x.__array_namespace__()
    size, b = xp.abs(x), 1 + 2 * EPSILON
    w = 2 * size / (b + xp.sqrt(b * b + 4 * EPSILON * size))
    return xp.sign(x) * w * (w + 2)

"""Rotary position embeddings (2104.09864): frequencies, their scaling, and the rotation."""

import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from seedx.networks.transformer_config import RopeScaling


def frequencies(head_dim: int, theta: float, scaling: RopeScaling | None) -> Float[np.ndarray, "H"]:
    """Radians per position of each pair of dimensions `[head_dim / 2]`, float32."""
    plain = theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if scaling is None:
        return plain.astype(np.float32)
    stretched = plain / scaling.factor
    match scaling.kind:
        case "llama3":
            turns = scaling.original_length * plain / (2 * math.pi)
            low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
            stretched = _blend(stretched, plain, (turns - low) / (high - low))
        case "yarn":
            first = _dimension_of(scaling.beta_fast, head_dim, theta, scaling)
            last = _dimension_of(scaling.beta_slow, head_dim, theta, scaling)
            if scaling.truncate:
                first, last = math.floor(first), math.ceil(last)
            first, last = max(first, 0), min(last, head_dim - 1)
            ramp = (np.arange(head_dim // 2) - first) / (last - first if last != first else 0.001)
            stretched = _blend(plain, stretched, ramp)
    return stretched.astype(np.float32)


def _blend(a: np.ndarray, b: np.ndarray, share: np.ndarray) -> np.ndarray:
    share = np.clip(share, 0.0, 1.0)
    return a * (1 - share) + b * share


def _dimension_of(turns: float, head_dim: int, theta: float, scaling: RopeScaling) -> float:
    """Which pair of dimensions makes so many turns in the original context (2309.00071, section 3.2)."""
    return head_dim * math.log(scaling.original_length / (turns * 2 * math.pi)) / (2 * math.log(theta))


def angles(
    positions: Int[Array, "B L"], head_dim: int, theta: float, scaling: RopeScaling | None
) -> tuple[Float[Array, "B L H"], Float[Array, "B L H"]]:
    """Cosine and sine of every position, float32."""
    angle = positions.astype(jnp.float32)[..., None] * frequencies(head_dim, theta, scaling)[None, None]
    factor = scaling.attention_factor if scaling else 1.0
    return jnp.cos(angle) * factor, jnp.sin(angle) * factor


def rotate(
    x: Float[Array, "B L K N E"], cos: Float[Array, "B L H"], sin: Float[Array, "B L H"]
) -> Float[Array, "B L K N E"]:
    """Turns the pairs (i, i + E/2) of every head, in float32."""
    cos, sin = cos[:, :, None, None], sin[:, :, None, None]
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)

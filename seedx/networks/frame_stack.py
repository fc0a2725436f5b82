"""Frame stacks made on the device, so that a frame crosses the wire, the store and the bus once.

Acting keeps a ring of the k-1 frames before the current one, oldest first, on the channel axis; learning finds them in
the rows before. Where an episode starts, the stack is its first frame k times. This equals EnvPool's `stack_num=k`
(channel-last) with one exception: with `episodic_life`, EnvPool carries the stack over a lost life, and here the stack
restarts at every FIRST.
"""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Bool, Shaped

from seedx.types import ArraySpec


def stacked_spec(spec: ArraySpec, k: int) -> ArraySpec:
    """The spec of k stacked frames, `[H, W, C k]`."""
    height, width, channels = (*spec.shape, 1)[:3]
    return dataclasses.replace(spec, shape=(height, width, channels * k))


def empty_ring(batch_size: int, spec: ArraySpec, k: int) -> Shaped[Array, "B H W R"]:
    """The ring before any frame; `spec` is of one frame, `[H, W]` or `[H, W, C]`."""
    return jnp.asarray(stacked_spec(spec, k - 1).zeros(batch_size))


def push(
    ring: Shaped[Array, "B H W R"], frame: Shaped[Array, "B H W *C"], first: Bool[Array, "B"]
) -> tuple[Shaped[Array, "B H W R"], Shaped[Array, "B H W K"]]:
    """Adds one frame a row.

    Args:
        ring: The k-1 frames before; R = C (k-1).
        frame: The current frame, with or without a channel axis.
        first: Whether the frame starts an episode.

    Returns:
        The next ring, and the stack of k frames, K = C k, oldest first.
    """
    frame = _with_channels(frame, 4)
    channels = frame.shape[-1]
    k = ring.shape[-1] // channels + 1
    stack = jnp.concatenate([ring, frame], axis=-1)
    stack = jnp.where(first[:, None, None, None], jnp.tile(frame, k), stack)
    return stack[..., channels:], stack


def stack_rows(frames: Shaped[Array, "R B H W *C"], first: Bool[Array, "R B"], k: int) -> Shaped[Array, "T B H W K"]:
    """The stacks that `push` makes row by row, for all rows but the first k-1 at once; T = R - (k-1).

    Args:
        frames: One frame a row, with or without a channel axis.
        first: Whether the row starts an episode.
        k: Frames of a stack.
    """
    frames = _with_channels(frames, 5)

    def before(leaf: Array, lag: int) -> Array:
        return leaf[k - 1 - lag : leaf.shape[0] - lag]

    lags = [before(frames, 0)]
    crossed = jnp.zeros_like(before(first, 0))  # whether an episode starts between the frame of that lag and the row
    for lag in range(1, k):
        crossed |= before(first, lag - 1)
        # Beyond the start of its episode a row repeats the first frame, which the shorter lag already holds.
        lags.append(jnp.where(crossed[..., None, None, None], lags[-1], before(frames, lag)))
    return jnp.concatenate(lags[::-1], axis=-1)


def _with_channels(frame: Array, ndim: int) -> Array:
    return frame if frame.ndim == ndim else frame[..., None]

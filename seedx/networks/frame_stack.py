"""Frame stacks made on the device, so that a frame crosses the wire and the store once.

A ring holds the k-1 frames before the current one, oldest first, on the channel axis. Where an episode starts, the
stack is its first frame k times. This equals EnvPool's `stack_num=k` (channel-last) with one exception: with
`episodic_life`, EnvPool carries the stack over a lost life, and here the stack restarts at every FIRST.
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


def stack_unroll(
    ring: Shaped[Array, "B H W R"], frames: Shaped[Array, "T B H W *C"], first: Bool[Array, "T B"]
) -> tuple[Shaped[Array, "B H W R"], Shaped[Array, "T B H W K"]]:
    """The stacks that `push` makes row by row, for all rows of an unroll at once.

    Args:
        ring: The k-1 frames before row 0; R = C (k-1).
        frames: One frame a row, with or without a channel axis.
        first: Whether the row starts an episode.

    Returns:
        The ring after the last row, and the stacks.
    """
    frames = _with_channels(frames, 5)
    rows, channels = frames.shape[0], frames.shape[-1]
    previous = jnp.split(ring, ring.shape[-1] // channels, axis=-1)  # oldest first, like rows -(k-1) .. -1
    lags = [frames]
    crossed = jnp.zeros_like(first)  # whether an episode starts between the frame of that lag and the row
    for lag in range(1, len(previous) + 1):
        lead = jnp.stack(previous[-lag:])
        crossed |= jnp.concatenate([jnp.zeros_like(first[: lag - 1]), first[: rows - lag + 1]])[:rows]
        lagged = jnp.concatenate([lead, frames])[:rows]
        # Beyond the start of its episode a row repeats the first frame, which the shorter lag already holds.
        lags.append(jnp.where(crossed[..., None, None, None], lags[-1], lagged))
    stacks = jnp.concatenate(lags[::-1], axis=-1)
    return stacks[-1, ..., channels:], stacks


def _with_channels(frame: Array, ndim: int) -> Array:
    return frame if frame.ndim == ndim else frame[..., None]

"""Stacks made on the device against EnvPool's own, and both of our ways against each other."""

import envpool
import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from seedx.networks.frame_stack import empty_ring, push, stack_unroll, stacked_spec
from seedx.types import ArraySpec

jitted_push, jitted_unroll = jax.jit(push), jax.jit(stack_unroll)
FRAME = ArraySpec((84, 84), "uint8")


def record(stack_num, actions):
    """EnvPool observations `[T+1, N, stack, 84, 84]` and whether each starts an episode."""
    steps, num_envs = actions.shape
    env = envpool.make(
        "Breakout-v5",
        env_type="gymnasium",
        num_envs=num_envs,
        seed=5,
        stack_num=stack_num,
        max_episode_steps=17,
        noop_max=3,
        img_height=84,
        img_width=84,
    )
    observations, first = [env.reset()[0]], [np.ones(num_envs, bool)]
    done = np.zeros(num_envs, bool)
    for t in range(steps):
        observation, _, terminated, truncated, _ = env.step(actions[t])
        observations.append(observation)
        first.append(done)
        done = terminated | truncated
    env.close()
    return np.stack(observations), np.stack(first)


def test_equals_envpool_over_resets_step_by_step_and_over_unrolls():
    actions = np.random.default_rng(0).integers(0, 4, (59, 2))
    frames, first = record(1, actions)
    want, _ = record(4, actions)
    frames, want = frames[:, :, 0], np.moveaxis(want, 2, -1)
    assert first.sum() >= 6
    assert any((frames[t] != frames[t - 1]).any() for t in range(1, 20))

    ring = empty_ring(2, FRAME, 4)
    for t in range(len(frames)):
        ring, stack = jitted_push(ring, frames[t], first[t])
        np.testing.assert_array_equal(stack, want[t], err_msg=f"row {t}")

    ring = empty_ring(2, FRAME, 4)
    for t in range(0, len(frames), 12):
        rows = slice(t, t + 12)
        ring, stacks = jitted_unroll(ring, frames[rows], first[rows])
        np.testing.assert_array_equal(stacks, want[rows], err_msg=f"unroll from row {t}")


@settings(deadline=None, max_examples=30)
@given(
    seed=st.integers(0, 1000),
    k=st.sampled_from([2, 4]),
    rows=st.sampled_from([1, 2, 7]),
    channels=st.sampled_from([None, 1, 3]),
)
def test_an_unroll_is_pushes(seed, k, rows, channels):
    rng = np.random.default_rng(seed)
    shape = (3, 2) if channels is None else (3, 2, channels)
    frames = rng.integers(0, 255, (rows, 3, *shape), dtype=np.uint8)  # as many rows of the batch as of the image
    first = rng.uniform(size=(rows, 3)) < 0.3
    spec = ArraySpec(shape, "uint8")
    start = jnp.asarray(rng.integers(0, 255, empty_ring(3, spec, k).shape, dtype=np.uint8))
    ring, stacks = start, []
    for frame, starts in zip(frames, first, strict=True):
        ring, stack = jitted_push(ring, frame, starts)
        stacks.append(stack)
    got_ring, got = jitted_unroll(start, frames, first)
    np.testing.assert_array_equal(got, np.stack(stacks))
    np.testing.assert_array_equal(got_ring, ring)
    assert got.shape[2:] == stacked_spec(spec, k).shape
    assert got.dtype == jnp.uint8

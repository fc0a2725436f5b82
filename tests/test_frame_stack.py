"""Stacks made on the device against EnvPool's own, and both of our ways against each other."""

import envpool
import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from seedx.networks.frame_stack import empty_ring, push, stack_rows, stacked_spec
from seedx.types import ArraySpec

jitted_push, jitted_rows = jax.jit(push), jax.jit(stack_rows, static_argnums=2)
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

    for t in range(0, len(frames) - 3, 12):
        rows = slice(t, t + 12)
        stacks = jitted_rows(frames[rows], first[rows], 4)
        np.testing.assert_array_equal(stacks, want[rows][3:], err_msg=f"unroll from row {t}")


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 1000),
    k=st.sampled_from([1, 2, 4]),
    rows=st.sampled_from([1, 2, 7]),
    channels=st.sampled_from([None, 1, 3]),
    begin=st.sampled_from([0, 1, 5]),
    often=st.sampled_from([0.0, 0.3, 1.0]),
)
def test_stacks_of_rows_are_those_of_the_ring_bit_for_bit(seed, k, rows, channels, begin, often):
    """Unrolls that begin with their stream or later; episodes that start anywhere, in leading rows too."""
    rng = np.random.default_rng(seed)
    shape = (3, 2) if channels is None else (3, 2, channels)
    frames = rng.integers(0, 255, (begin + k - 1 + rows, 3, *shape), dtype=np.uint8)  # a batch as wide as the image
    first = rng.uniform(size=frames.shape[:2]) < often
    first[0] = True  # a stream begins so, and forgets who had its slot before
    spec = ArraySpec(shape, "uint8")
    ring, stacks = jnp.asarray(rng.integers(0, 255, empty_ring(3, spec, k).shape, dtype=np.uint8)), []
    for frame, starts in zip(frames, first, strict=True):
        ring, stack = jitted_push(ring, frame, starts)
        stacks.append(stack)
    got = jitted_rows(frames[begin:], first[begin:], k)
    np.testing.assert_array_equal(got, np.stack(stacks)[begin + k - 1 :])
    assert got.shape[2:] == stacked_spec(spec, k).shape
    assert got.dtype == jnp.uint8

"""Small stand-ins: an agent whose gradients fit on paper, random unrolls, an environment with a script."""

import jax
import jax.numpy as jnp
import numpy as np
import optree

from seedx.replay.replay import Sample
from seedx.types import ArraySpec, EnvSpec, LossOutput, StepType, TimeStep, Unroll, transition_mask

VECTOR = EnvSpec("vector", ArraySpec((3,), "float32"), ArraySpec((), "int32", num_values=3))


class Regression:
    """Predicts the next reward from the observation: loss sum_t m_t 1/2 (w . x_t + b - r_{t+1})^2."""

    def init(self, key):
        return {"w": jax.random.normal(key, (3,)), "b": jnp.ones(())}

    def initial_state(self, batch_size):
        return None

    def act(self, params, state, timestep, keys, settings):
        raise NotImplementedError("it only learns")

    def loss(self, params, target_params, unroll, weights, key):
        x, reward = unroll.timestep.observation, unroll.timestep.reward
        error = x[:-1] @ params["w"] + params["b"] - reward[1:]
        mask = transition_mask(unroll.timestep.step_type)
        error = jnp.where(mask, error, 0.0)
        return 0.5 * jnp.sum(jnp.square(error)), LossOutput({"error": jnp.sum(error)}, jnp.sum(mask))


def step_types(num_rows, num_envs, rng):
    """Step types `[num_rows, num_envs]` of episodes that are 2 to 5 rows long and begin anywhere."""
    out = np.empty((num_rows, num_envs), np.uint8)
    for n in range(num_envs):
        rows = []
        while len(rows) < num_rows + 5:
            rows += [StepType.FIRST, *[StepType.MID] * int(rng.integers(0, 4)), StepType.LAST]
        start = int(rng.integers(0, 5))
        out[:, n] = rows[start : start + num_rows]
    return out


def random_unroll(num_envs, length, seed=0, spec=VECTOR, state=None):
    """An unroll `[T+1, B]` of random rows, with some transitions masked."""
    rng = np.random.default_rng(seed)
    rows = (length + 1, num_envs)
    observation, action = optree.tree_map(lambda leaf: draw(leaf, rows, rng), (spec.observation, spec.action))
    step_type = step_types(*rows, rng)
    reward = rng.normal(size=rows).astype(np.float32)
    timestep = TimeStep(step_type, reward, rng.integers(0, 2, rows).astype(np.float32), observation)
    extras = {"log_prob": -rng.uniform(0.5, 2.0, rows).astype(np.float32)}
    return Unroll(timestep, action, extras, np.zeros(rows, np.int32), state)


def sample_of(items):
    """Items `[N, ...]` as a replay gives them, all alike."""
    n = len(items.version)
    keys = np.arange(n, dtype=np.uint64)
    return Sample(items, keys, np.full(n, 1 / n), np.ones(n, np.int32), np.full(n, n))


def draw(leaf, rows, rng):
    """Random values `[*rows, ...]` of a leaf."""
    shape = (*rows, *leaf.shape)
    if leaf.dtype.startswith("float"):
        return rng.uniform(-1, 1, shape).astype(leaf.dtype)
    return rng.integers(0, leaf.num_values or 255, shape).astype(leaf.dtype)

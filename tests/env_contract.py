"""What every `Env` must keep, whatever is behind it."""

import numpy as np
import optree

from seedx.types import StepType


def random_actions(env, rng):
    """The same action for every environment, so that only their seeds tell them apart."""

    def leaf(spec):
        if spec.num_values is not None:
            row = rng.integers(0, spec.num_values, spec.shape)
        else:
            low = -1.0 if spec.minimum is None else spec.minimum
            high = 1.0 if spec.maximum is None else spec.maximum
            row = rng.uniform(low, high, spec.shape)
        return np.broadcast_to(row, (env.num_envs, *spec.shape)).astype(spec.dtype)

    return optree.tree_map(leaf, env.spec.action)


def rollout(env, steps, actions_seed=0, noise_on_last=0):
    """`steps + 1` timesteps; the actions on LAST rows alone depend on `noise_on_last`."""
    rng, other = np.random.default_rng(actions_seed), np.random.default_rng(noise_on_last + 1000)
    timesteps = [env.reset()]
    for _ in range(steps):
        last = timesteps[-1].step_type == StepType.LAST

        def pick(a, b, last=last):
            return np.where(last.reshape(-1, *[1] * (a.ndim - 1)), b, a).astype(a.dtype)

        action = optree.tree_map(pick, random_actions(env, rng), random_actions(env, other))
        timesteps.append(env.step(action))
    return timesteps


def leaves(timestep):
    return optree.tree_leaves(tuple(timestep))


def check_rows(env, timesteps):
    previous_last = np.ones(env.num_envs, bool)
    for step_type, reward, discount, observation in timesteps:
        for row, dtype in ((step_type, np.uint8), (reward, np.float32), (discount, np.float32)):
            assert row.shape == (env.num_envs,)
            assert row.dtype == dtype

        def check(spec, leaf):
            assert leaf.shape == (env.num_envs, *spec.shape)
            assert leaf.dtype == np.dtype(spec.dtype)
            if spec.num_values is not None:
                assert leaf.min() >= 0
                assert leaf.max() < spec.num_values

        optree.tree_map(check, env.spec.observation, observation)
        first = step_type == StepType.FIRST
        np.testing.assert_array_equal(first, previous_last)
        assert (reward[first] == 0).all()
        assert np.isfinite(reward).all()
        assert np.isin(discount, (0.0, 1.0)).all()
        previous_last = step_type == StepType.LAST
        assert (discount[~previous_last] == 1).all()


def _flat(timesteps):
    """All numbers of a rollout, `[T, N, numbers]`."""
    return np.stack([np.concatenate([np.float64(x).reshape(len(x), -1) for x in leaves(t)], 1) for t in timesteps])


def check_env(make, steps):
    """Runs the whole contract over `make(seeds) -> Env`; returns the rows of one run for further checks."""
    env, twin, other = make([3, 4, 5]), make([3, 4, 5]), make([5, 9, 3])
    timesteps = rollout(env, steps)
    check_rows(env, timesteps)
    assert any((row.step_type == StepType.LAST).any() for row in timesteps), "no episode ended: raise `steps`"
    for a, b in zip(timesteps, rollout(twin, steps, noise_on_last=1), strict=True):
        for x, y in zip(leaves(a), leaves(b), strict=True):
            np.testing.assert_array_equal(x, y)
    rows, others = _flat(timesteps), _flat(rollout(other, steps))
    assert (rows[:, 0] != rows[:, 1]).any()
    assert (rows[:, 1] != rows[:, 2]).any()
    np.testing.assert_array_equal(rows[:, [2, 0]], others[:, [0, 2]], "an episode depends on its own seed alone")
    check_rows(env, [env.reset(), env.step(random_actions(env, np.random.default_rng(0)))])
    for made in (env, twin, other):
        made.close()
    return timesteps

"""Gymnasium and dm_env adapters: spaces, endings, and what happens when an environment breaks its own word."""

import gymnasium
import numpy as np
import optree
import pytest
from env_zoo import Countdown, Faulty, Walk
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st

from seedx.checks import ConfigError
from seedx.envs.dm_env_adapter import DmEnv
from seedx.envs.gymnasium_adapter import GymnasiumEnv, from_space, space_spec, to_space
from seedx.envs.vectorize import ObservationError, SerialEnv
from seedx.types import ArraySpec, StepType

SPACES = [
    spaces.Box(-1.0, 1.0, (2, 3), np.float32),
    spaces.Box(0, 255, (4, 4), np.uint8),
    spaces.Discrete(5),
    spaces.Discrete(5, start=-2),
    spaces.MultiDiscrete([3, 3, 3]),
    spaces.MultiDiscrete([3, 4]),
    spaces.MultiDiscrete([[2, 3], [4, 5]], start=[[1, 0], [-1, 2]]),
    spaces.MultiBinary(4),
    spaces.Tuple((spaces.Discrete(2), spaces.Box(-np.inf, np.inf, (1,), np.float64))),
]
SPACES += [spaces.Dict({"a": SPACES[3], "b": spaces.Dict({"c": SPACES[8], "d": SPACES[5]})})]


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**31 - 1))
@pytest.mark.parametrize("space", SPACES, ids=str)
def test_samples_match_the_spec_and_come_back_equal(space, seed):
    space.seed(seed)
    value = space.sample()
    spec, tree = space_spec(space, "space"), from_space(space, value)

    def check(leaf_spec, leaf):
        assert np.shape(leaf) == leaf_spec.shape
        if leaf_spec.num_values is not None:
            assert np.min(leaf) >= 0
            assert np.max(leaf) < leaf_spec.num_values
        return np.asarray(leaf).astype(leaf_spec.dtype)  # what a policy would send

    back = to_space(space, optree.tree_map(check, spec, tree))
    assert space.contains(back)
    for x, y in zip(optree.tree_leaves(back), optree.tree_leaves(value), strict=True):
        np.testing.assert_allclose(np.asarray(x, np.float64), np.asarray(y, np.float64), rtol=1e-6)


def test_specs_of_spaces():
    assert space_spec(SPACES[4], "x") == ArraySpec((3,), "int32", num_values=3)
    assert space_spec(SPACES[5], "x") == (ArraySpec((), "int32", num_values=3), ArraySpec((), "int32", num_values=4))
    assert space_spec(SPACES[8], "x")[1] == ArraySpec((1,), "float32")
    box = spaces.Box(np.array([-1, -np.inf]), np.array([1, 2]), dtype=np.float64)
    assert space_spec(box, "x") == ArraySpec((2,), "float32", minimum=(-1.0, -np.inf), maximum=(1.0, 2.0))


@pytest.mark.parametrize("space", [spaces.Text(5), spaces.Sequence(spaces.Discrete(2))])
def test_other_spaces_are_refused_by_name(space):
    with pytest.raises(ConfigError, match=r"observation_space\['a'\]\[1\] is (Text|Sequence)"):
        space_spec(spaces.Dict({"a": spaces.Tuple((spaces.Discrete(2), space))}), "observation_space")


def walk_actions(n):
    return {"jump": np.full(n, 2, np.int32), "push": np.full((n, 2), 0.5, np.float32)}


def test_termination_wins_over_truncation_and_discrete_values_count_from_0():
    env = SerialEnv([GymnasiumEnv(Walk(), "walk", seed) for seed in (0, 1)])
    row = env.reset()
    place = row.observation["place"]
    for t in range(1, 6):
        row = env.step(walk_actions(2))  # jump 2 means +1: the space starts at -1
        np.testing.assert_allclose(row.observation["place"], place + 1.5 * t, rtol=1e-6)
        np.testing.assert_array_equal(row.observation["phase"], [t, t])
    np.testing.assert_array_equal(row.step_type, [StepType.LAST] * 2)
    np.testing.assert_array_equal(row.discount, [0.0, 0.0])  # Walk says terminated and truncated
    assert (env.step(walk_actions(2)).step_type == StepType.FIRST).all()


def test_a_time_limit_truncates_a_single_environment_unless_it_terminates():
    for limit, discount in ((4, 1.0), (5, 0.0)):
        env = SerialEnv([GymnasiumEnv(Walk(), "walk", 0)], max_episode_steps=limit)
        env.reset()
        rows = [env.step(walk_actions(1)) for _ in range(limit)]
        assert [row.step_type[0] for row in rows] == [StepType.MID] * (limit - 1) + [StepType.LAST]
        assert rows[-1].discount[0] == discount


def test_dm_env_tells_truncation_from_termination():
    env = SerialEnv([DmEnv(Countdown(seed), "countdown") for seed in (0, 1)])
    assert env.spec.action == ArraySpec((), "int32", num_values=2)
    assert env.spec.observation == {"x": ArraySpec((3,), "float32")}
    env.reset()
    rows = [env.step(np.array([0, 1], np.int32)) for _ in range(4)]
    np.testing.assert_array_equal(rows[-1].step_type, [2, 2])
    np.testing.assert_array_equal(rows[-1].discount, [0, 1])
    np.testing.assert_array_equal(rows[-1].reward, [0, 1])


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"x": np.zeros(3, np.float32), "n": 0}, r"observation\['x'\] has shape \(3,\).*\(2,\)"),
        ({"x": np.zeros(2, np.float32), "n": 0.5}, r"observation\['n'\] has shape \(\) and dtype float64"),
        ({"x": np.zeros(2, np.complex64), "n": 0}, r"observation\['x'\] .* complex64"),
        ({"x": np.zeros(2, np.float32)}, "another structure"),
        ({"x": np.zeros(2, np.float32), "n": 0, "m": 0}, "another structure"),
        (np.zeros(2, np.float32), "another structure"),
    ],
)
def test_observations_that_break_the_environments_own_space_are_named(bad, message):
    env = SerialEnv([GymnasiumEnv(Faulty(bad), "faulty", 0)])
    env.reset()
    with pytest.raises(ObservationError, match=message):
        env.step(np.zeros(1, np.int32))


def test_what_an_environment_raises_is_passed_on_and_nan_rewards_too():
    env = SerialEnv([GymnasiumEnv(Faulty(RuntimeError("boom")), "faulty", 0)])
    env.reset()
    with pytest.raises(RuntimeError, match="boom"):
        env.step(np.zeros(1, np.int32))
    env = SerialEnv([GymnasiumEnv(Faulty({"x": np.zeros(2), "n": 0}), "faulty", 0)])
    env.reset()
    assert np.isnan(env.step(np.zeros(1, np.int32)).reward).all()


def test_environments_of_one_group_must_be_alike():
    other = gymnasium.make("CartPole-v1")
    with pytest.raises(ValueError, match="must be alike"):
        SerialEnv([GymnasiumEnv(Walk(), "walk", 0), GymnasiumEnv(other, "walk", 1)])


def test_an_observation_that_holds_nothing_is_refused():
    class Nothing(Walk):
        observation_space = spaces.Dict({"a": spaces.Box(-1.0, 1.0, (0,)), "b": spaces.Box(-1.0, 1.0, (2, 0))})

    with pytest.raises(ConfigError, match=r"observation_space of mine:nothing is Dict.*\(0,\).* which holds no values"):
        GymnasiumEnv(Nothing(), "mine:nothing", 1)

"""The contract over all kinds of environments, `make_env`'s errors, and the built-in environments."""

import subprocess
import sys

import numpy as np
import pytest
import scipy.stats
from env_contract import check_env, rollout
from hypothesis import given, settings
from hypothesis import strategies as st

from seedx.checks import ConfigError
from seedx.config import ActorConfig, Config
from seedx.envs.catch import Catch
from seedx.envs.counter_rng import _mix, draw
from seedx.envs.make import UnknownEnvError, make_env
from seedx.envs.memory import DELAY, NUM_CUES, Memory
from seedx.types import StepType


def config(env, max_episode_steps=None):
    return Config(env=env, actor=ActorConfig(max_episode_steps=max_episode_steps))


@pytest.mark.parametrize(
    ("env", "max_episode_steps"),
    [
        ("CartPole-v1", None),
        ("Pendulum-v1", 10),
        ("MiniGrid-Empty-Random-5x5-v0", 20),
        ("InvertedPendulum-v4", None),
        ("Pong-v5", 30),
        ("gym:CartPole-v1", None),
        ("gym:Pendulum-v1", 10),
        ("catch", None),
        ("memory", None),
        ("env_zoo:make_gymnasium", None),
        ("env_zoo:make_gymnasium", 3),
        ("env_zoo:make_dm_env", None),
        ("env_zoo:make_dm_env", 2),
        ("env_zoo:make_vectorised", None),
    ],
)
def test_every_environment_keeps_the_contract(env, max_episode_steps):
    timesteps = check_env(lambda seeds: make_env(config(env, max_episode_steps), len(seeds), seeds), steps=60)
    if max_episode_steps is not None:
        lasts = [t for t, row in enumerate(timesteps) if row.step_type[0] == StepType.LAST]
        assert lasts == list(range(max_episode_steps, 61, max_episode_steps + 1))
        assert all(timesteps[t].discount[0] == 1 for t in lasts), "a time limit truncates"


def test_a_vectorised_function_of_one_seed_gets_the_first():
    ours = rollout(make_env(config("env_zoo:make_vectorised_from_one_seed"), 3, [7, 1, 2]), 20)
    for row, expected in zip(ours, rollout(Catch(3, [7, 8, 9]), 20), strict=True):
        np.testing.assert_array_equal(row.observation, expected.observation)


@pytest.mark.parametrize("env", ["CartPole-v1", "gym:CartPole-v1"])
def test_every_return_of_a_time_limited_cartpole_is_the_limit(env):
    made = make_env(config(env, 5), 4, [0, 1, 2, 3])
    returns, episode = [], np.zeros(4)
    for row in rollout(made, 60):
        episode += row.reward
        last = row.step_type == StepType.LAST
        returns += episode[last].tolist()
        episode[last] = 0
    assert returns == [5.0] * 40


@pytest.mark.parametrize(
    ("env", "suggestion"),
    [
        ("CartPol-v1", "'CartPole-v1'"),
        ("Pong", "'Pong-v5'"),
        ("cartpole-v1", "'CartPole-v1'"),
        ("ctach", "'catch'"),
        ("gym:CartPol-v1", "CartPole"),
        ("gym:", "Malformed"),
        ("env_zoo:make_gymnasiun", "'env_zoo:make_gymnasium'"),
        ("env_zoo:NOT_CALLABLE", "no function 'NOT_CALLABLE'"),
        ("no_such_module:make", "no module 'no_such_module'"),
        ("env_zoo:", "module:function"),
        ("xyzzy", "module:function"),
    ],
)
def test_unknown_environments_are_refused_with_a_suggestion(env, suggestion):
    with pytest.raises(UnknownEnvError, match="is unknown") as error:
        make_env(config(env), 2, [0, 1])
    assert suggestion in str(error.value)
    assert "gym:ID" in str(error.value)


@pytest.mark.parametrize(
    ("env", "max_episode_steps", "message"),
    [
        ("env_zoo:make_nothing", None, "returned NoneType.*single gymnasium.Env"),
        ("env_zoo:make_no_vector", None, "returned object.*seedx.types.Env"),
        ("env_zoo:make_too_few", None, "asked for 2 environments and made 1"),
        ("env_zoo:make_the_same", None, "same environment twice"),
        ("env_zoo:make_vectorised", 5, "max_episode_steps"),
        ("catch", 5, "max_episode_steps"),
        ("TicTacToe-v1", None, "2 players"),
    ],
)
def test_environments_that_cannot_be_used_say_why(env, max_episode_steps, message):
    with pytest.raises(ConfigError, match=message):
        make_env(config(env, max_episode_steps), 2, [0, 1])


def test_a_missing_dependency_of_the_users_module_is_not_called_an_unknown_environment(tmp_path, monkeypatch):
    (tmp_path / "lacks_something.py").write_text("import surely_not_installed\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="surely_not_installed"):
        make_env(config("lacks_something:make"), 2, [0, 1])


@pytest.mark.parametrize("seeds", [[0], [1, 1], [0, -1], [0, 2**31]])
def test_seeds_must_be_distinct_int32(seeds):
    with pytest.raises(ConfigError, match="seeds"):
        make_env(config("catch"), 2, seeds)


def test_actors_load_neither_jax_nor_matplotlib_and_jax_still_imports_afterwards():
    code = (
        "import sys, seedx.envs.make as m; from seedx.config import Config\n"
        "m.make_env(Config(env='CartPole-v1'), 2, [0, 1]).reset()\n"
        "m.make_env(Config(env='gym:CartPole-v1'), 2, [0, 1]).reset()\n"
        "assert 'jax' not in sys.modules and 'matplotlib' not in sys.modules\n"
        "m.make_env(Config(env='Snake-v1'), 2, [0, 1]).reset()\n"  # Jumanji, registered late
        "assert 'jax' not in sys.modules\n"
        "import jax; assert jax.numpy.ones(2).sum() == 2"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_catch_follows_a_transcription_of_bsuite():
    env, rng = Catch(8, range(8)), np.random.default_rng(0)
    row = env.reset()
    ball_x, ball_y, paddle = row.observation[:, 0].argmax(1), 0, np.full(8, 2)
    for _ in range(100):
        action = rng.integers(0, 3, 8)
        row = env.step(action)
        if ball_y == 9:
            ball_x, ball_y, paddle = row.observation[:, 0].argmax(1), 0, np.full(8, 2)
        else:
            ball_y, paddle = ball_y + 1, np.clip(paddle + action - 1, 0, 4)
        for i in range(8):
            board = np.zeros((10, 5), np.float32)
            board[ball_y, ball_x[i]] = board[9, paddle[i]] = 1
            np.testing.assert_array_equal(row.observation[i], board)
            assert row.reward[i] == (0 if ball_y < 9 else 1 if ball_x[i] == paddle[i] else -1)
            assert row.step_type[i] == (0 if ball_y == 0 else 2 if ball_y == 9 else 1)


def test_catch_can_always_be_caught():
    env, rewards = Catch(16, range(16)), []
    row = env.reset()
    for _ in range(50):
        ball, paddle = row.observation[:, :9].sum(1).argmax(1), row.observation[:, 9].argmax(1)
        row = env.step(1 + np.sign(ball - paddle))
        rewards += row.reward[row.step_type == StepType.LAST].tolist()
    assert rewards == [1.0] * 80


def _memory_return(policy, episodes=40, num_envs=64):
    env, total = Memory(num_envs, range(num_envs)), 0.0
    row, cue = env.reset(), None
    for _ in range(episodes * (DELAY + 3) - 1):
        if (row.step_type == StepType.FIRST).all():
            cue = row.observation[:, :NUM_CUES].argmax(1)
        row = env.step(policy(row.observation, cue))
        total += row.reward.sum()
    return total / (episodes * num_envs)


def test_memory_pays_who_remembers_and_leaves_others_to_chance():
    rng = np.random.default_rng(0)
    assert _memory_return(lambda _, cue: cue) == 1.0
    memoryless = rng.normal(size=(NUM_CUES + 1, NUM_CUES))
    assert abs(_memory_return(lambda observation, _: (observation @ memoryless).argmax(1)) - 1 / NUM_CUES) < 0.04


def test_counter_rng_is_splitmix64():
    golden = np.array([0x9E3779B97F4A7C15], np.uint64)
    assert _mix(golden)[0] == 0xE220A8397B1DCDAF  # the first two outputs of splitmix64 seeded with 0
    assert _mix(golden * np.uint64(2))[0] == 0x6E789E6AA1B965F4


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**31 - 2), high=st.integers(2, 7))
def test_counter_rng_is_uniform_and_independent_between_neighbouring_seeds(seed, high):
    n = 4096
    counter = np.arange(n, dtype=np.uint64)
    a, b = (draw(np.full(n, seed + i, np.uint64), counter, high) for i in (0, 1))
    for values, cells in ((a, high), (a * high + b, high**2)):
        observed = np.bincount(values, minlength=cells)
        expected = n / cells
        chi2, degrees = ((observed - expected) ** 2 / expected).sum(), cells - 1
        assert chi2 < scipy.stats.chi2.isf(1e-9, degrees)

"""EnvPool: dm_env semantics against simulations and against EnvPool's own API; specs and the Atari preset."""

import warnings

import numpy as np
import pytest
from env_contract import random_actions, rollout

from seedx.config import ActorConfig, AtariConfig, Config
from seedx.envs.envpool_adapter import EnvPoolEnv, _options, _rows_as, is_known, load_envpool
from seedx.types import ArraySpec, StepType


def cartpole_step(state, action):
    """Gymnasium's CartPole in float64: Barto, Sutton, Anderson (1983), Euler steps of 0.02 s."""
    x, x_dot, theta, theta_dot = state
    force = 10.0 if action == 1 else -10.0
    temp = (force + 0.05 * theta_dot**2 * np.sin(theta)) / 1.1
    theta_acc = (9.8 * np.sin(theta) - np.cos(theta) * temp) / (0.5 * (4 / 3 - 0.1 * np.cos(theta) ** 2 / 1.1))
    x_acc = temp - 0.05 * theta_acc * np.cos(theta) / 1.1
    return np.array([x + 0.02 * x_dot, x_dot + 0.02 * x_acc, theta + 0.02 * theta_dot, theta_dot + 0.02 * theta_acc])


def make(env, num_envs=3, seeds=(5, 6, 7), max_episode_steps=None, **config):
    actor = ActorConfig(max_episode_steps=max_episode_steps)
    return EnvPoolEnv(Config(env=env, actor=actor, **config), num_envs, list(seeds))


def test_truncation_has_discount_1_and_a_real_final_observation():
    env = make("CartPole-v1", max_episode_steps=5)
    for _ in range(3):  # the next episode starts with the step after LAST
        row = env.reset() if _ == 0 else env.step(np.ones(3, np.int32))
        assert (row.step_type == StepType.FIRST).all()
        assert (row.reward == 0).all()
        assert (np.abs(row.observation) <= 0.05).all()
        states = row.observation.astype(np.float64)
        for t in range(5):
            action = np.array([t % 2, 1, 0], np.int32)
            row = env.step(action)
            states = np.stack([cartpole_step(s, a) for s, a in zip(states, action, strict=True)])
            np.testing.assert_allclose(row.observation, states, rtol=1e-5, atol=1e-6)
            assert (row.reward == 1).all()
            assert (row.discount == 1).all()
        assert (row.step_type == StepType.LAST).all()


def test_termination_has_discount_0():
    env = make("CartPole-v1")
    row, ended = env.reset(), 0
    for _ in range(40):
        row = env.step(np.ones(3, np.int64))
        last = row.step_type == StepType.LAST
        fallen = (np.abs(row.observation[:, 2]) > 12 * np.pi / 180) | (np.abs(row.observation[:, 0]) > 2.4)
        np.testing.assert_array_equal(last, fallen)
        np.testing.assert_array_equal(row.discount, 1 - last)
        ended += last.sum()
    assert ended >= 9


@pytest.mark.parametrize("env_id", ["CartPole-v1", "MiniGrid-Empty-5x5-v0", "InvertedPendulum-v4", "Tetris-v0"])
def test_rows_are_those_of_envpools_own_api(env_id):
    assert is_known(env_id)
    env = make(env_id)
    pool = load_envpool().make(env_id, env_type="gymnasium", num_envs=3, seed=[5, 6, 7])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # gymnasium: Box precision
        observation, _ = pool.reset()
    rng = np.random.default_rng(0)
    row = env.reset()
    for _ in range(50):
        for name, leaf in row.observation.items() if isinstance(row.observation, dict) else [(None, row.observation)]:
            np.testing.assert_allclose(leaf, observation if name is None else observation[name], rtol=1e-6)
        action = random_actions(env, rng)
        row = env.step(action)
        stacked = np.stack(action, axis=-1) if isinstance(action, tuple) else action
        observation, reward, terminated, truncated, _ = pool.step(stacked)
        np.testing.assert_array_equal(row.reward, reward)
        np.testing.assert_array_equal(row.discount == 0, terminated)
        np.testing.assert_array_equal(row.step_type == StepType.LAST, terminated | truncated)


def test_specs():
    assert is_known("Tetris-v0")
    rotation, column = make("Tetris-v0").spec.action
    assert (rotation, column) == (ArraySpec((), "int32", num_values=4), ArraySpec((), "int32", num_values=10))
    cartpole = make("CartPole-v1").spec
    assert cartpole.action == ArraySpec((), "int32", num_values=2)
    assert (cartpole.observation.shape, cartpole.observation.dtype) == ((4,), "float32")
    pendulum = make("Pendulum-v1").spec
    assert pendulum.action == ArraySpec((1,), "float32", minimum=-2.0, maximum=2.0)
    assert pendulum.observation == ArraySpec((3,), "float32", minimum=(-1.0, -1.0, -8.0), maximum=(1.0, 1.0, 8.0))
    assert make("FrozenLake-v1").spec.observation == ArraySpec((), "int32", num_values=16)
    assert make("MiniGrid-Empty-5x5-v0").spec.observation == {
        "direction": ArraySpec((), "int32", num_values=4),
        "image": ArraySpec((7, 7, 3), "uint8", num_values=11),  # categories: EnvPool says 0 .. 255
        "mission": ArraySpec((96,), "uint8", minimum=0.0, maximum=255.0),
    }
    inverted = make("InvertedPendulum-v4").spec
    assert (inverted.observation.dtype, inverted.action.dtype, inverted.frame_skip) == ("float32", "float32", 2)


@pytest.mark.parametrize(
    "env_id", ["MiniGrid-DoorKey-5x5-v0", "MiniGrid-ObstructedMaze-Full-v0", "BabyAI-BossLevel-v0"]
)
def test_grids_hold_the_categories_of_their_spec(env_id):
    rows = rollout(make(env_id), 200)
    cells = np.stack([row.observation["image"] for row in rows]).reshape(-1, 3)
    assert 4 <= cells[:, 0].max() < make(env_id).spec.observation["image"].num_values  # 4: a door
    assert cells[:, 1].max() <= 5
    assert cells[:, 2].max() <= 2


def test_atari_preset_reaches_envpool():
    pool_spec = load_envpool().make_spec("Pong-v5")
    options = _options(pool_spec.config._fields, Config(env="Pong-v5"))
    assert options == {
        "stack_num": 1,
        "frame_skip": 4,
        "img_height": 84,
        "img_width": 84,
        "noop_max": 30,
        "repeat_action_probability": 0.0,
        "episodic_life": False,
        "full_action_space": False,
        "use_fire_reset": True,
        "max_episode_steps": 27_000,
    }
    assert _options(load_envpool().make_spec("CartPole-v1").config._fields, Config()) == {}


def test_atari_sends_single_frames_without_copying_them(monkeypatch):
    env = make("Pong-v5", num_envs=2, seeds=(1, 2))
    assert env.spec.observation == ArraySpec((84, 84), "uint8", minimum=0.0, maximum=255.0)
    assert env.spec.action == ArraySpec((), "int32", num_values=6)
    assert env.spec.frame_skip == 4
    received = []

    class Recorder:
        def __init__(self, pool):
            self.pool = pool

        def __getattr__(self, name):
            return getattr(self.pool, name)

        def _recv(self):
            received.extend(self.pool._recv())
            return received

    monkeypatch.setattr(env, "_pool", Recorder(env._pool))
    row = env.reset()
    assert any(np.shares_memory(row.observation, array) for array in received)
    assert row.observation.max() > 0


def test_colour_images_are_channel_last():
    """VizDoom's come channel first; its engine is a process of its own, too slow and too frail to start here."""
    rows = np.arange(2 * 4 * 5 * 6, dtype=np.uint8).reshape(2, 4, 5, 6)
    view = _rows_as(ArraySpec((5, 6, 4), "uint8"), rows)
    assert np.shares_memory(view, rows)
    assert view[1, 2, 3, 0] == rows[1, 0, 2, 3]
    # Images that are channel-last already, and what is no picture, stay as they are.
    for spec in (ArraySpec((7, 7, 3), "uint8"), ArraySpec((3, 8, 3), "uint8"), ArraySpec((3, 4, 5), "float32")):
        np.testing.assert_array_equal(_rows_as(spec, rows := np.ones((2, *spec.shape), spec.dtype)), rows)


def test_atari_time_limit_counts_frames():
    atari = AtariConfig(frame_skip=2, img_size=42, max_episode_frames=40, full_action_space=True)
    env = make("Pong-v5", num_envs=1, seeds=(1,), atari=atari)
    assert (env.spec.observation.shape, env.spec.action.num_values, env.spec.frame_skip) == ((42, 42), 18, 2)
    rows = rollout(env, 20)
    assert rows[20].step_type == StepType.LAST
    assert rows[20].discount == 1


def test_action_of_another_shape_is_refused():
    env = make("CartPole-v1")
    env.reset()
    with pytest.raises(ValueError, match=r"action has shape \(2,\); CartPole-v1 needs \(3,\)"):
        env.step(np.zeros(2, np.int32))

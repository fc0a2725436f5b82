"""Small environments of every kind a user may bring, for the tests: `--env env_zoo:make_...`."""

from types import SimpleNamespace

import gymnasium
import numpy as np
from gymnasium import spaces

from seedx.envs.catch import Catch

NOT_CALLABLE = 3


class Walk(gymnasium.Env):
    """A walk on the integers from a random start, 5 steps long, with one leaf of every kind of space."""

    observation_space = spaces.Dict(
        {
            "place": spaces.Box(-100.0, 100.0, (2,), np.float64),
            "phase": spaces.Discrete(6, start=-1),
            "pair": spaces.Tuple((spaces.MultiBinary(3), spaces.MultiDiscrete([2, 5]))),
        }
    )
    action_space = spaces.Dict({"jump": spaces.Discrete(3, start=-1), "push": spaces.Box(-1.0, 1.0, (2,), np.float32)})

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place, self.t = self.np_random.uniform(-1, 1, 2), 0
        return self._observation(), {}

    def step(self, action):
        assert self.action_space.contains(action), action
        self.place = self.place + action["jump"] + action["push"]
        self.t += 1
        return self._observation(), float(self.place[0]), self.t == 5, self.t == 5, {}

    def _observation(self):
        bits = np.array([1, 0, self.t % 2], np.int8)
        return {"place": self.place, "phase": self.t - 1, "pair": (bits, np.array([self.t % 2, self.t % 5]))}


def make_gymnasium():
    return Walk()


class Countdown:
    """dm_env's interface by hand: ends after 4 steps, terminated if the seed is even, else truncated."""

    def __init__(self, seed):
        self.seed, self.rng = seed, np.random.default_rng(seed)

    def observation_spec(self):
        return {"x": SimpleNamespace(shape=(3,), dtype=np.float64)}

    def action_spec(self):
        return SimpleNamespace(shape=(), dtype=np.int64, num_values=2)

    def reset(self):
        self.t = 0
        return self._row(0, None, None)

    def step(self, action):
        self.t += 1
        if self.t < 4:
            return self._row(1, float(action), 1.0)
        return self._row(2, float(action), float(self.seed % 2))

    def _row(self, step_type, reward, discount):
        observation = {"x": self.rng.normal(size=3)}
        return SimpleNamespace(step_type=step_type, reward=reward, discount=discount, observation=observation)


def make_dm_env(seed):
    return Countdown(seed)


def make_vectorised(num_envs, seeds):
    return Catch(num_envs, seeds)


def make_vectorised_from_one_seed(num_envs, seed):
    return Catch(num_envs, [seed + i for i in range(num_envs)])


def make_too_few(num_envs, seeds):
    return Catch(num_envs - 1, seeds[1:])


def make_nothing():
    return None


def make_no_vector(num_envs, seeds):
    return object()


_only = Walk()


def make_the_same():
    return _only


class Faulty(gymnasium.Env):
    """Returns `bad` where it should return a float32 [2] or an integer."""

    observation_space = spaces.Dict({"x": spaces.Box(-1, 1, (2,), np.float32), "n": spaces.Discrete(3)})
    action_space = spaces.Discrete(2)

    def __init__(self, bad):
        self.bad = bad

    def reset(self, *, seed=None, options=None):
        return {"x": np.zeros(2, np.float32), "n": 0}, {}

    def step(self, action):
        if isinstance(self.bad, Exception):
            raise self.bad
        return self.bad, np.nan, False, False, {}

"""The actor's loop, with connections that fail as told, and its seeds."""

import itertools
import threading
import types

import numpy as np
import pytest

from seedx.config import ActorConfig, Config
from seedx.envs import actor
from seedx.inference.client import Connection, Finished, GroupStream, ServerLostError


def test_no_environment_has_the_same_seed_in_two_actors_restarts_or_sessions():
    config = Config(envs_per_actor=8)
    runs = [(i, restart, session) for i in range(2) for restart in range(3) for session in (0, 1, 500)]
    seeds = np.concatenate([actor.env_seeds(config, *run) for run in runs])
    assert len(set(seeds.tolist())) == len(runs) * 8
    assert (actor.env_seeds(config, 1, 2, 500) == actor.env_seeds(config, 1, 2, 500)).all()


class Env:
    """An environment without content."""

    spec, num_envs = None, 16

    def reset(self):
        return 0

    def step(self, action):
        return action

    def close(self):
        pass


class Failing(Connection):
    """Admits the actor and answers `replies` requests; the next one fails with `end`."""

    def __init__(self, replies, end):
        self._stream = FailingStream(replies, end)

    def open_stream(self, group):
        return self._stream

    def close(self):
        pass


class FailingStream(GroupStream):
    """Its one stream."""

    def __init__(self, replies, end):
        self._replies, self._end = replies, end

    def send(self, row):
        pass

    def receive(self):
        if self._replies == 0:
            raise self._end
        self._replies -= 1
        return 0


class Clock(threading.Event):
    """A stop signal that never comes; waiting for it moves this clock and takes no time."""

    now = 0.0

    def wait(self, timeout=None):
        self.now += timeout
        return False


def run(monkeypatch, connections, give_up_s=0.5):
    """Runs the actor; a failed connection follows `_RETRY_S` = 0.2 s after another, and nothing else takes time."""
    clock = Clock()
    monkeypatch.setattr(actor, "time", types.SimpleNamespace(monotonic=lambda: clock.now))
    monkeypatch.setattr(actor, "_connect", lambda *_: next(connections))
    config = Config(actor=ActorConfig(groups=1, give_up_s=give_up_s))
    actor.run_actor(config, "unix:/nowhere", 0, lambda seeds: Env(), stop=clock)


def test_a_server_that_admits_but_never_answers_is_given_up_without_a_tight_loop(monkeypatch):
    made = []
    connections = (made.append(1) or Failing(0, ServerLostError("lost: UNKNOWN")) for _ in itertools.count())
    with pytest.raises(ServerLostError, match=r"lost: UNKNOWN; gave up after 0.5 s"):
        run(monkeypatch, connections)
    assert len(made) == 4  # after 0, 0.2, 0.4 and 0.6 s


def test_a_reply_restarts_the_clock(monkeypatch):
    lost = [Failing(i % 2, ServerLostError("lost")) for i in range(16)]  # 3.2 s in all
    connections = iter([*lost, Failing(1, Finished())])
    run(monkeypatch, connections, give_up_s=0.5)
    assert next(connections, None) is None  # it tried them all

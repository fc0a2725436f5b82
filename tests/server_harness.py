"""A policy server on a Unix socket in this process, environments with a script, and actors driven by hand."""

import contextlib
import time

import jax
import numpy as np
import optree
from fakes import VECTOR, draw, step_types

from seedx import sharding
from seedx.agents.impala import Impala
from seedx.config import ActorConfig, Config, InferenceConfig, LearnerConfig, NetworkConfig
from seedx.inference.client import Connection
from seedx.inference.frontend import FrontEnd
from seedx.inference.policy import PolicyServer
from seedx.inference.streams import Streams
from seedx.metrics import Metrics
from seedx.replay.fifo import Fifo
from seedx.replay.replay import ReplayTimeoutError
from seedx.threads import Crew
from seedx.types import TimeStep
from seedx.weights import WeightStore

T = 4
TINY = NetworkConfig(hidden=(8,))


def wait_until(condition, timeout_s=60.0):
    """Waits for something that another thread will do soon."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {timeout_s} s in vain"
        time.sleep(0.002)


def make_config(actors=2, groups=2, envs=2, devices=1, network=TINY, unroll_length=T, **inference):
    """A run of `actors` actors with `groups` groups of `envs` environments."""
    defaults = {"stream_timeout_s": 3600.0, "max_wait_ms": 100.0}  # no stream counts as silent
    return Config(
        num_actors=actors,
        envs_per_actor=groups * envs,
        actor=ActorConfig(groups=groups, give_up_s=60.0),
        network=network,
        inference=InferenceConfig(**{**defaults, **inference}),
        learner=LearnerConfig(batch_size=8, unroll_length=unroll_length, devices=devices),
    )


class EchoPolicy:
    """Answers every request with zeros and version 3, on the thread that asks."""

    def __init__(self, front_end):
        self.front_end = front_end

    def attach(self, stream):
        pass

    def detach(self, stream):
        pass

    def watch(self, streams):
        pass

    def offer(self, request):
        zeros = [column.spec.zeros(request.rows) for column in request.stream.actions.layout.columns]
        self.front_end.deliver([(request, request.stream.actions.encode(zeros, 3))])


class Server:
    """Acts with fresh parameters, as version 0; no learner."""

    def __init__(self, address, config, spec=VECTOR, replay=None):
        self.config, self.spec, self.address = config, spec, address
        self.crew, self.metrics, self.weights = Crew(), Metrics(), WeightStore()
        self.streams = Streams(config.num_slots, config.inference.max_streams)
        self.front_end = FrontEnd(address, config.inference, self.streams, self.crew.fail)
        self.front_end.start()
        self.meshes = sharding.build_meshes(config.learner)
        self.mesh = self.meshes.inference
        self.agent = Impala(config, spec)
        # Far from uniform, so that actions depend on what the network sees.
        params = self.agent.init(jax.random.key(0))
        params = {**params, "policy": jax.tree.map(lambda x: 100 * x, params["policy"])}
        self.params = jax.device_put(params, sharding.replicated(self.mesh))
        self.weights.publish(0, self.params)
        self.replay = Fifo(100_000) if replay is None else replay
        self.policy = PolicyServer(self.agent, spec, config, self.weights, self.meshes, self.metrics, self.crew)
        self.policy.warm_up()
        self.policy.start(self.front_end.deliver, self.replay)
        self.front_end.serve(self.policy)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.stop()

    def stop(self, finished=True):
        self.front_end.stop(finished=finished)
        assert self.crew.join(100.0) == []
        assert self.crew.failure is None, self.crew.describe_failure()

    def unrolls(self):
        """The items in the replay, one by one and in order; every leaf `[T+1, ...]`, of the state `[...]`."""
        found = []
        with contextlib.suppress(ReplayTimeoutError):
            while True:
                item = self.replay.sample(1, 0.0).items
                found.append(jax.tree.map(lambda leaf: leaf[0], item))
        return found

    def connect(self, actor_id, groups=1, envs=2, evaluation=False, spec=None):
        return Connection(
            self.address,
            self.config.inference,
            actor_id,
            spec or self.spec,
            groups=groups,
            envs_per_group=envs,
            evaluation=evaluation,
            timeout_s=60.0,
        )


class Script:
    """N environments whose rows `[R, N]` are known beforehand; vectors begin with (the environment's seed, row)."""

    def __init__(self, spec, seeds, num_rows=60, on_end=None):
        self.spec, self.num_envs, self.on_end = spec, len(seeds), on_end
        columns = [_column(spec, int(seed), num_rows) for seed in seeds]
        self.rows = jax.tree.map(lambda *x: np.stack(x, axis=1), *columns)
        self.actions = []
        self.resets = 0
        self._t = 0

    def reset(self):
        self._t, self.actions = 0, []
        self.resets += 1
        return self.row(0)

    def step(self, action):
        self.actions.append(action)
        self._t += 1
        if self._t + 1 == len(self.rows.reward) and self.on_end is not None:
            self.on_end()
        return self.row(self._t)

    def row(self, t):
        return jax.tree.map(lambda leaf: leaf[t], self.rows)

    def close(self):
        pass


def _column(spec, seed, num_rows):
    """All rows of one environment, a function of its seed."""
    rng = np.random.default_rng(seed)
    step_type = step_types(num_rows + 5, 1, rng)[:, 0]
    step_type = step_type[np.argmin(step_type) :][:num_rows]  # from a FIRST on
    observation = optree.tree_map(lambda leaf: draw(leaf, (num_rows,), rng), spec.observation)
    leaf = optree.tree_leaves(observation)[-1]
    if leaf.dtype == np.float32:
        leaf[:, 0], leaf[:, 1] = seed, np.arange(num_rows)
    reward = rng.normal(size=num_rows).astype(np.float32)
    discount = np.where((step_type == 2) & (rng.random(num_rows) < 0.5), 0.0, 1.0).astype(np.float32)
    return TimeStep(step_type, reward, discount, observation)


def play(connection, scripts, num_rows, streams=None):
    """Sends `num_rows` rows of each group and takes the actions: a list of trees `[num_rows, N, ...]`, one a group."""
    streams = streams or [connection.open_stream(group) for group in range(len(scripts))]
    actions = [[] for _ in scripts]
    for t in range(num_rows):
        for script, stream in zip(scripts, streams, strict=True):
            stream.send(script.row(t))
        for group, stream in enumerate(streams):
            actions[group].append(stream.receive())
    return [jax.tree.map(lambda *x: np.stack(x), *group) for group in actions]

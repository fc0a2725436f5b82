"""Unit costs of the cost model (`scaling_model.py`), each measured alone: nothing else runs meanwhile.

The parts are the run's own, driven without each other: environments without a server, a front-end and clients without
an agent, a policy server without connections, a learner without actors.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import tempfile
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import optree

from seedx.config import Config
from seedx.types import EnvSpec, StepType, TimeStep

SECONDS = 1.5  # of one measurement
_WARM_UP_S = 0.3


class Cost(NamedTuple):
    """Of one call, seconds."""

    cpu: float  # of the whole process, all its threads
    pool: float  # of that, XLA's own threads, which need no interpreter lock
    wall: float

    @property
    def own(self) -> float:
        """CPU seconds of threads that run Python, one at a time."""
        return self.cpu - self.pool


class Clock:
    """Reads this process's CPU and wall time."""

    def __init__(self) -> None:
        self._start = self._read()

    def cost(self, calls: float) -> Cost:
        """The mean cost of a call since the start."""
        return Cost(*[(now - then) / calls for now, then in zip(self._read(), self._start, strict=True)])

    def _read(self) -> Cost:
        ticks = 0
        for thread in Path("/proc/self/task").iterdir():
            name, _, fields = (thread / "stat").read_text().partition("(")[2].rpartition(")")
            ticks += sum(map(int, fields.split()[11:13])) if "XLA" in name else 0
        return Cost(time.process_time(), ticks / os.sysconf("SC_CLK_TCK"), time.perf_counter())


def in_own_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """What a function returns in a fresh process."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, arguments)


def timed(call: Callable[[], object], seconds: float = SECONDS) -> Cost:
    """The mean cost of a call."""
    _repeat(call, _WARM_UP_S)
    clock = Clock()
    return clock.cost(_repeat(call, seconds))


def _repeat(call: Callable[[], object], seconds: float) -> int:
    calls, until = 0, time.perf_counter() + seconds
    while time.perf_counter() < until:
        call()
        calls += 1
    return calls


def spec_of(config: Config) -> EnvSpec:
    """Of the run's environments."""
    from seedx.envs.make import make_env

    env = make_env(config, 1, [0])
    env.close()
    return env.spec


def env_step(config: Config) -> Cost:
    """One step of one group of environments."""
    from seedx.envs.make import make_env

    rows = config.envs_per_group
    env, rng = make_env(config, rows, range(rows)), np.random.default_rng(0)
    num = env.spec.action.num_values
    actions = rng.integers(0, num, (64, rows)).astype(env.spec.action.dtype)
    env.reset()
    turn = iter(range(10**9))
    return timed(lambda: env.step(actions[next(turn) % 64]))


# ---- transport: a front-end whose policy answers at once, and clients with rows made beforehand


class _AtOnce:
    """A policy that answers zeros on the front-end's own thread."""

    def __init__(self, front_end: Any) -> None:
        self._front_end = front_end

    def attach(self, stream: Any) -> None:
        pass

    def detach(self, stream: Any) -> None:
        pass

    def watch(self, streams: Any) -> None:
        pass

    def offer(self, request: Any) -> None:
        zeros = [column.spec.zeros(request.rows) for column in request.stream.actions.layout.columns]
        self._front_end.deliver([(request, request.stream.actions.encode(zeros, 0))])


def _serve(pipe: Pipe, config: Config, address: str) -> None:
    """Serves until the pipe closes; tells its CPU seconds when asked."""
    from seedx.inference.frontend import FrontEnd
    from seedx.inference.streams import Streams
    from seedx.threads import Crew, spare_the_collector

    streams = Streams(config.num_slots, config.inference.max_streams)
    front_end = FrontEnd(address, config.inference, streams, Crew().fail)
    front_end.start()
    front_end.serve(_AtOnce(front_end))
    spare_the_collector()
    pipe.send(None)
    while pipe.recv():
        pipe.send(time.process_time())
    front_end.stop(finished=True)


class Exchange(NamedTuple):
    """CPU seconds of one message and its reply."""

    client: float
    front_end: float


def exchange(config: Config, spec: EnvSpec) -> Exchange:
    """A message of one group to a front-end in another process and its reply."""
    from seedx.inference.client import Connection

    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as directory:
        address = f"unix:{directory}/socket"
        here, there = context.Pipe()
        server = context.Process(target=_serve, args=(there, config, address))
        server.start()
        here.recv()
        rows = config.envs_per_group
        connection = Connection(address, config.inference, 0, spec, 1, rows, evaluation=False, timeout_s=60.0)
        stream, message = connection.open_stream(0), timestep(spec, rows, StepType.MID)

        def ask() -> None:
            stream.send(message)
            stream.receive()

        _repeat(ask, _WARM_UP_S)
        before, clock = _asked(here), Clock()
        calls = _repeat(ask, SECONDS)
        client, server_cpu = clock.cost(calls).cpu, (_asked(here) - before) / calls
        connection.close()
        here.send(False)
        server.join()
    return Exchange(client, server_cpu)


def _asked(pipe: Pipe) -> float:
    pipe.send(True)
    return pipe.recv()


def timestep(spec: EnvSpec, rows: int, step_type: StepType) -> TimeStep:
    """Rows of zeros."""
    observation = optree.tree_map(lambda leaf: leaf.zeros(rows), spec.observation)
    return TimeStep(
        np.full(rows, step_type, np.uint8), np.zeros(rows, np.float32), np.ones(rows, np.float32), observation
    )


# ---- acting and learning


class Parts:
    """What acting and learning need in one process, without connections."""

    def __init__(self, config: Config, spec: EnvSpec) -> None:
        from seedx import compilation_cache, sharding
        from seedx.agents.build import build_agent
        from seedx.inference.policy import PolicyServer
        from seedx.learner.learner import Learner, initial_state
        from seedx.metrics import Metrics
        from seedx.threads import Crew
        from seedx.weights import WeightStore

        compilation_cache.use()
        self.config, self.spec = config, spec
        self.crew, self.metrics, self.weights = Crew(), Metrics(), WeightStore()
        self.meshes = sharding.build_meshes(config.learner)
        self.agent = agent = build_agent(config, spec)
        state = initial_state(agent, config.learner, self.meshes.learner, config.seed)
        self.learner = Learner(
            agent, config.learner, self.meshes, state, self.weights, self.metrics, config.seed, Path(".")
        )
        self.policy = PolicyServer(agent, spec, config, self.weights, self.meshes, self.metrics, self.crew)


def act(config: Config, spec: EnvSpec) -> Cost:
    """One batch of the policy server, from requests to replies and unrolls.

    Each batch is a group of every actor, as in a run whose groups alternate; there is one group here, so that batches
    do not merge.
    """
    from seedx.inference.request import Request
    from seedx.inference.streams import Streams
    from seedx.replay.fifo import Fifo
    from seedx.replay.replay import ReplayTimeoutError
    from seedx.threads import spare_the_collector

    rows = config.envs_per_group
    config = dataclasses.replace(config, envs_per_actor=rows, actor=dataclasses.replace(config.actor, groups=1))
    parts = Parts(config, spec)
    policy, crew = parts.policy, parts.crew
    policy.warm_up()
    streams = Streams(config.num_slots, config.inference.max_streams)
    first, middle = (_payload(spec, rows, kind) for kind in (StepType.FIRST, StepType.MID))
    replay = Fifo(4 * config.learner.batch_size)
    answered = _Counter()

    def deliver(replies: Any) -> None:
        for request, _ in replies:
            answered.add()
            policy.offer(Request(request.stream, middle, request.reply))

    def consume() -> None:
        while not crew.stop.is_set():
            try:
                replay.sample(config.learner.batch_size, timeout_s=0.1)
            except ReplayTimeoutError:
                continue

    policy.start(deliver, replay)
    crew.spawn("consumer", consume)
    spare_the_collector()
    opened = []
    for actor in range(config.num_actors):
        streams.hello(actor, (actor, 0), 1, rows, False)
        opened.append(streams.attach(actor, (actor, 0), 0, spec))
    for stream in opened:
        stream.asking = True
        policy.attach(stream)
    policy.watch(streams)
    for stream in opened:
        policy.offer(Request(stream, first, None))  # type: ignore[arg-type]
    time.sleep(_WARM_UP_S)
    count, clock = answered.value, Clock()
    time.sleep(SECONDS)
    cost = clock.cost((answered.value - count) / config.num_actors)
    crew.join(60.0)
    if crew.failure is not None:
        raise crew.failure
    return cost


class _Counter:
    def __init__(self) -> None:
        self._lock, self.value = threading.Lock(), 0

    def add(self) -> None:
        with self._lock:
            self.value += 1


def _payload(spec: EnvSpec, rows: int, step_type: StepType) -> memoryview:
    from seedx.inference.wire import TimestepCodec

    codec, row = TimestepCodec(spec, rows), timestep(spec, rows, step_type)
    return codec.payload(codec.encode(row, optree.tree_leaves(row.observation)))


class Learn(NamedTuple):
    """Of one batch."""

    prepare: Cost  # stacked and on the devices
    update: Cost  # and published


def learn(config: Config, spec: EnvSpec) -> Learn:
    """One batch of the learner."""
    import jax

    from seedx.learner.batches import Batches
    from seedx.replay.fifo import Fifo

    parts = Parts(config, spec)
    size = config.learner.batch_size
    one = parts.policy.example_items(config.unroll_rows)
    one.timestep.step_type[...] = StepType.MID
    items = jax.tree.map(lambda leaf: np.repeat(leaf, size, 0), one)
    replay = Fifo(size)
    batches = Batches(replay, config.learner, 0.0, parts.meshes.learner, parts.metrics, parts.crew)
    parts.learner.compile(parts.policy.example_batch(size, config.unroll_rows))

    def sampled() -> Any:
        replay.insert(items, np.ones(size, np.float32), 1.0, np.arange(size))
        return replay.sample(size, 1.0)

    batch = batches.prepare(sampled())
    return Learn(timed(lambda: batches.prepare(sampled())), timed(lambda: parts.learner.step(batch)))


class Work(NamedTuple):
    """What the compiled programs ask of a device, counted by XLA on the host they were compiled for."""

    act_flops_step: float
    act_bytes_step: float
    update_flops_step: float
    update_bytes_step: float
    param_bytes: int
    row_bytes: int  # of one environment's timestep on the wire


def work(config: Config) -> Work:
    """Of a step acted in a batch of a group, and of a step learned from in a batch."""
    import jax

    from seedx.inference import wire
    from seedx.inference.step import make_policy_step
    from seedx.learner.update import make_update

    spec = spec_of(config)
    parts = Parts(config, spec)
    state, rows, mesh = parts.learner.state, config.envs_per_group, parts.meshes.learner
    policy = make_policy_step(parts.agent, config.num_slots, jax.random.key(0), mesh)
    tables = jax.eval_shape(policy.fresh)
    jitted: Any = policy.act, make_update(parts.agent, config.learner, mesh, config.seed)
    act_program = jitted[0].lower(state.params, tables, np.zeros(rows, np.int32), timestep(spec, rows, StepType.MID))
    size, steps = config.learner.batch_size, config.learner.batch_size * config.learner.unroll_length
    batch, weights = parts.policy.example_batch(size, config.unroll_rows), np.ones(size, np.float32)
    scalars = np.float32(0), np.int32(0), None
    update_program = jitted[1].lower(state.params, state.target_params, state.opt_state, batch, weights, *scalars)
    act_cost, update_cost = (program.compile().cost_analysis() for program in (act_program, update_program))
    return Work(
        act_cost["flops"] / rows,
        act_cost["bytes accessed"] / rows,
        update_cost["flops"] / steps,
        update_cost["bytes accessed"] / steps,
        sum(leaf.nbytes for leaf in jax.tree.leaves(state.params)),
        sum(column.row_bytes for column in wire.timestep_columns(spec)),
    )

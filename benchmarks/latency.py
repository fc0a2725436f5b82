"""What the policy server costs on top of gRPC: the same load on a bare grpc.aio echo and on a real policy server.

    python benchmarks/latency.py                                  # 2,048 connections of one environment each
    python benchmarks/latency.py --connections 64 --streams 32    # as many streams over few connections

Every stream sends CartPole's rows one by one as soon as it has its answer. The echo answers with as many bytes as the
policy server does. The policy server is the learner's, with the agent's forward pass, unrolls and a replay whose items
are thrown away. Both servers are up all the time, with the same client processes; rounds alternate between them, and
figures are medians over the rounds. Prints one line for each figure: RESULT <name> <value> <unit>. Targets: messages/s
at least 0.6 of the echo's, p99 latency at most 3 times the echo's, the slowest stream at least half of the mean rate,
less than 200 kB for each idle stream.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import multiprocessing
import resource
import sys
import time
from collections.abc import Awaitable, Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import grpc.aio
import numpy as np

from seedx import specs
from seedx.config import ActorConfig, Config
from seedx.inference import policy_pb2 as pb
from seedx.inference import wire
from seedx.types import ArraySpec, EnvSpec, StepType, TimeStep

SPEC = EnvSpec("CartPole-v1", ArraySpec((4,), "float32"), ArraySpec((), "int32", num_values=2))
TIMEOUT_S = 300.0
CONNECTING = 32  # connections that a client opens at a time
Plan = argparse.Namespace


# ---- servers: each runs in a process of its own, sends its port and then tells its usage until it is closed


def serve_echo(pipe: Connection, plan: Plan) -> None:
    """The least that a grpc.aio server can do with the same messages."""
    raise_file_limit()
    reply_bytes = len(wire.ActionCodec(SPEC, 1).encode([np.zeros(1, np.int32)], 0))

    async def hello(_: bytes, __: Any) -> bytes:
        return b""

    async def act(_: Any, context: grpc.aio.ServicerContext) -> None:
        await context.read()  # attach
        while (message := await context.read()) is not grpc.aio.EOF:
            await context.write(message[:reply_bytes])

    async def serve() -> None:
        server = grpc.aio.server(options=[("grpc.max_concurrent_streams", plan.connections * plan.streams)])
        handlers = {
            "Hello": grpc.unary_unary_rpc_method_handler(hello),
            "Act": grpc.stream_stream_rpc_method_handler(act),
        }
        server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("seedx.v1.PolicyServer", handlers)])
        pipe.send(server.add_insecure_port("127.0.0.1:0"))
        await server.start()
        await asyncio.to_thread(report_usage, pipe)

    asyncio.run(serve())


def serve_policy(pipe: Connection, plan: Plan) -> None:
    """The learner's policy server; a thread takes its unrolls in the learner's place."""
    raise_file_limit()
    from seedx import sharding
    from seedx.agents.build import build_agent
    from seedx.inference.frontend import FrontEnd
    from seedx.inference.policy import PolicyServer
    from seedx.inference.streams import Streams
    from seedx.learner.learner import initial_state
    from seedx.metrics import Metrics
    from seedx.replay.fifo import Fifo
    from seedx.replay.replay import ReplayTimeoutError
    from seedx.threads import Crew, spare_the_collector
    from seedx.weights import WeightStore

    actor = ActorConfig(groups=plan.streams)
    config = Config(num_actors=plan.connections, envs_per_actor=plan.streams, actor=actor)
    crew, meshes, agent = Crew(), sharding.build_meshes(config.learner), build_agent(config, SPEC)
    weights, replay = WeightStore(), Fifo(2 * config.learner.batch_size)
    weights.publish(0, initial_state(agent, config.learner, meshes.learner, config.seed).params)
    streams = Streams(config.num_slots, config.inference.max_streams)
    front_end = FrontEnd("127.0.0.1:0", config.inference, streams, crew.fail)
    policy = PolicyServer(agent, SPEC, config, weights, meshes, Metrics(), crew)

    def consume() -> None:
        while not crew.stop.is_set():
            try:
                replay.sample(config.learner.batch_size, timeout_s=0.1)
            except ReplayTimeoutError:
                continue

    policy.warm_up()
    spare_the_collector()
    front_end.start()
    policy.start(front_end.deliver, replay)
    front_end.serve(policy)
    crew.spawn("consumer", consume)
    pipe.send(front_end.port)
    report_usage(pipe)
    if crew.failure is not None:
        raise crew.failure


def report_usage(pipe: Connection) -> None:
    """Answers each request with this process's resident memory, bytes, and CPU seconds, until the pipe closes."""
    while pipe.poll(None):
        try:
            pipe.recv()
        except EOFError:
            return
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        pipe.send((pages * resource.getpagesize(), time.process_time()))


# ---- client


def load(pipe: Connection, plan: Plan, actors: range) -> None:
    """Connects actors to a server for each ("connect", name, port); then runs rounds of ("run", name, seconds)."""
    raise_file_limit()
    timesteps = wire.TimestepCodec(SPEC, 1)
    first, mid = (timesteps.encode(*row(step_type)) for step_type in (StepType.FIRST, StepType.MID))

    async def connect(actor_id: int, port: int, places: asyncio.Semaphore) -> list[grpc.aio.StreamStreamCall]:
        # Without a pool of its own a channel would share its connection with others to the same address.
        channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=[("grpc.use_local_subchannel_pool", 1)])
        run_id = pb.RunId(start_time_ns=time.time_ns())
        hello = pb.HelloRequest(
            protocol=wire.PROTOCOL,
            actor_id=actor_id,
            run_id=run_id,
            groups=plan.streams,
            envs_per_group=1,
            spec_json=specs.to_json(SPEC),
        )
        calls = []
        async with places:
            await channel.unary_unary(wire.HELLO)(hello.SerializeToString(), timeout=TIMEOUT_S)
            for group in range(plan.streams):
                call = channel.stream_stream(wire.ACT)()
                attach = pb.Attach(actor_id=actor_id, run_id=run_id, group=group)
                await call.write(pb.ActRequest(attach=attach).SerializeToString())
                await exchange(call, first)
                calls.append(call)
        return calls

    async def exchange(call: grpc.aio.StreamStreamCall, message: bytes) -> None:
        await call.write(message)
        if await call.read() is grpc.aio.EOF:
            raise RuntimeError(f"a stream ended: {await call.code()} {await call.details()}")

    async def run(call: grpc.aio.StreamStreamCall, until: float) -> list[float]:
        latencies = []
        while (sent := time.perf_counter()) < until:
            await exchange(call, mid)
            latencies.append(time.perf_counter() - sent)
        return latencies

    async def obey() -> None:
        calls: dict[str, list[grpc.aio.StreamStreamCall]] = {}
        while (order := await asyncio.to_thread(pipe.recv)) is not None:
            match order:
                case "connect", name, port:
                    places = asyncio.Semaphore(CONNECTING)
                    connected = await gather(lambda actor_id: connect(actor_id, port, places), actors)  # noqa: B023
                    calls[name] = list(itertools.chain(*connected))
                    pipe.send(len(calls[name]))
                case "run", name, seconds:
                    until = time.perf_counter() + seconds
                    pipe.send(await gather(lambda call: run(call, until), calls[name]))  # noqa: B023

    asyncio.run(obey())


async def gather(function: Callable[[Any], Awaitable[Any]], values: Any) -> list[Any]:
    return await asyncio.gather(*map(function, values))


def row(step_type: StepType) -> tuple[TimeStep, list[np.ndarray]]:
    observation = np.full((1, 4), 0.01, np.float32)
    ones = np.ones(1, np.float32)
    return TimeStep(np.array([step_type], np.uint8), ones, ones, observation), [observation]


# ---- the benchmark


class Round(NamedTuple):
    latencies: list[list[float]]  # [stream][message], seconds
    cpu_s: float  # of the server


def measure(plan: Plan) -> None:
    raise_file_limit()
    context = multiprocessing.get_context("spawn")

    def start(role: Callable[..., None], *args: Any) -> Connection:
        ours, theirs = context.Pipe()
        context.Process(target=role, args=(theirs, plan, *args), daemon=True).start()
        theirs.close()
        return ours

    servers = {"echo": start(serve_echo), "seedx": start(serve_policy)}
    shares = np.array_split(np.arange(plan.connections), plan.clients)
    clients = [start(load, range(int(share[0]), int(share[-1]) + 1)) for share in shares]
    streams = plan.connections * plan.streams
    for name, server in servers.items():
        port, (before, _) = answer(server), usage(server)
        took = time.perf_counter()
        order(clients, "connect", name, port)
        result(f"{name}_connect_s", time.perf_counter() - took, "s")
        result(f"{name}_memory_per_idle_stream", (usage(server)[0] - before) / streams / 1000, "kB")
    order(clients, "run", "echo", 1.0)  # warm-up
    order(clients, "run", "seedx", 1.0)
    rounds: dict[str, list[Round]] = {name: [] for name in servers}
    for _ in range(plan.rounds):
        for name, server in servers.items():
            _, cpu = usage(server)
            latencies = list(itertools.chain(*order(clients, "run", name, plan.seconds)))
            rounds[name].append(Round(latencies, usage(server)[1] - cpu))
    figures = {name: summarize(name, rounds[name], plan.seconds) for name in servers}
    for figure in ("messages_per_s", "cpu_per_message", "latency_p50", "latency_p99"):
        result(f"{figure}_ratio", figures["seedx"][figure] / figures["echo"][figure], "of echo")
    for client in clients:
        client.send(None)


def summarize(name: str, rounds: list[Round], seconds: float) -> dict[str, float]:
    """Prints and returns a server's figures."""
    pooled = [np.concatenate([np.array(stream) for stream in each.latencies]) for each in rounds]
    per_stream = np.sum([[len(stream) for stream in each.latencies] for each in rounds], axis=0)
    cpu_s = [each.cpu_s / len(messages) for each, messages in zip(rounds, pooled, strict=True)]
    figures = {
        "messages_per_s": np.median([len(messages) / seconds for messages in pooled]),
        "cpu_per_message": 1e6 * np.median(cpu_s),
        "latency_p50": np.median([1e3 * np.quantile(messages, 0.5) for messages in pooled]),
        "latency_p99": np.median([1e3 * np.quantile(messages, 0.99) for messages in pooled]),
        "slowest_stream": per_stream.min() / per_stream.mean(),
    }
    units = ("messages/s", "us", "ms", "ms", "of the mean rate")
    for (figure, value), unit in zip(figures.items(), units, strict=True):
        result(f"{name}_{figure}", value, unit)
    return figures


def order(clients: list[Connection], *what: Any) -> list[Any]:
    """Gives all clients an order at once; their answers."""
    for client in clients:
        client.send(what)
    return [answer(client) for client in clients]


def usage(server: Connection) -> tuple[int, float]:
    """Resident memory, bytes, and CPU seconds so far."""
    server.send("usage")
    return answer(server)


def answer(pipe: Connection) -> Any:
    if not pipe.poll(TIMEOUT_S):
        raise TimeoutError(f"a process of the benchmark gave no answer within {TIMEOUT_S:.0f} s.")
    return pipe.recv()


def result(name: str, value: float, unit: str) -> None:
    print(f"RESULT {name} {value:.4g} {unit}", flush=True)


def raise_file_limit() -> None:
    """A connection is an open file on each side."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--connections", type=int, default=2048, help="actors, each with a connection of its own")
    parser.add_argument("--streams", type=int, default=1, help="streams of one environment on each connection")
    parser.add_argument("--clients", type=int, default=1, help="processes that the connections are spread over")
    parser.add_argument("--seconds", type=float, default=5.0, help="length of a round")
    parser.add_argument("--rounds", type=int, default=3, help="rounds on each server")
    measure(parser.parse_args(sys.argv[1:]))

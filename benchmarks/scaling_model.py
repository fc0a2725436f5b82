"""The cost model of docs/scaling.md, checked against runs here and asked about machines that are not here.

    python benchmarks/scaling.py model check      # measures unit costs and real runs here; predicted over measured
    python benchmarks/scaling.py model project    # unit costs measured here, on a v5e-256 and on a node of 8 H200

The model is `cost_model.py`, its unit costs come from `scaling_units.py`, and what it assumes is in
`scaling_machines.py`. Nothing else may run meanwhile. Prints RESULT <name> <value> <unit>.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
from typing import Literal

import scaling_units as units
from cost_model import Machine, Rates, Shape, UnitCosts, full_lag, learning_s, predict
from decode_setup import result
from scaling_machines import MACHINES, Accelerators
from throughput import run_rate

from seedx import cli
from seedx.config import Config
from seedx.config_file import env_config

# ---- against runs on this machine

RUN_S = 8.0
FITTED = ("cartpole_2x64", ["--env", "CartPole-v1", "--num-actors", "2", "--envs-per-actor", "64"])
CHECKED = [
    ("cartpole_2x256", ["--env", "CartPole-v1", "--num-actors", "2", "--envs-per-actor", "256"]),
    ("cartpole_4x32", ["--env", "CartPole-v1", "--num-actors", "4", "--envs-per-actor", "32"]),
    ("pong_1x16", ["--env", "Pong-v5", "--num-actors", "1"]),
]


def check() -> None:
    """Fits `busy` to one run and predicts the others."""
    cores = len(os.sched_getaffinity(0))
    busy = 1.0
    for name, flags in [FITTED, *CHECKED]:
        config = env_config(cli.parse(flags))
        costs = measure(config)
        shape = shape_of(config)
        steps, last = run_rate(flags, RUN_S)
        if name == FITTED[0]:
            rates = predict(costs, shape, Machine(cores))
            assert rates.bound == "learner process", rates.bounds
            busy = rates.steps / steps
            result("busy", busy, "of the CPU time alone")
        machine = Machine(cores, busy)
        rates = predict(costs, shape, machine)
        learning = learning_s(costs, shape, machine) * rates.updates
        show_costs(name, costs)
        result(f"{name}_predicted", rates.steps, f"steps/s, bound by: {rates.bound}")
        result(f"{name}_measured", steps, "steps/s")
        result(f"{name}_ratio", rates.steps / steps, "predicted over measured")
        result(f"{name}_lag_predicted", rates.lag, f"updates; {full_lag(shape, learning):.3g} with a full replay")
        result(f"{name}_lag_measured", last["lag_updates_mean"], "updates")


def measure(config: Config) -> UnitCosts:
    """Unit costs of a config's shape on this machine."""
    spec = units.in_own_process(units.spec_of, config)
    env = units.in_own_process(units.env_step, config)
    exchange = units.exchange(config, spec)
    act = units.in_own_process(units.act, config, spec)
    learn = units.in_own_process(units.learn, config, spec)
    return UnitCosts(
        env=env.cpu,
        client=exchange.client,
        front_end=exchange.front_end,
        act=act.own / config.num_actors,
        act_pool=act.pool / config.num_actors,
        learn=learn.prepare.own + learn.update.own,
        learn_pool=learn.prepare.pool + learn.update.pool,
    )


def show_costs(label: str, costs: UnitCosts) -> None:
    """Prints unit costs."""
    for field, value in dataclasses.asdict(costs).items():
        result(f"{label}_{field}", 1e6 * value, "us")


def shape_of(config: Config) -> Shape:
    """Of a config's run on one host."""
    size = config.learner.batch_size
    queue = config.table.max_size or 2 * size
    return Shape(
        config.num_actors, config.actor.groups, config.envs_per_group, size, config.learner.unroll_length, queue
    )


# ---- on machines that are not here

ATARI = ["--env", "Pong-v5", "--num-actors", "1"]
ROWS = (8, 32, 128)  # of a message
BATCH_SIZE = 32  # unrolls of an update, for each chip


def project(busy: float) -> None:
    """Rates of Atari on each machine, from unit costs measured here and the programs' FLOPs and bytes."""
    configs = {rows: env_config(cli.parse([*ATARI, "--envs-per-actor", str(2 * rows)])) for rows in ROWS}
    works = {torso: atari_work(configs[ROWS[-1]], torso) for torso in ("shallow", "deep")}
    for rows, config in configs.items():
        costs = measure(config)
        show_costs(f"atari_{rows}", costs)
        for name, machine in MACHINES.items():
            for torso, work in works.items():
                show(f"{name}_{torso}_{rows}", machine, on(machine, costs, work, config, busy), work)


def atari_work(config: Config, torso: Literal["shallow", "deep"]) -> units.Work:
    """Of a network; printed."""
    network = dataclasses.replace(config.network, torso=torso)
    work = units.in_own_process(units.work, dataclasses.replace(config, network=network))
    for name, value in work._asdict().items():
        result(f"{torso}_{name}", value, "for each step" if name.endswith("step") else "bytes")
    return work


def on(
    machine: Accelerators, costs: UnitCosts, work: units.Work, config: Config, busy: float
) -> tuple[Shape, Rates, float]:
    """One host's shape, with as few actors as reach its rate; its rates, and its lag with a full replay."""
    rows, length = config.envs_per_group, config.learner.unroll_length
    size = BATCH_SIZE * machine.chips
    # What XLA computes on the threads that call it is still in `act` and `learn`: they are upper bounds.
    learn = costs.learn * size / config.learner.batch_size
    costs = dataclasses.replace(costs, act_pool=0.0, learn=learn, learn_pool=0.0)
    update_s = machine.seconds(work.update_flops_step, work.update_bytes_step)
    update_s += machine.all_reduce_s(work.param_bytes) * machine.chips / (size * length)
    host = Machine(
        machine.cores,
        busy,
        machine.chips,
        machine.seconds(work.act_flops_step, work.act_bytes_step),
        update_s,
        (1 + config.unroll_rows / length) * work.row_bytes / machine.host_bytes_s,  # acted on, and learned from
    )

    def shaped(actors: int) -> Shape:
        return Shape(actors, 2, rows, size, length, 2 * size)

    best = predict(costs, shaped(10**6), host)
    alone = predict(costs, shaped(1), host).bounds["actors"]
    shape = shaped(math.ceil(best.steps / alone))
    rates = predict(costs, shape, host)
    return shape, rates, full_lag(shape, learning_s(costs, shape, host) * rates.updates)


def show(label: str, machine: Accelerators, host: tuple[Shape, Rates, float], work: units.Work) -> None:
    """Prints one machine's figures."""
    shape, rates, full = host
    result(f"{label}_actors", shape.actors, "on each host")
    result(f"{label}_streams", shape.streams * machine.hosts, "in all")
    result(f"{label}_steps", rates.steps * machine.hosts, f"steps/s in all, bound by: {rates.bound}")
    result(f"{label}_bytes", rates.steps * work.row_bytes / 1e6, "MB/s of observations to each host's server")
    result(f"{label}_updates", rates.updates, f"updates/s of {shape.batch_size * machine.hosts} unrolls")
    result(f"{label}_lag", rates.lag, f"updates; {full:.3g} with a full replay")


def main(argv: list[str]) -> None:
    """Checks or projects."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("check", "project"))
    parser.add_argument("--busy", type=float, default=1.0, help="project: what check found for it")
    plan = parser.parse_args(argv)
    if plan.what == "check":
        check()
    else:
        project(plan.busy)

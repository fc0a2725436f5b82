"""The same steps, forward passes and updates as a run, in one process without gRPC, queues or threads.

It is what `benchmarks/throughput.py` compares a run with; on its own it trains and prints returns:

    python benchmarks/alone.py --env CartPole-v1 --envs-per-actor 64 --steps 200000
"""

from __future__ import annotations

import sys
import time
from collections import deque
from pathlib import Path

import jax
import numpy as np

from seedx import cli, sharding
from seedx.agents.build import build_agent
from seedx.config import Config
from seedx.envs.actor import env_seeds
from seedx.envs.make import make_env
from seedx.inference.step import make_policy_step
from seedx.learner.learner import initial_state
from seedx.learner.update import batch_shardings, make_update
from seedx.types import StepType, TimeStep, Unroll


def train(config: Config, steps: float, report: bool = False) -> tuple[int, float, float, dict]:
    """Trains for `steps` executed environment steps after one update of warm-up.

    Returns:
        Executed steps, seconds, the mean return of the last 100 episodes, and the parameters.
    """
    groups = [
        make_env(config, config.envs_per_group, part) for part in np.split(env_seeds(config, 0, 0), config.actor.groups)
    ]
    spec, agent, num = groups[0].spec, build_agent(config, groups[0].spec), config.envs_per_group
    mesh = sharding.build_meshes(config.learner).learner
    policy = make_policy_step(agent, config.envs_per_actor, jax.random.key(config.seed), mesh)
    update = make_update(agent, config.learner, mesh, config.seed)
    params, opt_state, _, _ = initial_state(agent, config.learner, mesh, config.seed)
    slots = [np.arange(i * num, (i + 1) * num, dtype=np.int32) for i in range(len(groups))]
    tables = policy.tables
    for i, part in enumerate(slots):
        tables = policy.attach(tables, part, np.int32(0), part, np.int32(0), np.bool_(False))
    timesteps = [env.reset() for env in groups]
    rows: list[list[tuple]] = [[] for _ in groups]
    states: list = [None] * len(groups)
    pending: list[Unroll] = []
    returns, current = deque(maxlen=100), np.zeros((len(groups), num))
    done_steps, updates, started, shown = 0, 0, None, time.monotonic()
    dtypes = jax.tree.map(lambda leaf: np.dtype(leaf.dtype), spec.action)
    while done_steps < steps:
        for g, env in enumerate(groups):
            timestep = timesteps[g]
            tables, out = policy.act(params, tables, slots[g], timestep)
            action, extras = jax.tree.map(np.asarray, (out.action, out.extras))
            if not rows[g]:
                states[g] = out.state
            rows[g].append((timestep, action, extras, np.full(num, updates, np.int32)))
            if len(rows[g]) == config.learner.unroll_length + 1:
                stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *rows[g])
                pending.append(Unroll(*stacked, state=states[g]))
                rows[g], states[g] = rows[g][-1:], out.state
            timesteps[g] = env.step(jax.tree.map(lambda a, d: np.array(a, d), action, dtypes))
            current[g] += np.where(timesteps[g].step_type == StepType.FIRST, 0, timesteps[g].reward)
            if (ended := timesteps[g].step_type == StepType.LAST).any():
                returns.extend(current[g][ended])
                current[g][ended] = 0
        while sum(u.version.shape[1] for u in pending) >= config.learner.batch_size:
            batch, pending = _take(pending, config.learner.batch_size)
            count = int(np.count_nonzero(batch.timestep.step_type[:-1] != StepType.LAST))
            on_device = jax.device_put(batch, batch_shardings(mesh))
            out = update(params, opt_state, on_device, np.float32(done_steps), np.int32(updates))
            params, opt_state, _, finite = out
            jax.block_until_ready(params)
            assert finite
            updates += 1
            if started is None:
                started = time.monotonic()
            else:
                done_steps += count
        if report and time.monotonic() - shown > 1:
            shown = time.monotonic()
            print(
                f"{done_steps:,} steps {done_steps / (shown - (started or shown) + 1e-9):,.0f}/s return {np.mean(returns) if returns else 0:.1f}",
                flush=True,
            )
        if config.seconds and started and time.monotonic() - started >= config.seconds:
            break
        if config.stop_at_return and len(returns) == 100 and np.mean(returns) >= config.stop_at_return:
            break
    assert started is not None
    return done_steps, time.monotonic() - started, float(np.mean(returns)), params


def _take(pending: list[Unroll], count: int) -> tuple[Unroll, list[Unroll]]:
    def cut(unroll: Unroll, part: slice) -> Unroll:
        rows = jax.tree.map(lambda leaf: leaf[:, part], tuple(unroll[:-1]))
        return Unroll(*rows, state=jax.tree.map(lambda leaf: leaf[part], unroll.state))

    def join(axis: int):
        return lambda *leaves: np.concatenate(leaves, axis) if len(leaves) > 1 else leaves[0]

    taken, rest = [], list(pending)
    while count:
        unroll = rest.pop(0)
        width = unroll.version.shape[1]
        if width > count:
            rest.insert(0, cut(unroll, slice(count, None)))
            unroll, width = cut(unroll, slice(0, count)), count
        taken.append(unroll)
        count -= width
    rows = jax.tree.map(join(1), *[tuple(u[:-1]) for u in taken])
    return Unroll(*rows, state=jax.tree.map(join(0), *[u.state for u in taken])), rest


if __name__ == "__main__":
    sys.path.insert(0, str(Path.cwd()))
    settings = cli.parse(sys.argv[1:])
    total, seconds, mean, _ = train(settings, settings.steps or float("inf"), report=True)
    print(
        f"RESULT alone_env_steps_per_s {total / seconds:.0f} steps/s (return {mean:.1f}, {total} steps, {seconds:.1f} s)"
    )

"""The same steps, forward passes and updates as a run, in one process without gRPC, queues or threads.

It is what `benchmarks/throughput.py` compares a run with; on its own it trains and prints returns. Flags are those of
launch/local.py; one actor's environments are stepped:

    python benchmarks/alone.py --env CartPole-v1 --envs-per-actor 64 --steps 200000
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from seedx import cli, sharding
from seedx.agents.build import build_agent
from seedx.config import Config
from seedx.config_file import env_config
from seedx.envs.actor import env_seeds
from seedx.envs.make import make_env
from seedx.inference.step import make_policy_step
from seedx.learner.learner import initial_state
from seedx.learner.update import batch_shardings, make_update
from seedx.metrics import EpisodeStats
from seedx.types import Env, Tree, Unroll, transition_mask


class Result(NamedTuple):
    """What training came to; the first update, which compiles, is not counted in steps and seconds."""

    env_steps: int
    seconds: float
    return_mean: float
    params: Tree


class Group:
    """One environment group and the unroll that it is in, with the rows that lead it."""

    def __init__(self, env: Env, first_slot: int, unroll_length: int, lead: int) -> None:
        self.slots = np.arange(first_slot, first_slot + env.num_envs, dtype=np.int32)
        self.timestep = env.reset()
        self._env = env
        self._length, self._lead = unroll_length, lead
        self._dtypes = jax.tree.map(lambda leaf: np.dtype(leaf.dtype), env.spec.action)
        self._rows: list[Any] = []
        self._state: Tree = None

    def step(self, output: Any, version: int) -> Unroll | None:
        """Takes the actions of a forward pass; the unroll that their row finished."""
        action, extras = jax.tree.map(np.asarray, (output.action, output.extras))
        if len(self._rows) == self._lead:
            self._state = output.state
        self._rows.append((self.timestep, action, extras, np.full(len(self.slots), version, np.int32)))
        finished = None
        if len(self._rows) == self._lead + self._length + 1:
            finished = Unroll(*jax.tree.map(lambda *leaves: np.stack(leaves), *self._rows), state=self._state)
            self._rows, self._state = self._rows[-self._lead - 1 :], output.state
        self.timestep = self._env.step(jax.tree.map(lambda leaf, dtype: np.array(leaf, dtype), action, self._dtypes))
        return finished


class Loop:
    """Acts, collects and updates in turn."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._mesh = sharding.build_meshes(config.learner).learner
        envs = [make_env(config, len(seeds), seeds) for seeds in np.split(env_seeds(config, 0, 0), config.actor.groups)]
        agent = build_agent(config, envs[0].spec)
        policy = make_policy_step(agent, config.envs_per_actor, jax.random.key(config.seed), self._mesh)
        self._act, self._tables = policy.act, policy.fresh()
        self._groups = []
        for i, env in enumerate(envs):
            group = Group(env, i * env.num_envs, config.learner.unroll_length, config.network.lead)
            ranks = np.zeros(env.num_envs, np.float32)
            self._tables = policy.attach(
                self._tables, group.slots, np.int32(0), group.slots, np.int32(0), ranks, np.bool_(False)
            )
            self._groups.append(group)
        self._update = make_update(agent, config.learner, self._mesh, config.seed)
        self._learner = initial_state(agent, config.learner, self._mesh, config.seed)
        self._pending: list[Unroll] = []
        self._episodes = EpisodeStats(config.envs_per_actor)

    def train(self, steps: float, report: bool = False) -> Result:
        """Trains until the config's stop, or for so many steps."""
        started = shown = 0.0
        first_steps = 0
        while True:
            self._step_groups()
            if not self._learn():
                continue
            now, state = time.monotonic(), self._learner
            if not started:
                started, first_steps = now, state.env_steps
            done, seconds = state.env_steps - first_steps, now - started
            mean, episodes = self._episodes.mean_return()
            if report and now - shown > 1:
                shown = now
                print(f"{done:,} steps, {done / max(seconds, 1e-9):,.0f}/s, return {mean:.1f}", flush=True)
            solved = self._config.stop_at_return is not None and episodes == 100 and mean >= self._config.stop_at_return
            if solved or done >= steps or seconds >= (self._config.seconds or float("inf")):
                return Result(done, seconds, mean, state.params)

    def _step_groups(self) -> None:
        state = self._learner
        for group in self._groups:
            self._episodes.step(group.slots, group.timestep.step_type, group.timestep.reward)
            self._tables, output = self._act(state.params, self._tables, group.slots, group.timestep)
            finished = group.step(output, state.updates)
            if finished is not None:
                self._pending.append(finished)

    def _learn(self) -> bool:
        """Updates while there are whole batches; whether there was one."""
        size, learned = self._config.learner.batch_size, False
        while sum(unroll.version.shape[1] for unroll in self._pending) >= size:
            batch = self._take(size)
            state = self._learner
            on_device = jax.device_put(batch, batch_shardings(self._mesh))
            counts = np.float32(state.env_steps), np.int32(state.updates), None
            updated = self._update(state.params, None, state.opt_state, on_device, np.ones(size, np.float32), *counts)
            jax.block_until_ready(updated.params)
            count = int(np.count_nonzero(transition_mask(batch.timestep.step_type[self._config.network.lead :])))
            self._learner = state._replace(
                params=updated.params,
                opt_state=updated.opt_state,
                updates=state.updates + 1,
                env_steps=state.env_steps + count,
            )
            learned = True
        return learned

    def _take(self, count: int) -> Unroll:
        """The oldest `count` unrolls, `[T+1, count]`."""
        taken = []
        while count:
            unroll = self._pending.pop(0)
            width = unroll.version.shape[1]
            if width > count:
                self._pending.insert(0, _cut(unroll, slice(count, None)))
                unroll, width = _cut(unroll, slice(0, count)), count
            taken.append(unroll)
            count -= width
        if len(taken) == 1:
            return taken[0]
        rows = jax.tree.map(lambda *leaves: np.concatenate(leaves, 1), *[tuple(unroll[:-1]) for unroll in taken])
        return Unroll(*rows, state=jax.tree.map(lambda *leaves: np.concatenate(leaves), *[u.state for u in taken]))


def _cut(unroll: Unroll, part: slice) -> Unroll:
    rows = jax.tree.map(lambda leaf: leaf[:, part], tuple(unroll[:-1]))
    return Unroll(*rows, state=jax.tree.map(lambda leaf: leaf[part], unroll.state))


def main(argv: list[str]) -> None:
    """Trains and prints the rate."""
    sys.path.insert(0, str(Path.cwd()))
    config = env_config(cli.parse(argv))
    result = Loop(config).train(config.steps or float("inf"), report=True)
    rate = result.env_steps / result.seconds
    print(f"RESULT alone_env_steps_per_s {rate:.0f} steps/s")
    print(f"RESULT alone_return_mean {result.return_mean:.3f} return")


if __name__ == "__main__":
    main(sys.argv[1:])

"""The learner: takes batches, updates, publishes. Everything that a checkpoint must hold is in `LearnerState`.

Threading: one thread calls `step`; `state` is replaced as a whole, so any thread may read it.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from seedx import sharding
from seedx.config import LearnerConfig
from seedx.hosts import ONE_HOST, Hosts
from seedx.learner.batches import LearnerBatch
from seedx.learner.update import make_optimizer, make_update
from seedx.metrics import Metrics
from seedx.seeds import Purpose, run_key
from seedx.sharding import Meshes
from seedx.types import Agent, Tree, Unroll
from seedx.votes import Vote, Votes
from seedx.weights import WeightStore


class NonFiniteError(RuntimeError):
    """Loss or gradient became NaN or infinite; the weights were left as they were and the batch was saved."""


class LearnerState(NamedTuple):
    """What learning has come to."""

    params: Tree
    target_params: Tree  # None without a target network
    opt_state: Tree
    updates: int
    env_steps: int  # executed steps that were learned from


def initial_state(agent: Agent, config: LearnerConfig, mesh: Mesh, seed: int) -> LearnerState:
    """Fresh parameters on the learner's devices."""

    def init(key: jax.Array) -> tuple[Tree, Tree, Tree]:
        params = agent.init(key)
        target_params = jax.tree.map(jnp.copy, params) if config.target_period else None  # it will be donated
        return params, target_params, make_optimizer(config).init(params)

    whole = sharding.replicated(mesh)
    return LearnerState(*jax.jit(init, out_shardings=whole)(run_key(seed, Purpose.INIT)), updates=0, env_steps=0)


class Learner:
    """Turns batches into new versions of the weights.

    Args:
        agent: Whose loss is minimised.
        config: Of the learner.
        meshes: Of the run.
        state: To go on from.
        weights: Where versions go; the state's own is published at once, as version `state.updates`.
        metrics: Where figures go.
        seed: Of the loss's randomness.
        run_dir: Where the batch is saved that made an update non-finite.
        hosts: That learn together; by default this one alone.

    Attributes:
        votes: What all hosts said with the last update; None on one host.
        lag_sum: Over the batches of this session, of each one's mean lag.
        lag_batches: How many these are.
    """

    def __init__(
        self,
        agent: Agent,
        config: LearnerConfig,
        meshes: Meshes,
        state: LearnerState,
        weights: WeightStore,
        metrics: Metrics,
        seed: int,
        run_dir: Path,
        hosts: Hosts = ONE_HOST,
    ) -> None:
        self.state = state
        self.lag_sum = 0.0
        self.lag_batches = 0
        self.votes: Votes | None = None
        self._hosts = hosts
        self._mesh = meshes.learner
        self._unroll_length = config.unroll_length
        self._weights = weights
        self._metrics = metrics
        self._run_dir = run_dir
        self._launching = meshes.launching
        self._update = make_update(agent, config, meshes.learner, seed)
        weights.publish(state.updates, state.params)

    def compile(self, batch: Unroll) -> None:
        """Compiles the update for batches of these shapes, without running it."""
        state = self.state
        weights = jax.ShapeDtypeStruct(batch.version.shape[1:], jnp.float32)
        scalars = jax.ShapeDtypeStruct((), jnp.float32), jax.ShapeDtypeStruct((), jnp.int32)
        votes = None if self._hosts.alone else jax.ShapeDtypeStruct((self._mesh.size, len(Vote._fields)), jnp.float32)
        arguments = state.params, state.target_params, state.opt_state, batch, weights, *scalars, votes
        self._update = self._update.lower(*arguments).compile()  # type: ignore[attr-defined]

    def step(self, batch: LearnerBatch, vote: Vote | None = None) -> np.ndarray | None:
        """Updates on one batch and publishes the result; the priorities `[B]` that the loss gave its items, if any.

        Of several hosts, all must call this together. If all their batches are masked, there is no update.

        Args:
            batch: This host's part.
            vote: What this host says; None if it is the only one.

        Raises:
            NonFiniteError: the update would have been; the state is unchanged.
        """
        started = time.monotonic()
        state = self.state
        with self._launching:
            updated = self._update(
                state.params,
                state.target_params,
                state.opt_state,
                batch.unroll,
                batch.weights,
                np.float32(state.env_steps),
                np.int32(state.updates),
                None if vote is None else sharding.put(self._ballot(vote), sharding.split_axis(self._mesh, 0)),
            )
        # Publishing before the params exist would make acting wait for this update.
        jax.block_until_ready(updated.params)
        if not bool(updated.finite):
            # The same values; those that were put in are donated.
            self.state = LearnerState(
                updated.params, updated.target_params, updated.opt_state, state.updates, state.env_steps
            )
            raise self._non_finite(batch, updated.metrics)
        env_steps, changed = batch.env_steps, 1
        if vote is not None:
            self.votes = Votes(np.asarray(updated.votes)[:: self._mesh.local_mesh.size])
            env_steps, changed = self.votes.env_steps, int(self.votes.learners > 0)
        self.state = LearnerState(
            updated.params,
            updated.target_params,
            updated.opt_state,
            state.updates + changed,
            state.env_steps + env_steps,
        )
        if not changed:
            return None
        self._weights.publish(self.state.updates, self.state.params)
        self._record(batch, updated.metrics, state.updates, env_steps, time.monotonic() - started)
        if updated.priorities is None or batch.masked:
            return None
        return np.split(np.asarray(updated.priorities), self._hosts.count)[self._hosts.index]

    def _ballot(self, vote: Vote) -> np.ndarray:
        """The vote for each device of this host, `[devices, 5]`."""
        return np.tile(vote.row(), (self._mesh.local_mesh.size, 1))

    def _record(self, batch: LearnerBatch, metrics: dict, version: int, env_steps: int, seconds: float) -> None:
        for name, value in jax.device_get(metrics).items():
            self._metrics.average(f"learner/{name}", float(value))
        self._metrics.time("learner/update", seconds)
        self._metrics.count("updates")
        self._metrics.count("env_steps", env_steps)
        if not self._hosts.alone:
            self._metrics.count("host/env_steps", batch.env_steps)
            self._metrics.count("host/masked_batches", batch.masked)
        if not batch.masked:
            self._record_lag(batch, version)

    def _record_lag(self, batch: LearnerBatch, version: int) -> None:
        lags = version - batch.host.version[-self._unroll_length - 1 : -1]
        # A table may outlive the learner that chose its actions; our version says nothing of how old those are.
        self._metrics.count("learner/newer_items", int((lags < 0).any(axis=0).sum()))
        lag = np.maximum(lags, 0).mean(axis=0)  # of each unroll
        self.lag_sum += float(lag.mean())
        self.lag_batches += 1
        self._metrics.observe("learner/lag_updates", lag)

    def _non_finite(self, batch: LearnerBatch, metrics: dict) -> NonFiniteError:
        path = self._run_dir / f"non_finite_batch_{self.state.updates}.npz"
        paths, _ = jax.tree.flatten_with_path(batch.host)
        np.savez_compressed(path, **{jax.tree_util.keystr(key): leaf for key, leaf in paths})
        figures = {name: float(value) for name, value in jax.device_get(metrics).items()}
        return NonFiniteError(
            f"update {self.state.updates + 1} is not finite: {figures}. The weights were left as before it, and its "
            f"batch is in {path}. Lower --learner.learning-rate or look for extreme observations and rewards."
        )

"""Batches for the learner, one ahead: sampled, turned time-major and copied to the devices on a thread of their own.

Invariant: at most one batch waits and one is in the making, so sampled data are never more than two updates old.
"""

from __future__ import annotations

import queue
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from seedx.learner.update import batch_shardings
from seedx.metrics import Metrics
from seedx.replay.replay import Replay, ReplayTimeoutError
from seedx.threads import Crew
from seedx.types import Unroll, transition_mask

_SAMPLE_TIMEOUT_S = 0.5


class LearnerBatch(NamedTuple):
    """A batch on the devices, and what the host knows of it."""

    unroll: Unroll  # [T+1, B] on the devices
    host: Unroll  # the same in host memory, kept until the update is known to be finite
    env_steps: int  # executed transitions


class Batches:
    """Fetches batches from a replay ahead of the learner.

    Args:
        replay: Where unrolls come from.
        batch_size: Unrolls of a batch.
        mesh: The learner's devices.
        metrics: Times the waits.
        crew: Runs the thread.
    """

    def __init__(self, replay: Replay, batch_size: int, mesh: Mesh, metrics: Metrics, crew: Crew) -> None:
        self._replay = replay
        self._batch_size = batch_size
        self._shardings = batch_shardings(mesh)
        self._metrics = metrics
        self._crew = crew
        self._ready: queue.Queue[LearnerBatch] = queue.Queue(maxsize=1)

    def start(self) -> None:
        """Begins to fetch."""
        self._crew.spawn("batches", self._loop)

    def next(self, timeout_s: float) -> LearnerBatch | None:
        """The next batch, or None if there is none within the timeout."""
        try:
            with self._metrics.timer("learner/wait_batch"):
                return self._ready.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def _loop(self) -> None:
        while not self._crew.stop.is_set():
            try:
                items = self._replay.sample(self._batch_size, _SAMPLE_TIMEOUT_S).items
            except ReplayTimeoutError:
                continue
            self._offer(self.prepare(items))

    def prepare(self, items: Unroll) -> LearnerBatch:
        """Items `[B, T+1, ...]` as a time-major batch on the devices."""
        host = time_major(items)
        env_steps = int(np.count_nonzero(transition_mask(host.timestep.step_type)))
        return LearnerBatch(jax.device_put(host, self._shardings), host, env_steps)

    def _offer(self, batch: LearnerBatch) -> None:
        while not self._crew.stop.is_set():
            try:
                self._ready.put(batch, timeout=_SAMPLE_TIMEOUT_S)
            except queue.Full:
                continue
            return


def time_major(items: Unroll) -> Unroll:
    """Unrolls `[B, T+1, ...]` as `[T+1, B, ...]`; `state` stays `[B, ...]`."""

    def turn(leaf: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(np.moveaxis(leaf, 0, 1))

    return Unroll(*jax.tree.map(turn, tuple(items[:-1])), state=items.state)

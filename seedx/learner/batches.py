"""Batches for the learner, one ahead: sampled, turned time-major and copied to the devices on a thread of their own.

Invariant: at most one batch waits and one is in the making, so sampled data are never more than two updates old.
"""

from __future__ import annotations

import queue
from collections.abc import Callable
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from seedx import sharding
from seedx.config import LearnerConfig
from seedx.learner.update import batch_shardings
from seedx.metrics import Metrics
from seedx.replay.patience import Patience
from seedx.replay.replay import Replay, ReplayTimeoutError, Sample
from seedx.threads import Crew
from seedx.types import StepType, Unroll, transition_mask

_SAMPLE_TIMEOUT_S = 0.5


class LearnerBatch(NamedTuple):
    """A batch on the devices, and what the host knows of it."""

    unroll: Unroll  # [T+1, B] on the devices
    weights: jax.Array  # float32 [B], importance weights, on the devices
    host: Unroll  # the unrolls in host memory, kept until the update is known to be finite
    keys: np.ndarray  # uint64 [B]
    env_steps: int  # executed environment steps that are new with this batch

    @property
    def masked(self) -> bool:
        """Whether it is one of `masked_batch`."""
        return not len(self.keys)


class Batches:
    """Fetches batches from a replay ahead of the learner.

    Args:
        replay: Where unrolls come from.
        config: Of the learner.
        importance_exponent: beta of the importance weights; 0: they are 1.
        mesh: The learner's devices.
        metrics: Times the waits.
        crew: Runs the thread.
        acted: Environment steps executed so far, for a replay that gives items several times or not at all; None: the
            steps that each item is the first to have count.
    """

    def __init__(
        self,
        replay: Replay,
        config: LearnerConfig,
        importance_exponent: float,
        mesh: Mesh,
        metrics: Metrics,
        crew: Crew,
        acted: Callable[[], int] | None = None,
    ) -> None:
        self._replay = replay
        self._batch_size, self._stride = config.batch_size, config.stride
        self._importance_exponent = importance_exponent
        self._shardings = batch_shardings(mesh), sharding.split_axis(mesh, 0)
        self._acted = acted
        self._counted = 0
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
        patience = Patience("learning")
        while not self._crew.stop.is_set():
            try:
                sample = self._replay.sample(self._batch_size, _SAMPLE_TIMEOUT_S)
            except ReplayTimeoutError as error:
                patience.timed_out(error)
                continue
            patience.over()
            self._offer(self.prepare(sample))

    def prepare(self, sample: Sample) -> LearnerBatch:
        """Items `[B, T+1, ...]` as a time-major batch on the devices."""
        host = time_major(sample.items)
        weights = importance_weights(sample, self._importance_exponent)
        unroll, weights = sharding.put((host, weights), self._shardings)
        return LearnerBatch(unroll, weights, host, sample.keys, self._new_steps(host))

    def _new_steps(self, host: Unroll) -> int:
        if self._acted is None:
            return int(np.count_nonzero(transition_mask(host.timestep.step_type[-self._stride - 1 :])))
        before, self._counted = self._counted, self._acted()
        return self._counted - before

    def _offer(self, batch: LearnerBatch) -> None:
        while not self._crew.stop.is_set():
            try:
                self._ready.put(batch, timeout=_SAMPLE_TIMEOUT_S)
            except queue.Full:
                continue
            return


def masked_batch(example: Unroll, mesh: Mesh) -> LearnerBatch:
    """A batch without executed transitions, for a host that has none while others learn.

    Args:
        example: Shapes of this host's part of a batch, `[T+1, B]`.
        mesh: The learner's devices.
    """
    host: Unroll = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), example)
    host.timestep.step_type[...] = StepType.LAST
    weights = np.zeros(example.version.shape[1], np.float32)
    shardings = batch_shardings(mesh), sharding.split_axis(mesh, 0)
    unroll, weights = sharding.put((host, weights), shardings)
    return LearnerBatch(unroll, weights, host, keys=np.zeros(0, np.uint64), env_steps=0)


def importance_weights(sample: Sample, exponent: float) -> np.ndarray:
    """(N P(i))^-exponent over the batch's largest, float32 `[B]` (1511.05952, section 3.4)."""
    weights = (sample.table_size * sample.probabilities) ** -exponent
    return (weights / weights.max()).astype(np.float32)


def time_major(items: Unroll) -> Unroll:
    """Unrolls `[B, T+1, ...]` as `[T+1, B, ...]`; `state` stays `[B, ...]`."""

    def turn(leaf: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(np.moveaxis(leaf, 0, 1))

    return Unroll(*jax.tree.map(turn, tuple(items[:-1])), state=items.state)

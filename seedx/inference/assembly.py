"""From the messages of a batch to the rows of one forward pass: one copy, and nothing unsound gets through."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import jax
import numpy as np

from seedx.inference import step, wire
from seedx.inference.batcher import Batch
from seedx.inference.request import Request
from seedx.types import EnvSpec, StepType, TimeStep


class Assembler:
    """Makes batches of sound rows; remembers of every slot whether its next row must be FIRST. One thread's.

    Args:
        spec: Of the environments.
        num_slots: S.
        sizes: Batch sizes that are compiled, ascending.
        refuse: Told of a request whose rows cannot be used, and why.
    """

    def __init__(self, spec: EnvSpec, num_slots: int, sizes: list[int], refuse: Callable[[Request, str], None]) -> None:
        self._columns = wire.timestep_columns(spec)
        self._observation_tree = jax.tree.structure(spec.observation)
        self._sizes = sizes
        self._refuse = refuse
        self._starts_episode = np.ones(num_slots, bool)

    def zeros(self, size: int) -> list[np.ndarray]:
        """Rows of zeros: leaves `[size, ...]` in the wire's order."""
        return [column.spec.zeros(size) for column in self._columns]

    def timestep(self, leaves: list[np.ndarray]) -> TimeStep:
        """Leaves in the wire's order as a timestep."""
        reward, discount, *observation, step_type = leaves
        return TimeStep(step_type, reward, discount, jax.tree.unflatten(self._observation_tree, observation))

    def begin(self, slots: np.ndarray) -> None:
        """The next row of these slots must be FIRST."""
        self._starts_episode[slots] = True

    def assemble(self, batch: Batch[Request]) -> tuple[Batch[Request], list[np.ndarray], np.ndarray]:
        """The batch without requests that are unsound or whose stream is gone, its rows and its slots `[n]`.

        Rows are leaves `[size, ...]` in the wire's order, padded to a compiled size; none where nothing is left.
        """
        batch = _keep(batch, lambda request: request.stream.ended is None)
        rows, slots = self._copy(batch)
        if self._wrong([leaf[: batch.rows] for leaf in rows], slots) is not None:
            batch = _keep(batch, self._is_sound)
            rows, slots = self._copy(batch)
        if rows:
            self._starts_episode[slots] = rows[-1][: batch.rows] == StepType.LAST
        return batch, rows, slots

    def _copy(self, batch: Batch[Request]) -> tuple[list[np.ndarray], np.ndarray]:
        """Rows and slots of a batch: one copy from the messages, none where one message fills the batch."""
        if not batch.requests:
            return [], np.empty(0, np.int32)
        slots = np.concatenate([request.stream.slots for request in batch.requests])
        size = step.bucket_for(batch.rows, self._sizes)
        if len(batch.requests) == 1 and batch.rows == size:
            request = batch.requests[0]
            return request.stream.timesteps.layout.decode(request.payload), slots
        rows, start = self.zeros(size), 0
        for codec, requests in itertools.groupby(batch.requests, lambda request: request.stream.timesteps):
            payloads = [request.payload for request in requests]
            stop = start + len(payloads) * codec.layout.num_envs
            codec.layout.decode_into([leaf[start:stop] for leaf in rows], payloads)
            start = stop
        return rows, slots

    def _wrong(self, rows: list[np.ndarray], slots: np.ndarray) -> str | None:
        return wire.check_rows(self._columns, rows, self._starts_episode[slots]) if rows else None

    def _is_sound(self, request: Request) -> bool:
        """Whether a request's rows can be used; if not, its stream is told what is wrong with them."""
        rows = request.stream.timesteps.layout.decode(request.payload)
        wrong = self._wrong(rows, request.stream.slots)
        if wrong is not None:
            self._refuse(request, wrong)
        return wrong is None


def _keep(batch: Batch[Request], wanted: Callable[[Request], bool]) -> Batch[Request]:
    requests = [request for request in batch.requests if wanted(request)]
    return Batch(requests, sum(request.rows for request in requests), batch.reason, batch.waited_s)

"""From the results of a forward pass to replies, unrolls and episode statistics.

Threading, one owner for each thing:
    delivery   waits for results, adds rows to unrolls, answers (owns the unroll store and the statistics)
    insertion  puts finished unrolls into the replay, then answers their streams (the only one that waits for room)
Invariant: a stream whose unroll found no room gets no reply until it is in; so nothing is dropped and nothing piles up,
while other streams, batching and gRPC go on.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np

from seedx.checks import ConfigError
from seedx.config import Config
from seedx.inference import step
from seedx.inference.batcher import Batch
from seedx.inference.request import Request
from seedx.inference.streams import Refused, Stream
from seedx.inference.unrolls import FinishedUnrolls, UnrollStore
from seedx.metrics import EpisodeStats, Metrics
from seedx.replay.patience import Patience
from seedx.replay.replay import Replay, ReplayTimeoutError
from seedx.threads import Crew
from seedx.types import Agent, EnvSpec, PrioritizedAgent, TimeStep, Unroll, transition_mask

_POLL_S = 0.1
_INSERT_TIMEOUT_S = 1.0
Deliver = Callable[[Sequence[tuple[Request, bytes | Refused]]], None]


class _Items(NamedTuple):
    """Unrolls that were finished together."""

    unrolls: Unroll  # leaves [K, ...]
    sources: np.ndarray  # int64 [K]


@dataclass(frozen=True)
class InFlight:
    """A batch on the device.

    Attributes:
        batch: Its requests; those of evaluation come last.
        training: How many requests come before those of evaluation.
        attached: Streams that began since the batch before.
        version: Of the weights that act.
        rows: Timestep leaves `[bucket, ...]`, in the wire's order.
        slots: `[rows]`.
        bounds: `[requests + 1]`; where the rows of each request begin and end.
        output: Of the forward pass.
    """

    batch: Batch[Request]
    training: int
    attached: list[Stream]
    version: int
    rows: list[np.ndarray]
    slots: np.ndarray
    bounds: np.ndarray
    output: step.StepOutput


class Delivery:
    """Answers batches in the order in which they were launched.

    Args:
        agent: Gives new unrolls their priorities.
        spec: Of the environments.
        config: Of the run.
        timestep: Makes a timestep of leaves in the wire's order.
        release: Called when a batch's results are here.
        metrics: Counts waits.
        crew: Runs the threads.
        episodes: Episode statistics to go on from.

    Attributes:
        episodes: Statistics of training.
        eval_episodes: Statistics of evaluation.
        finished_items: Unrolls finished so far.
        env_steps: Executed steps in the unrolls that the replay took.
    """

    def __init__(
        self,
        agent: Agent,
        spec: EnvSpec,
        config: Config,
        timestep: Callable[[list[np.ndarray]], TimeStep],
        release: Callable[[], None],
        metrics: Metrics,
        crew: Crew,
        episodes: Mapping[str, Any] | None,
    ) -> None:
        self._initial_priorities = _initial_priorities(agent, config)
        self._action_dtypes = [np.dtype(leaf.dtype) for leaf in jax.tree.leaves(spec.action)]
        self._num_timestep_leaves = 3 + jax.tree.structure(spec.observation).num_leaves
        self._batch_size = config.learner.batch_size
        self._stride = config.learner.stride
        self._timestep = timestep
        self._release = release
        self._metrics = metrics
        self._patience = Patience("acting")
        self._crew = crew
        self._deliver: Deliver = lambda _: None
        self._in_flight: queue.SimpleQueue[InFlight] = queue.SimpleQueue()  # bounded by the batcher's places
        # At most one entry for each stream, since a stream asks only after its reply.
        self._inserting: queue.SimpleQueue[tuple[_Items, list[tuple[Request, bytes]]]] = queue.SimpleQueue()
        self._withheld: set[Stream] = set()
        self._lock = threading.Lock()  # guards `_withheld`
        self._unrolls = UnrollStore(config.num_slots, config.unroll_rows, config.learner.stride, config.network.lead)
        window = config.metrics.return_window
        self.episodes = EpisodeStats(config.num_slots, window=window, state=episodes)
        self.eval_episodes = EpisodeStats(config.num_slots, window=window)
        self.finished_items = 0
        self.env_steps = 0

    def start(self, deliver: Deliver, replay: Replay) -> None:
        """Answers through `deliver` from now on; finished unrolls go to `replay`."""
        self._deliver = deliver
        self._replay = replay
        self._crew.spawn("delivery", self._delivery_loop)
        self._crew.spawn("insertion", self._insertion_loop)

    def put(self, flight: InFlight) -> None:
        """A batch that was launched."""
        self._in_flight.put(flight)

    def refuse(self, request: Request, why: Refused) -> None:
        """Answers a request with a refusal, which ends its stream."""
        self._deliver([(request, why)])

    def withheld(self) -> set[Stream]:
        """Streams that wait for room in the replay."""
        with self._lock:
            return set(self._withheld)

    # ---- delivery

    def _delivery_loop(self) -> None:
        while not self._crew.stop.is_set():
            try:
                flight = self._in_flight.get(timeout=_POLL_S)
            except queue.Empty:
                continue
            self._finish(flight)

    def _finish(self, flight: InFlight) -> None:
        """Fetches a batch's results and answers it."""
        for stream in flight.attached:
            self._begin(stream)
        actions = [np.asarray(leaf) for leaf in jax.tree.leaves(flight.output.action)]
        self._release()
        wire_actions = [leaf.astype(d, copy=False) for leaf, d in zip(actions, self._action_dtypes, strict=True)]
        replies = [
            (request, request.stream.actions.encode(wire_actions, flight.version, first))
            for request, first in zip(flight.batch.requests, flight.bounds[:-1].tolist(), strict=True)
        ]
        ends = self._unrolls.finishing(flight.slots[flight.bounds[: flight.training]]).tolist()
        ends += [False] * (len(replies) - flight.training)
        withheld = [reply for reply, end in zip(replies, ends, strict=True) if end]
        # Who need not wait for room is answered first: storing rows takes a while.
        self._deliver([reply for reply, end in zip(replies, ends, strict=True) if not end])
        finished = self._add_rows(flight, actions)
        self._record_episodes(flight)
        if finished is not None:
            self._insert(_Items(self._as_items(finished, flight.output), finished.sources), withheld)

    def _begin(self, stream: Stream) -> None:
        """Forgets what was before on the slots of a stream; here, after all rows of the stream before."""
        self._unrolls.reset(stream.slots)
        for stats in (self.episodes, self.eval_episodes):
            stats.drop(stream.slots)

    def _add_rows(self, flight: InFlight, actions: list[np.ndarray]) -> FinishedUnrolls | None:
        """The unrolls that a batch finished; rows of evaluation, which come last, are left out."""
        bounds = flight.bounds[: flight.training + 1]
        count = bounds[-1]
        slots = flight.slots[:count]
        extras = [np.asarray(leaf) for leaf in jax.tree.leaves(flight.output.extras)]
        rows = [leaf[:count] for leaf in (*flight.rows, *actions, *extras)]
        state = [np.asarray(leaf)[:count] for leaf in self._state_before(flight, slots[bounds[:-1]])]
        return self._unrolls.add(slots, bounds, [*rows, np.full(count, flight.version, np.int32)], state)

    def _state_before(self, flight: InFlight, firsts: np.ndarray) -> list[jax.Array]:
        """Agent state before the batch; none where no unroll starts, which spares the copy from the device."""
        return jax.tree.leaves(flight.output.state) if self._unrolls.wants_state(firsts) else []

    def _as_items(self, finished: FinishedUnrolls, output: step.StepOutput) -> Unroll:
        """The unrolls with a leading item axis; a view that stays time-major in memory."""
        num_timestep, num_action = self._num_timestep_leaves, len(self._action_dtypes)
        *rows, version = [np.moveaxis(leaf, 1, 0) for leaf in finished.rows]
        return Unroll(
            timestep=self._timestep(rows[:num_timestep]),
            action=jax.tree.unflatten(
                jax.tree.structure(output.action), rows[num_timestep : num_timestep + num_action]
            ),
            extras=jax.tree.unflatten(jax.tree.structure(output.extras), rows[num_timestep + num_action :]),
            version=version,
            state=jax.tree.unflatten(jax.tree.structure(output.state), finished.state),
        )

    def _record_episodes(self, flight: InFlight) -> None:
        reward, step_type = flight.rows[0], flight.rows[-1]
        middle, end = flight.bounds[flight.training], flight.bounds[-1]
        for stats, part in ((self.episodes, slice(0, middle)), (self.eval_episodes, slice(middle, end))):
            if part.start < part.stop:
                stats.step(flight.slots[part], step_type[part], reward[part])

    # ---- insertion

    def _insert(self, items: _Items, replies: list[tuple[Request, bytes]]) -> None:
        """Hands over unrolls `[K, T+1, ...]` in pieces of at most a batch or one group.

        So the replay's bound holds, and those that find room need not wait for the others.
        """
        self.finished_items += sum(request.rows for request, _ in replies)
        with self._lock:
            self._withheld.update(request.stream for request, _ in replies)
        start = stop = 0
        piece: list[tuple[Request, bytes]] = []
        for reply in replies:
            if piece and stop - start + reply[0].rows > self._batch_size:
                self._inserting.put((_slice(items, start, stop), piece))
                start, piece = stop, []
            piece.append(reply)
            stop += reply[0].rows
        self._inserting.put((_slice(items, start, stop), piece))

    def _insertion_loop(self) -> None:
        while not self._crew.stop.is_set():
            try:
                items, replies = self._inserting.get(timeout=_POLL_S)
            except queue.Empty:
                continue
            started = time.monotonic()
            if self._insert_items(items):
                self._metrics.time("queue/put_wait", time.monotonic() - started)
                with self._lock:
                    self._withheld.difference_update(request.stream for request, _ in replies)
                self._deliver(replies)

    def _insert_items(self, items: _Items) -> bool:
        """Waits for room as long as the run lasts."""
        priorities = self._initial_priorities(items.unrolls)
        while not self._crew.stop.is_set():
            started = time.monotonic()
            try:
                self._replay.insert(items.unrolls, priorities, _INSERT_TIMEOUT_S, items.sources)
            except ReplayTimeoutError as error:
                self._patience.timed_out(error)
                continue
            finally:
                self._metrics.count("store/paced_s", time.monotonic() - started)
            self._patience.over()
            self.env_steps += self._new_steps(items.unrolls)
            return True
        return False

    def _new_steps(self, unrolls: Unroll) -> int:
        """Executed steps that were in no unroll before; the rows that overlap were, but for the first unroll."""
        step_type = np.moveaxis(unrolls.timestep.step_type, 1, 0)[-self._stride - 1 :]
        return int(np.count_nonzero(transition_mask(step_type)))


def _initial_priorities(agent: Agent, config: Config) -> Callable[[Unroll], np.ndarray]:
    """Priorities `[N]` of new unrolls: the agent's if the replay looks at them, else all alike."""
    if config.table.sampler != "prioritized":
        return lambda unrolls: np.ones(len(unrolls.version), np.float32)
    if not isinstance(agent, PrioritizedAgent):
        raise ConfigError(
            f"agent {config.agent!r} gives no priorities (it has no initial_priorities), but table.sampler is "
            "'prioritized'; use --table.sampler uniform or fifo."
        )
    return agent.initial_priorities


def _slice(items: _Items, start: int, stop: int) -> _Items:
    return jax.tree.map(lambda leaf: leaf[start:stop], items)

"""The policy server: batches of requests go through the agent on the device; rows become unrolls.

Threading, one owner for each thing:
    dispatch   takes batches, attaches slots, launches the forward pass (owns the device tables)
    delivery   waits for results, adds rows to unrolls, answers (owns the unroll store and episode statistics)
    insertion  puts finished unrolls into the replay, then answers their streams (the only one that waits for room)
Invariant: a stream whose unroll found no room gets no reply until it is in; so nothing is dropped and nothing piles up,
while other streams, batching and gRPC go on.
"""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from seedx.config import Config, ConfigError
from seedx.inference import step, wire
from seedx.inference.batcher import Batch, Batcher
from seedx.inference.frontend import Request
from seedx.inference.streams import Refused, Status, Stream, Streams
from seedx.inference.unrolls import FinishedUnrolls, UnrollStore
from seedx.metrics import EpisodeStats, Metrics
from seedx.replay.replay import Replay, ReplayTimeoutError
from seedx.seeds import Purpose, run_key
from seedx.threads import Crew
from seedx.types import Agent, EnvSpec, StepType, TimeStep, Tree, Unroll
from seedx.weights import Weights, WeightStore

_POLL_S = 0.1
_INSERT_TIMEOUT_S = 1.0
Deliver = Callable[[Sequence[tuple[Request, bytes | Refused]]], None]


@dataclass(frozen=True)
class _InFlight:
    """A batch on the device."""

    batch: Batch[Request]
    training: int  # requests before those of evaluation
    attached: list[Stream]  # streams that began since the batch before
    version: int
    rows: list[np.ndarray]  # timestep leaves [bucket, ...], in the wire's order
    slots: np.ndarray  # [rows]
    bounds: np.ndarray  # [requests + 1]; where the rows of each request begin and end
    output: step.StepOutput


class PolicyServer:
    """Acts for every connected environment.

    Args:
        agent: Whose `act` chooses.
        spec: Of the environments.
        config: Of the run.
        weights: The latest version acts.
        mesh: Devices of the forward pass.
        replay: Takes finished unrolls.
        metrics: Counts batches and waits.
        crew: Runs the threads; a failure in one stops the process.
        episodes: Episode statistics to go on from.
    """

    def __init__(
        self,
        agent: Agent,
        spec: EnvSpec,
        config: Config,
        weights: WeightStore,
        mesh: Mesh,
        replay: Replay,
        metrics: Metrics,
        crew: Crew,
        episodes: Mapping[str, Any] | None = None,
    ) -> None:
        num_slots = config.num_slots
        self._config = config
        self._weights = weights
        self._replay = replay
        self._metrics = metrics
        self._crew = crew
        self._columns = wire.timestep_columns(spec)
        self._observation_tree = jax.tree.structure(spec.observation)
        self._action_dtypes = [np.dtype(leaf.dtype) for leaf in jax.tree.leaves(spec.action)]
        self._action_shapes = [leaf.shape for leaf in jax.tree.leaves(spec.action)]
        self._num_slots = num_slots
        max_rows = config.inference.max_batch_size or num_slots
        self.sizes = step.bucket_sizes(max_rows, min(config.envs_per_group, max_rows), mesh.size)
        # The version goes into the key: after a resume, no episode is played again.
        key = jax.random.fold_in(run_key(config.seed, Purpose.ACT), weights.latest().version)
        self._step = step.make_policy_step(agent, num_slots, key, mesh)
        self._tables = self._step.tables
        self._batcher: Batcher[Request] = Batcher(
            max_rows=max_rows,
            groups=config.actor.groups,
            max_wait_s=config.inference.max_wait_ms / 1000,
            in_flight=config.inference.in_flight,
            lock_step_rows=num_slots if config.deterministic else 0,
        )
        self._deliver: Deliver = lambda _: None
        self._attaching: queue.SimpleQueue[Stream] = queue.SimpleQueue()
        self._attached: list[Stream] = []
        self._in_flight: queue.SimpleQueue[_InFlight] = queue.SimpleQueue()  # bounded by the batcher's places
        # At most one entry for each stream, since a stream asks only after its reply.
        self._inserting: queue.SimpleQueue[tuple[Unroll, list[tuple[Request, bytes]]]] = queue.SimpleQueue()
        self._withheld: set[Stream] = set()
        self._lock = threading.Lock()  # guards `_withheld`
        self._finished_items = 0
        self._starts_episode = np.ones(num_slots, bool)  # where the next row must be FIRST
        self._unrolls = UnrollStore(num_slots, config.learner.unroll_length)
        window = config.metrics.return_window
        self.episodes = EpisodeStats(num_slots, window=window, state=episodes)
        self.eval_episodes = EpisodeStats(num_slots, window=window)

    def warm_up(self) -> None:
        """Compiles every batch size; afterwards a run compiles nothing."""
        params = self._weights.latest().params
        for size in self.sizes:
            nowhere = np.full(size, self._num_slots, np.int32)
            self._tables, output = self._step.act(params, self._tables, nowhere, self._timestep(self._zeros(size)))
            jax.block_until_ready(output)
            self._check_actions(output)
        nowhere = np.full(self.sizes[0], self._num_slots, np.int32)
        self._tables = self._attach_rows(nowhere, 0, nowhere, 0, False)
        self._compiled = self._num_compiled()

    def _check_actions(self, output: step.StepOutput) -> None:
        found = [leaf.shape[1:] for leaf in jax.tree.leaves(output.action)]
        if found != self._action_shapes:
            raise ConfigError(
                f"the agent's act returns actions of shapes {found}; the environment's spec says {self._action_shapes}."
            )

    def start(self, deliver: Deliver) -> None:
        """Answers through `deliver` from now on."""
        self._deliver = deliver
        self._first_version = self._weights.latest().version
        self._crew.spawn("dispatch", self._dispatch_loop)
        self._crew.spawn("delivery", self._delivery_loop)
        self._crew.spawn("insertion", self._insertion_loop)

    def example_batch(self, batch_size: int, unroll_length: int) -> Unroll:
        """Shapes and dtypes of a learner's batch `[T+1, B]`."""
        zeros = self._timestep(self._zeros(batch_size))
        slots = np.zeros(batch_size, np.int32)
        _, output = jax.eval_shape(self._step.act, self._weights.latest().params, self._tables, slots, zeros)

        def rows(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((unroll_length + 1, *leaf.shape), leaf.dtype)

        version = jax.ShapeDtypeStruct((batch_size,), np.int32)
        time_major = jax.tree.map(rows, (zeros, output.action, output.extras, version))
        return Unroll(*time_major, state=output.state)

    # ---- the front-end's thread

    def attach(self, stream: Stream) -> None:
        """A stream begins: its slots get fresh keys and settings before its first row is acted on."""
        if stream.rows > self._batcher.max_rows:
            raise Refused(
                Status.INVALID_ARGUMENT,
                f"a group of {stream.rows} environments exceeds the largest batch ({self._batcher.max_rows}); use "
                "more groups or a larger --inference.max-batch-size.",
            )
        self._attaching.put(stream)

    def detach(self, stream: Stream) -> None:
        """A stream is gone: its waiting requests and half-built unroll are dropped."""
        if stream.asking:
            self._batcher.withdraw(lambda request: request.stream is stream)

    def offer(self, request: Request) -> None:
        """A request to be answered."""
        self._batcher.offer(request)

    def watch(self, streams: Streams) -> None:
        """Counts who can be expected to ask, so that no batch waits on the dead."""
        with self._lock:
            withheld = set(self._withheld)
        live = streams.live_rows(time.monotonic(), self._config.inference.stream_timeout_s, withheld)
        self._batcher.set_live_rows(live)
        self._metrics.gauge("batcher/live_slots", live)
        self._metrics.gauge("server/streams", streams.num_streams)
        self._metrics.gauge("batcher/compilations", self._num_compiled() - self._compiled)

    # ---- dispatch

    def _zeros(self, size: int) -> list[np.ndarray]:
        return [column.spec.zeros(size) for column in self._columns]

    def _dispatch_loop(self) -> None:
        while not self._crew.stop.is_set():
            batch = self._batcher.take(_POLL_S)
            if batch is not None:
                if self._config.deterministic:
                    batch.requests.sort(key=lambda request: request.stream.slots[0])
                self._dispatch(batch)

    def _dispatch(self, batch: Batch[Request]) -> None:
        while not self._attaching.empty():
            self._attach(self._attaching.get())
        batch.requests.sort(key=lambda request: request.stream.evaluation)  # last: training rows are in one piece
        batch, rows, slots = self._assemble_sound(batch)
        if not batch.requests:
            self._batcher.release()
            return
        self._starts_episode[slots] = rows[-1][: batch.rows] == StepType.LAST
        weights = self._current_weights()
        size = len(rows[0])
        padded_slots = step.padded(slots, size, self._num_slots)
        self._tables, output = self._step.act(weights.params, self._tables, padded_slots, self._timestep(rows))
        self._count(batch, size)
        training = sum(not request.stream.evaluation for request in batch.requests)
        bounds = np.cumsum([0, *(request.rows for request in batch.requests)])
        self._in_flight.put(_InFlight(batch, training, self._attached, weights.version, rows, slots, bounds, output))
        self._attached = []

    def _current_weights(self) -> Weights:
        """The latest weights; in lock-step those that all finished unrolls must have led to."""
        if not self._config.deterministic:
            return self._weights.latest()
        due = self._first_version + self._finished_items // self._config.learner.batch_size
        while (weights := self._weights.wait_for(due, _POLL_S)) is None:
            if self._crew.stop.is_set():
                return self._weights.latest()
        return weights

    def _attach(self, stream: Stream) -> None:
        size = self.sizes[0]
        for first in range(0, stream.rows, size):
            part = stream.slots[first : first + size]
            slots = step.padded(part, size, self._num_slots)
            envs = step.padded(part - stream.slots[0] + np.int32(stream.first_env), size, 0)
            self._tables = self._attach_rows(slots, stream.actor_id, envs, stream.session, stream.evaluation)
        self._starts_episode[stream.slots] = True
        self._attached.append(stream)

    def _attach_rows(
        self, slots: np.ndarray, actor_id: int, envs: np.ndarray, session: int, greedy: bool
    ) -> step.Tables:
        return self._step.attach(
            self._tables, slots, np.int32(actor_id & 0x7FFFFFFF), envs, np.int32(session), np.bool_(greedy)
        )

    def _assemble_sound(self, batch: Batch[Request]) -> tuple[Batch[Request], list[np.ndarray], np.ndarray]:
        """The batch, its rows `[bucket, ...]` and slots, without requests that are unsound or whose stream is gone."""
        batch = _keep(batch, lambda request: request.stream.ended is None)
        rows, slots = self._assemble(batch)
        if self._wrong([leaf[: batch.rows] for leaf in rows], slots) is not None:
            batch = _keep(batch, self._is_sound)
            rows, slots = self._assemble(batch)
        return batch, rows, slots

    def _assemble(self, batch: Batch[Request]) -> tuple[list[np.ndarray], np.ndarray]:
        """Rows and slots of a batch: one copy from the messages, none where one message fills the batch."""
        if not batch.requests:
            return [], np.empty(0, np.int32)
        slots = np.concatenate([request.stream.slots for request in batch.requests])
        size = step.bucket_for(batch.rows, self.sizes)
        if len(batch.requests) == 1 and batch.rows == size:
            request = batch.requests[0]
            return request.stream.timesteps.layout.decode(request.payload), slots
        rows, start = self._zeros(size), 0
        for codec, requests in itertools.groupby(batch.requests, lambda request: request.stream.timesteps):
            payloads = [request.payload for request in requests]
            stop = start + len(payloads) * codec.layout.num_envs
            codec.layout.decode_into([leaf[start:stop] for leaf in rows], payloads)
            start = stop
        return rows, slots

    def _wrong(self, rows: list[np.ndarray], slots: np.ndarray) -> str | None:
        return wire.check_rows(self._columns, rows, self._starts_episode[slots]) if rows else None

    def _is_sound(self, request: Request) -> bool:
        """Whether a request's rows can be used; its stream is told what is wrong with them."""
        rows = request.stream.timesteps.layout.decode(request.payload)
        wrong = self._wrong(rows, request.stream.slots)
        if wrong is not None:
            self._deliver([(request, Refused(Status.INVALID_ARGUMENT, wrong))])
        return wrong is None

    def _timestep(self, leaves: list[np.ndarray]) -> TimeStep:
        reward, discount, *observation, step_type = leaves
        return TimeStep(step_type, reward, discount, jax.tree.unflatten(self._observation_tree, observation))

    def _count(self, batch: Batch[Request], size: int) -> None:
        self._metrics.count(f"batcher/{batch.reason.value}")
        self._metrics.count("server/messages", len(batch.requests))
        self._metrics.average("batcher/fill", batch.rows / size)
        self._metrics.time("batcher/wait", batch.waited_s)

    def _num_compiled(self) -> int:
        return self._step.act._cache_size() + self._step.attach._cache_size()  # type: ignore[attr-defined]

    # ---- delivery

    def _delivery_loop(self) -> None:
        while not self._crew.stop.is_set():
            try:
                flight = self._in_flight.get(timeout=_POLL_S)
            except queue.Empty:
                continue
            self._finish(flight)

    def _finish(self, flight: _InFlight) -> None:
        """Fetches a batch's results and answers it."""
        for stream in flight.attached:
            self._begin(stream)
        actions = [np.asarray(leaf) for leaf in jax.tree.leaves(flight.output.action)]
        self._batcher.release()
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
            self._insert(self._as_items(finished, flight.output), withheld)

    def _begin(self, stream: Stream) -> None:
        """Forgets what was before on the slots of a stream; here, after all rows of the stream before."""
        self._unrolls.reset(stream.slots)
        for stats in (self.episodes, self.eval_episodes):
            stats.drop(stream.slots)

    def _add_rows(self, flight: _InFlight, actions: list[np.ndarray]) -> FinishedUnrolls | None:
        """The unrolls that a batch finished; rows of evaluation, which come last, are left out."""
        bounds = flight.bounds[: flight.training + 1]
        count = bounds[-1]
        slots = flight.slots[:count]
        extras = [np.asarray(leaf) for leaf in jax.tree.leaves(flight.output.extras)]
        rows = [leaf[:count] for leaf in (*flight.rows, *actions, *extras)]
        state = [np.asarray(leaf)[:count] for leaf in self._state_before(flight, slots[bounds[:-1]])]
        return self._unrolls.add(slots, bounds, [*rows, np.full(count, flight.version, np.int32)], state)

    def _state_before(self, flight: _InFlight, firsts: np.ndarray) -> list[jax.Array]:
        """Agent state before the batch; none where no unroll starts, which spares the copy from the device."""
        return jax.tree.leaves(flight.output.state) if self._unrolls.wants_state(firsts) else []

    def _insert(self, items: Unroll, replies: list[tuple[Request, bytes]]) -> None:
        """Hands over unrolls `[K, T+1, ...]` in pieces of at most a batch or one group.

        So the replay's bound holds, and those that find room need not wait for the others.
        """
        self._finished_items += sum(request.rows for request, _ in replies)
        with self._lock:
            self._withheld.update(request.stream for request, _ in replies)
        start = stop = 0
        piece: list[tuple[Request, bytes]] = []
        for reply in replies:
            if piece and stop - start + reply[0].rows > self._config.learner.batch_size:
                self._inserting.put((_slice(items, start, stop), piece))
                start, piece = stop, []
            piece.append(reply)
            stop += reply[0].rows
        self._inserting.put((_slice(items, start, stop), piece))

    def _as_items(self, finished: FinishedUnrolls, output: step.StepOutput) -> Unroll:
        """The unrolls with a leading item axis; a view that stays time-major in memory."""
        num_timestep, num_action = len(self._columns), len(self._action_dtypes)
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

    def _record_episodes(self, flight: _InFlight) -> None:
        reward, step_type = flight.rows[0], flight.rows[-1]
        middle, end = flight.bounds[flight.training], flight.bounds[-1]
        for stats, part in ((self.episodes, slice(0, middle)), (self.eval_episodes, slice(middle, end))):
            if part.start < part.stop:
                stats.step(flight.slots[part], step_type[part], reward[part])

    # ---- insertion

    def _insertion_loop(self) -> None:
        while not self._crew.stop.is_set():
            try:
                items, replies = self._inserting.get(timeout=_POLL_S)
            except queue.Empty:
                continue
            started = time.monotonic()
            if self._insert_items(items):
                waited_s = time.monotonic() - started
                self._metrics.count("store/paced_s", waited_s)
                self._metrics.time("queue/put_wait", waited_s)
                with self._lock:
                    self._withheld.difference_update(request.stream for request, _ in replies)
                self._deliver(replies)

    def _insert_items(self, items: Tree) -> bool:
        """Waits for room as long as the run lasts."""
        while not self._crew.stop.is_set():
            try:
                self._replay.insert(items, _INSERT_TIMEOUT_S)
            except ReplayTimeoutError:
                continue
            return True
        return False


def _keep(batch: Batch[Request], wanted: Callable[[Request], bool]) -> Batch[Request]:
    requests = [request for request in batch.requests if wanted(request)]
    return Batch(requests, sum(request.rows for request in requests), batch.reason, batch.waited_s)


def _slice(items: Unroll, start: int, stop: int) -> Unroll:
    return jax.tree.map(lambda leaf: leaf[start:stop], items)

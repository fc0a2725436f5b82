"""The policy server: batches of requests go through the agent on the device.

Threading: the dispatch thread takes batches, attaches slots and launches the forward pass (it owns the device tables
and the assembler); what comes back is `Delivery`'s, on threads of its own; the front-end's thread offers requests.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from seedx.checks import ConfigError
from seedx.config import Config
from seedx.inference import step
from seedx.inference.assembly import Assembler
from seedx.inference.batcher import Batch, Batcher
from seedx.inference.delivery import Deliver, Delivery, InFlight
from seedx.inference.request import Request
from seedx.inference.streams import Refused, Status, Stream, Streams
from seedx.metrics import Metrics
from seedx.replay.replay import Replay
from seedx.seeds import Purpose, run_key
from seedx.sharding import Meshes
from seedx.threads import Crew
from seedx.types import Agent, EnvSpec, Unroll
from seedx.weights import Weights, WeightStore

_POLL_S = 0.1


class PolicyServer:
    """Acts for every connected environment.

    Args:
        agent: Whose `act` chooses.
        spec: Of the environments.
        config: Of the run.
        weights: The latest version acts.
        meshes: Of the run; the inference devices act.
        metrics: Counts batches and waits.
        crew: Runs the threads; a failure in one stops the process.
        episodes: Episode statistics to go on from.
        num_hosts: That have such a server; actors are numbered through all of them.

    Attributes:
        heard_at: When an actor of training was heard of last, on the monotonic clock.
    """

    def __init__(
        self,
        agent: Agent,
        spec: EnvSpec,
        config: Config,
        weights: WeightStore,
        meshes: Meshes,
        metrics: Metrics,
        crew: Crew,
        episodes: Mapping[str, Any] | None = None,
        num_hosts: int = 1,
    ) -> None:
        self._config = config
        self._num_hosts = num_hosts
        self._weights = weights
        self._metrics = metrics
        self._crew = crew
        self._launching = meshes.launching
        self._action_shapes = [leaf.shape for leaf in jax.tree.leaves(spec.action)]
        self._num_slots = config.num_slots
        max_rows = config.inference.max_batch_size or self._num_slots
        self.sizes = step.bucket_sizes(max_rows, min(config.envs_per_group, max_rows), meshes.inference.size)
        # The version goes into the key: after a resume, no episode is played again.
        key = jax.random.fold_in(run_key(config.seed, Purpose.ACT), weights.latest().version)
        self._step = step.make_policy_step(agent, self._num_slots, key, meshes.inference)
        self._tables = self._step.fresh()
        self._batcher: Batcher[Request] = Batcher(
            max_rows=max_rows,
            groups=config.actor.groups,
            max_wait_s=config.inference.max_wait_ms / 1000,
            in_flight=config.inference.in_flight,
            lock_step_rows=self._num_slots if config.deterministic else 0,
        )
        self._attaching: queue.SimpleQueue[Stream] = queue.SimpleQueue()
        self._attached: list[Stream] = []
        self._assembler = Assembler(spec, self._num_slots, self.sizes, self._refuse)
        self._delivery = Delivery(
            agent, spec, config, self._assembler.timestep, self._batcher.release, metrics, crew, episodes
        )
        self.episodes = self._delivery.episodes
        self.eval_episodes = self._delivery.eval_episodes

    def warm_up(self) -> None:
        """Compiles every batch size; afterwards a run compiles nothing."""
        params = self._weights.latest().params
        for size in self.sizes:
            nowhere = np.full(size, self._num_slots, np.int32)
            zeros = self._assembler.timestep(self._assembler.zeros(size))
            self._tables, output = self._step.act(params, self._tables, nowhere, zeros)
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

    def start(self, deliver: Deliver, replay: Replay) -> None:
        """Answers through `deliver` from now on; finished unrolls go to `replay`."""
        self.heard_at = time.monotonic()
        self._first_version = self._weights.latest().version
        self._delivery.start(deliver, replay)
        self._crew.spawn("dispatch", self._dispatch_loop)

    @property
    def env_steps(self) -> int:
        """Executed steps in the unrolls that the replay took in this session."""
        return self._delivery.env_steps

    def example_batch(self, batch_size: int, num_rows: int) -> Unroll:
        """Shapes and dtypes of a learner's batch `[num_rows, B]`."""
        size = self.sizes[0]  # one that divides over the devices
        zeros = self._assembler.timestep(self._assembler.zeros(size))
        slots = np.zeros(size, np.int32)
        _, output = jax.eval_shape(self._step.act, self._weights.latest().params, self._tables, slots, zeros)

        def described(leaf: Any, *leading: int) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((*leading, *leaf.shape[1:]), leaf.dtype)  # without the policy server's sharding

        def rows(leaf: Any) -> jax.ShapeDtypeStruct:
            return described(leaf, num_rows, batch_size)

        version = np.zeros(size, np.int32)
        time_major = jax.tree.map(rows, (zeros, output.action, output.extras, version))
        return Unroll(*time_major, state=jax.tree.map(lambda leaf: described(leaf, batch_size), output.state))

    def example_items(self, num_rows: int) -> Unroll:
        """One item `[1, num_rows, ...]` of zeros."""
        batch = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), self.example_batch(1, num_rows))
        rows = jax.tree.map(lambda leaf: np.moveaxis(leaf, 0, 1), tuple(batch[:-1]))
        return Unroll(*rows, state=batch.state)

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
        """A stream is gone: its waiting requests are dropped; so is its half-built unroll when the next one begins."""
        if stream.asking:
            self._batcher.withdraw(lambda request: request.stream is stream)

    def offer(self, request: Request) -> None:
        """A request to be answered."""
        self._batcher.offer(request)

    def watch(self, streams: Streams) -> None:
        """Counts who can be expected to ask, so that no batch waits on the dead."""
        withheld = self._delivery.withheld()
        now = time.monotonic()
        self.heard_at = max(self.heard_at, streams.heard_at(now))
        live = streams.live_rows(now, self._config.inference.stream_timeout_s, withheld)
        self._batcher.set_live_rows(live)
        self._metrics.gauge("batcher/live_slots", live)
        self._metrics.gauge("server/streams", streams.num_streams)
        self._metrics.gauge("actors/alive", len(streams.actors()))
        self._metrics.gauge("batcher/compilations", self._num_compiled() - self._compiled)

    # ---- dispatch

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
        batch, rows, slots = self._assembler.assemble(batch)
        if not batch.requests:
            self._batcher.release()
            return
        weights = self._current_weights()
        size = len(rows[0])
        padded_slots = step.padded(slots, size, self._num_slots)
        with self._launching:
            self._tables, output = self._step.act(
                weights.params, self._tables, padded_slots, self._assembler.timestep(rows)
            )
        self._count(batch, size)
        training = sum(not request.stream.evaluation for request in batch.requests)
        bounds = np.cumsum([0, *(request.rows for request in batch.requests)])
        self._delivery.put(InFlight(batch, training, self._attached, weights.version, rows, slots, bounds, output))
        self._attached = []

    def _current_weights(self) -> Weights:
        """The latest weights; in lock-step those that all finished unrolls must have led to."""
        if not self._config.deterministic:
            return self._weights.latest()
        due = self._first_version + self._delivery.finished_items // self._config.learner.batch_size
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
        self._assembler.begin(stream.slots)
        self._attached.append(stream)

    def _attach_rows(
        self, slots: np.ndarray, actor_id: int, envs: np.ndarray, session: int, greedy: bool
    ) -> step.Tables:
        actor = np.int32(actor_id & 0x7FFFFFFF)
        with self._launching:
            return self._step.attach(
                self._tables, slots, actor, envs, np.int32(session), self._ranks(actor_id, envs), np.bool_(greedy)
            )

    def _ranks(self, actor_id: int, envs: np.ndarray) -> np.ndarray:
        """The places 0 to 1 of an actor's environments among those that the run trains on; float32."""
        per_actor = self._config.envs_per_actor
        last = max(self._config.num_actors, 1) * self._num_hosts * per_actor - 1
        return np.clip((actor_id * per_actor + envs) / max(last, 1), 0.0, 1.0).astype(np.float32)

    def _refuse(self, request: Request, wrong: str) -> None:
        self._delivery.refuse(request, Refused(Status.INVALID_ARGUMENT, wrong))

    def _count(self, batch: Batch[Request], size: int) -> None:
        self._metrics.count(f"batcher/{batch.reason.value}")
        self._metrics.count("server/messages", len(batch.requests))
        self._metrics.average("batcher/fill", batch.rows / size)
        self._metrics.time("batcher/wait", batch.waited_s)

    def _num_compiled(self) -> int:
        return self._step.act._cache_size() + self._step.attach._cache_size()  # type: ignore[attr-defined]

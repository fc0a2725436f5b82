"""One session of a run: policy server, learner, checkpoints and reports, from the first hello to the last line."""

from __future__ import annotations

import dataclasses
import hashlib
import math
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from seedx.checks import ConfigError
from seedx.config import Config
from seedx.config_file import to_json
from seedx.ending import Ending, check_actors
from seedx.first_actor import act_here, await_spec
from seedx.hosts import Hosts
from seedx.inference.frontend import FrontEnd
from seedx.runlog import session_number
from seedx.threads import Crew, spare_the_collector
from seedx.types import EnvSpec

if TYPE_CHECKING:
    from seedx.learner.batches import LearnerBatch

_POLL_S = 0.1


class Session:
    """What lives as long as one learner process.

    Attributes:
        learning: Whether there was an update in this session, so that there is something to save.
        saving_since: When the last checkpoint was begun, on the monotonic clock; -inf while none is being written.
    """

    def __init__(
        self,
        config: Config,
        run_dir: Path,
        resume: bool,
        crew: Crew,
        front_end: FrontEnd,
        signals: list[int],
        hosts: Hosts,
    ) -> None:
        share = dataclasses.replace(config.learner, batch_size=hosts.share(config.learner.batch_size))
        self._config = config
        self._host_config = dataclasses.replace(config, learner=share)  # for what this host does by itself
        self._hosts = hosts
        self._signals = signals
        self._run_dir = run_dir
        self._resume = resume
        self._crew = crew
        self._ending = Ending(config, run_dir, crew.stop, signals)
        self._seconds_before = 0.0
        self.front_end = front_end
        self.learning = False
        self.saving_since = self._updating_since = -math.inf
        self._agreed = True  # that the run ends, on all hosts; not if this one's learner fails

    def run(self, done: threading.Event) -> None:
        """From the first actor's hello to the last line; sets `done`, whether it succeeds or fails."""
        try:
            self._load()
            if self._config.num_actors == 0:
                session = session_number(self._run_dir) if self._resume else 0
                act_here(self._config, self.front_end.address, self._hosts.index, session, self._crew)
            self._build(await_spec(self._config, self.front_end, self._crew))
            self._compile()
            self._start()
            self._finish(self._learn())
        except BaseException as error:
            self._crew.fail(error)
        finally:
            done.set()

    @property
    def busy_since(self) -> float:
        """Since when it does what is not to be cut short, on the monotonic clock; -inf: it does no such thing.

        That is a checkpoint, and an update, which waits for the slowest host; but none waits for a host that is lost.
        """
        return self.saving_since if self._crew.failure else max(self.saving_since, self._updating_since)

    def _load(self) -> None:
        """Loads what takes seconds, while the actors start, and finds the other hosts."""
        alike = dataclasses.replace(self._config, run_dir=None)  # all but that, on all hosts
        settings = hashlib.sha256(to_json(alike).encode()).hexdigest()
        wait_s = self._config.learner.host_wait_s
        self._lifeline = self._hosts.join(settings, wait_s, self._crew.stop.is_set, self._crew.fail)
        import jax

        import seedx.agents.build
        import seedx.inference.policy
        import seedx.learner.learner
        import seedx.report  # noqa: F401
        from seedx import compilation_cache

        compilation_cache.use()
        jax.local_devices()

    def _build(self, spec: EnvSpec) -> None:
        from seedx import sharding
        from seedx.agents.build import build_agent
        from seedx.checkpoint import Checkpointer
        from seedx.inference.policy import PolicyServer
        from seedx.joint import Joint
        from seedx.learner.batches import Batches, masked_batch
        from seedx.learner.learner import Learner, initial_state
        from seedx.metrics import Metrics
        from seedx.profiling import ProfileWindow
        from seedx.replay.build import make_replay, snapshot_of
        from seedx.replay.keeper import Keeper
        from seedx.report import Reporter
        from seedx.resume import resume_run, resume_together
        from seedx.weights import WeightStore

        config, own = self._config, self._host_config
        self.spec = spec
        self.meshes = meshes = sharding.build_meshes(config.learner)
        self.agent = build_agent(config, spec)
        try:
            self.checkpointer = Checkpointer(self._run_dir, keep=config.checkpoint.keep)
        except PermissionError as error:
            raise ConfigError(str(error)) from error
        state = initial_state(self.agent, config.learner, meshes.learner, config.seed)
        episodes = None
        self._hosts.meet("resuming", config.learner.host_wait_s)
        if self._resume and self._hosts.alone:
            state, self._seconds_before, episodes = resume_run(self.checkpointer, self._run_dir, spec, state)
        elif self._resume:
            resumed = resume_together(self.checkpointer, self._run_dir, spec, state, meshes.learner, self._hosts)
            state, self._seconds_before, episodes = resumed
        self._first_update = state.updates
        self.metrics = Metrics(
            rates=("env_steps", "updates", "server/messages"),
            totals={"env_steps": state.env_steps, "updates": state.updates},
        )
        weights = WeightStore(sharding.mover(meshes.learner, meshes.inference))
        self.learner = Learner(
            self.agent, config.learner, meshes, state, weights, self.metrics, config.seed, self._run_dir, self._hosts
        )
        self.policy = PolicyServer(
            self.agent,
            spec,
            own,
            weights,
            meshes,
            self.metrics,
            self._crew,
            episodes=episodes,
            num_hosts=self._hosts.count,
        )
        example = self.policy.example_items(config.unroll_rows)
        seconds_left = math.inf if config.seconds is None else config.seconds - self._ending.seconds
        self.replay = make_replay(own, example, self._resume, seconds_left)
        snapshot = snapshot_of(own, self.replay, self._run_dir, example, self._resume)
        interval_s = config.checkpoint.replay_interval_s
        self.keeper = Keeper(snapshot, interval_s, self.metrics, self._crew) if snapshot is not None else None
        self.batches = Batches(
            self.replay,
            own.learner,
            config.table.importance_exponent if config.table.sampler == "prioritized" else 0.0,
            meshes.learner,
            self.metrics,
            self._crew,
            acted=None if config.table.is_queue else lambda: self.policy.env_steps,
        )
        self.joint = None
        if not self._hosts.alone:
            shapes = self.policy.example_batch(own.learner.batch_size, config.unroll_rows)
            masked, wait_s = masked_batch(shapes, meshes.learner), config.learner.batch_wait_s
            self.joint = Joint(self._hosts, self.learner, self.batches, masked, wait_s, self._crew, self._signals)
        self.profile = ProfileWindow(config.metrics, self._run_dir)
        self.reporter = Reporter(config, self._run_dir, self.metrics, self._figures, self._crew.stop, hosts=self._hosts)

    def _compile(self) -> None:
        """Compiles acting and learning side by side."""
        example = self.policy.example_batch(self._config.learner.batch_size, self._config.unroll_rows)
        update = self._crew.spawn("compile-update", self.learner.compile, example)
        self.policy.warm_up()
        update.join()
        if self._crew.stop.is_set():
            raise SystemExit(1)

    def _start(self) -> None:
        self._hosts.meet("learning", self._config.learner.host_wait_s)
        spare_the_collector()
        self.policy.start(self.front_end.deliver, self.replay)
        self.batches.start()
        if self.keeper is not None:
            self.keeper.start()
        self.front_end.serve(self.policy)
        self.reporter.start(self._opening())
        self._crew.spawn("report", self.reporter.loop)

    def _learn(self) -> str:
        """Learns until something says stop; what it was. Even a failure leaves the state of the last good update."""
        from seedx.learner.learner import NonFiniteError

        try:
            last_checkpoint = time.monotonic()
            while True:
                reason = self._ending.reason(self.learner.state.env_steps)
                if reason is not None and self.joint is None:
                    return reason
                if self.joint is None or self.joint.idle:  # A host that lost its actors need not stop the others.
                    check_actors(self._config, self._run_dir, self.policy.heard_at)
                batch = self._next_batch(stopping=reason is not None)
                if batch is None:
                    continue
                # Judged before the update is published: in lock-step, nobody acts until then, and runs repeat.
                mean, count = self.policy.episodes.mean_return()
                if self.joint is None:
                    priorities = self.learner.step(batch)
                else:
                    self._updating_since = time.monotonic()
                    priorities, reason, (mean, count) = self.joint.update(batch, reason, mean, count)
                    self._updating_since = -math.inf
                if priorities is not None:
                    self.replay.update_priorities(batch.keys, priorities)
                self.learning = self.learner.state.updates > self._first_update
                self.profile.tick()
                interval_s = self._config.checkpoint.interval_s
                if interval_s and time.monotonic() - last_checkpoint > interval_s:
                    self._save()
                    last_checkpoint = time.monotonic()
                if reason is not None:
                    return reason
                if self._ending.is_solved(mean, count):
                    return "solved"
        except Exception as error:
            self._agreed = isinstance(error, NonFiniteError)  # which all hosts see
            self._crew.fail(error)
            return "failed"

    def _next_batch(self, stopping: bool) -> LearnerBatch | None:
        return self.batches.next(_POLL_S) if self.joint is None else self.joint.next_batch(stopping)

    def _opening(self) -> str:
        from seedx.console import opening_line

        config = self._config
        actors = f"{max(config.num_actors, 1)} actors x {config.envs_per_actor} environments"
        devices = f"{self.meshes.learner.size} {self.meshes.learner.devices.flat[0].platform}"
        return opening_line(config.agent, config.env, config.seed, actors, devices, str(self._run_dir))

    def _figures(self) -> dict[str, Any]:
        """Figures of now, beside what the parts measured."""
        state, seconds = self.learner.state, self._seconds()
        eval_mean, eval_episodes = self.policy.eval_episodes.mean_return()
        return {
            "frames": state.env_steps * self.spec.frame_skip,
            "version": state.updates,
            "seconds": seconds,
            "lag_updates_mean": self.learner.lag_sum / max(self.learner.lag_batches, 1),
            **self.replay.info(),
            **self.policy.episodes.snapshot(),
            **self._ending.solved,
            **({"eval_return_mean": eval_mean, "eval_return_episodes": eval_episodes} if eval_episodes else {}),
        }

    def _save(self, block: bool = False) -> None:
        """Writes a checkpoint; of several hosts, the first one does."""
        from seedx.resume import in_host_memory, save_run

        if self._hosts.index:
            return
        state = self.learner.state if self._hosts.alone else in_host_memory(self.learner.state)
        seconds, episodes = self._seconds(), self.policy.episodes.state()
        save_run(self.checkpointer, self._config, self.spec, state, seconds, episodes, block)

    def _seconds(self) -> float:
        """Wall time of the run, earlier sessions included."""
        return self._seconds_before + self._ending.seconds

    def _finish(self, reason: str) -> None:
        self.front_end.stop(finished=reason not in ("SIGTERM", "SIGINT", "failed"))
        try:
            if self.learning:
                self.saving_since = time.monotonic()
                if self.joint is None or not self.joint.broken:
                    self._save(block=True)
                if self.keeper is not None:
                    self.keeper.finish()  # which a Reverb server that is gone may refuse
        finally:
            self.checkpointer.close()
            self.profile.close()
            self.reporter.finish(reason)
            self.replay.close()
            if self._agreed:
                self._lifeline.end()
                self._hosts.leave()
            self.saving_since = -math.inf

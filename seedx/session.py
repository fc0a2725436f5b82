"""One session of a run: policy server, learner, checkpoints and reports, from the first hello to the last line."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from concurrent.futures import TimeoutError as FutureTimeoutError
from pathlib import Path
from typing import Any

from seedx import rundir
from seedx.checks import ConfigError
from seedx.config import Config
from seedx.ending import Ending, check_actors
from seedx.inference.frontend import FrontEnd
from seedx.threads import Crew, spare_the_collector
from seedx.types import EnvSpec

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
    ) -> None:
        self._config = config
        self._run_dir = run_dir
        self._resume = resume
        self._crew = crew
        self._ending = Ending(config, run_dir, crew.stop, signals)
        self._seconds_before = 0.0
        self.front_end = front_end
        self.learning = False
        self.saving_since = -math.inf

    def run(self, done: threading.Event) -> None:
        """From the first actor's hello to the last line; sets `done`, whether it succeeds or fails."""
        try:
            self._load()
            self._build(self._await_spec())
            self._compile()
            self._start()
            self._finish(self._learn())
        except BaseException as error:
            self._crew.fail(error)
        finally:
            done.set()

    def _load(self) -> None:
        """Loads what takes seconds, while the actors start."""
        import jax

        import seedx.agents.build
        import seedx.inference.policy
        import seedx.learner.learner
        import seedx.report  # noqa: F401
        from seedx import compilation_cache

        compilation_cache.use()
        jax.local_devices()

    def _await_spec(self) -> EnvSpec:
        """The environments' spec, which the first actor says."""
        deadline = time.monotonic() + self._config.inference.hello_timeout_s
        if self._config.num_actors == 0:
            self._crew.spawn("actor-0", self._act_here)
        while time.monotonic() < deadline:
            try:
                return self.front_end.first_spec.result(timeout=_POLL_S)
            except FutureTimeoutError:
                if self._crew.stop.is_set():
                    raise SystemExit(1) from None
        raise ConfigError(
            f"no actor said hello within {self._config.inference.hello_timeout_s:.0f} s; are they started with "
            f"--server {self.front_end.address}? Raise --inference.hello-timeout-s if they start slowly."
        )

    def _act_here(self) -> None:
        """Actor 0 in this process, through the same client (`--num-actors 0`)."""
        from seedx.envs.actor import run_actor
        from seedx.envs.make import make_env
        from seedx.inference.client import Replaced

        with contextlib.suppress(Replaced):  # by a process
            run_actor(
                self._config,
                self.front_end.address,
                actor_id=0,
                make_group=lambda seeds: make_env(self._config, len(seeds), seeds),
                session=rundir.newest_update(self._run_dir) if self._resume else 0,
                stop=self._crew.stop,
            )

    def _build(self, spec: EnvSpec) -> None:
        from seedx import sharding
        from seedx.agents.build import build_agent
        from seedx.checkpoint import Checkpointer
        from seedx.inference.policy import PolicyServer
        from seedx.learner.batches import Batches
        from seedx.learner.learner import Learner, initial_state
        from seedx.metrics import Metrics
        from seedx.profiling import ProfileWindow
        from seedx.replay.build import make_replay, snapshot_of
        from seedx.replay.keeper import Keeper
        from seedx.report import Reporter
        from seedx.resume import resume_run
        from seedx.weights import WeightStore

        config = self._config
        self.spec = spec
        self.meshes = meshes = sharding.build_meshes(config.learner)
        self.agent = build_agent(config, spec)
        try:
            self.checkpointer = Checkpointer(self._run_dir, keep=config.checkpoint.keep)
        except PermissionError as error:
            raise ConfigError(str(error)) from error
        state = initial_state(self.agent, config.learner, meshes.learner, config.seed)
        episodes = None
        if self._resume:
            state, self._seconds_before, episodes = resume_run(self.checkpointer, self._run_dir, spec, state)
        self._first_update = state.updates
        self.metrics = Metrics(
            rates=("env_steps", "updates", "server/messages"),
            totals={"env_steps": state.env_steps, "updates": state.updates},
        )
        weights = WeightStore(sharding.mover(meshes.learner, meshes.inference))
        self.learner = Learner(
            self.agent, config.learner, meshes, state, weights, self.metrics, config.seed, self._run_dir
        )
        self.policy = PolicyServer(
            self.agent,
            spec,
            config,
            weights,
            meshes,
            self.metrics,
            self._crew,
            episodes=episodes,
        )
        example = self.policy.example_items(config.unroll_rows)
        seconds_left = math.inf if config.seconds is None else config.seconds - self._ending.seconds
        self.replay = make_replay(config, example, self._resume, seconds_left)
        snapshot = snapshot_of(config, self.replay, self._run_dir, example, self._resume)
        interval_s = config.checkpoint.replay_interval_s
        self.keeper = Keeper(snapshot, interval_s, self.metrics, self._crew) if snapshot is not None else None
        self.batches = Batches(
            self.replay,
            config.learner,
            config.table.importance_exponent if config.table.sampler == "prioritized" else 0.0,
            meshes.learner,
            self.metrics,
            self._crew,
            acted=None if config.table.is_queue else lambda: self.policy.env_steps,
        )
        self.profile = ProfileWindow(config.metrics, self._run_dir)
        self.reporter = Reporter(config, self._run_dir, self.metrics, self._figures, self._crew.stop)

    def _compile(self) -> None:
        """Compiles acting and learning side by side."""
        example = self.policy.example_batch(self._config.learner.batch_size, self._config.unroll_rows)
        update = self._crew.spawn("compile-update", self.learner.compile, example)
        self.policy.warm_up()
        update.join()
        if self._crew.stop.is_set():
            raise SystemExit(1)

    def _start(self) -> None:
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
        try:
            last_checkpoint = time.monotonic()
            while (reason := self._ending.reason(self.learner.state.env_steps)) is None:
                check_actors(self._config, self._run_dir, self.policy.heard_at)
                batch = self.batches.next(_POLL_S)
                if batch is None:
                    continue
                # Judged before the update is published: in lock-step, nobody acts until then, and runs repeat.
                solved = self._ending.is_solved(*self.policy.episodes.mean_return())
                priorities = self.learner.step(batch)
                if priorities is not None:
                    self.replay.update_priorities(batch.keys, priorities)
                self.learning = True
                self.profile.tick()
                interval_s = self._config.checkpoint.interval_s
                if interval_s and time.monotonic() - last_checkpoint > interval_s:
                    self._save()
                    last_checkpoint = time.monotonic()
                if solved:
                    return "solved"
            return reason
        except Exception as error:
            self._crew.fail(error)
            return "failed"

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
            "lag_updates_mean": self.learner.lag_sum / max(state.updates - self._first_update, 1),
            **self.replay.info(),
            **self.policy.episodes.snapshot(),
            **self._ending.solved,
            **({"eval_return_mean": eval_mean, "eval_return_episodes": eval_episodes} if eval_episodes else {}),
        }

    def _save(self, block: bool = False) -> None:
        from seedx.resume import save_run

        seconds, episodes = self._seconds(), self.policy.episodes.state()
        save_run(self.checkpointer, self._config, self.spec, self.learner.state, seconds, episodes, block)

    def _seconds(self) -> float:
        """Wall time of the run, earlier sessions included."""
        return self._seconds_before + self._ending.seconds

    def _finish(self, reason: str) -> None:
        self.front_end.stop(finished=reason not in ("SIGTERM", "SIGINT", "failed"))
        try:
            if self.learning:
                self.saving_since = time.monotonic()
                self._save(block=True)
                if self.keeper is not None:
                    self.keeper.finish()  # which a Reverb server that is gone may refuse
        finally:
            self.checkpointer.close()
            self.saving_since = -math.inf
            self.profile.close()
            self.reporter.finish(reason)
            self.replay.close()

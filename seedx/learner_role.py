"""The learner's process: policy server, learner, checkpoints and reports, from the first hello to the last line.

Threading: the main thread waits for signals, failures and the end; everything else runs on threads of the crew. Before
the first update a signal ends the process at once; afterwards the learner finishes its update and checkpoints first.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import signal
import sys
import threading
import time
from concurrent.futures import TimeoutError as FutureTimeoutError
from pathlib import Path
from typing import TYPE_CHECKING, Any

from seedx import rundir, specs
from seedx.config import Config, ConfigError
from seedx.inference.frontend import FrontEnd
from seedx.inference.streams import Streams
from seedx.signals import on_stop
from seedx.threads import Crew, spare_the_collector
from seedx.types import EnvSpec

if TYPE_CHECKING:
    from seedx.learner.learner import LearnerState

_POLL_S = 0.1
_STOP_GRACE_S = 8.0  # of the supervisor's 10
_SAVE_S = 600.0  # a last checkpoint that takes longer than that will never be finished


def run_learner(config: Config, run_dir: Path, address: str, resume: bool) -> int:
    """Learns until the config says stop; the exit code."""
    rundir.claim(run_dir)
    crew = Crew()
    signals: list[int] = []
    on_stop(signals.append)
    streams = Streams(config.num_slots, config.inference.max_streams)
    front_end = FrontEnd(address, config.inference, streams, crew.fail, env=config.env)
    front_end.start()
    session = Session(config, run_dir, resume, crew, front_end, signals)
    done = threading.Event()
    crew.spawn("learner", session.run, done)
    return _wait(crew, session, done, signals, run_dir)


def _wait(crew: Crew, session: Session, done: threading.Event, signals: list[int], run_dir: Path) -> int:
    """Waits for the end, a failure or a signal, whichever is first; the exit code."""
    while not done.is_set() and not crew.stop.is_set() and not signals:
        done.wait(_POLL_S)
    deadline = time.monotonic() + _STOP_GRACE_S
    while session.learning and not done.wait(_POLL_S):
        if time.monotonic() - session.saving_since < _SAVE_S:
            rundir.show_progress(run_dir)
            deadline = time.monotonic() + _STOP_GRACE_S
        if time.monotonic() > deadline:
            print(f"the learner has hung for {_STOP_GRACE_S:g} s and is ended as it is.", flush=True)
            break
    if isinstance(crew.failure, ConfigError):
        raise crew.failure
    if crew.failure is not None:
        try:
            print(crew.describe_failure(), file=sys.stderr, flush=True)
        except OSError:  # The disk that is full may hold the log too.
            print(crew.describe_failure(), flush=True)
        return 1
    if signals and not session.learning:
        print("stopped before the first update; there is nothing to save.", flush=True)
    return 128 + signals[0] if signals else 0


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
        self._signals = signals
        self._started = time.monotonic()
        self._seconds_before = 0.0
        self._episodes_before: dict[str, Any] | None = None
        self._solved: dict[str, float] = {}  # the figures that the goal was reached with
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

        cache = os.environ.get("XDG_CACHE_HOME", os.path.expanduser("~/.cache"))
        if not jax.config.jax_compilation_cache_dir:  # type: ignore[missing-attribute]
            jax.config.update("jax_compilation_cache_dir", os.path.join(cache, "seedx", "jax"))
            jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
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
        if self._resume:
            state = self._restore(state)
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
            episodes=self._episodes_before,
        )
        example = self.policy.example_items(config.learner.rows)
        self.replay = make_replay(config, example)
        snapshot = snapshot_of(config, self.replay, self._run_dir, example, self._resume)
        interval_s = config.checkpoint.replay_interval_s
        self.keeper = Keeper(snapshot, interval_s, self.metrics, self._crew) if snapshot is not None else None
        self.batches = Batches(
            self.replay,
            config.learner.batch_size,
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
        config = self._config.learner
        example = self.policy.example_batch(config.batch_size, config.rows)
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
            while (reason := self._exit_reason()) is None:
                self._check_actors()
                batch = self.batches.next(_POLL_S)
                if batch is None:
                    continue
                # Judged before the update is published: in lock-step, nobody acts until then, and runs repeat.
                solved = self._is_solved()
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

    def _exit_reason(self) -> str | None:
        config, state = self._config, self.learner.state
        if self._crew.stop.is_set():
            return "failed"
        if self._signals:
            return signal.Signals(self._signals[0]).name
        if config.steps is not None and state.env_steps >= config.steps:
            return "steps"
        if config.seconds is not None and time.monotonic() - self._started >= config.seconds:
            return "seconds"
        return None

    def _check_actors(self) -> None:
        """Raises ConfigError when no training actor has asked for `hello_timeout_s`: perhaps none ever will."""
        timeout_s = self._config.inference.hello_timeout_s
        if time.monotonic() - self.policy.heard_at > timeout_s:
            raise ConfigError(
                f"no training actor has asked for an action for {timeout_s:g} s: all are gone or hang. Continue with "
                f"--resume --run-dir {self._run_dir} and start the actors too; raise --inference.hello-timeout-s if "
                "they may stay away for longer."
            )

    def _is_solved(self) -> bool:
        """Whether the mean return has reached the goal; keeps the figures that it was reached with."""
        goal = self._config.stop_at_return
        if goal is None:
            return False
        mean, episodes = self.policy.episodes.mean_return()
        solved = episodes >= self._config.metrics.return_window and mean >= goal
        if solved:
            self._solved = {"return_mean": mean, "return_episodes": episodes}
        return solved

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
            **self._solved,
            **({"eval_return_mean": eval_mean, "eval_return_episodes": eval_episodes} if eval_episodes else {}),
        }

    def _save(self, block: bool = False) -> None:
        state = self.learner.state
        metadata = {
            "spec": specs.to_json(self.spec),
            "config": dataclasses.asdict(self._config),
            "updates": state.updates,
            "env_steps": state.env_steps,
            "seconds": self._seconds(),
            "episodes": self.policy.episodes.state(),
        }
        self.checkpointer.save(state.updates, state.params, _other_arrays(state), metadata, block=block)

    def _restore(self, fresh: LearnerState) -> LearnerState:
        """The newest good checkpoint, or the fresh state where the run was stopped before its first one."""
        if not self.checkpointer.any():
            print(f"{self._run_dir} holds no checkpoint yet; starting from the beginning.", flush=True)
            return fresh
        found = self.checkpointer.restore(fresh.params, _other_arrays(fresh))
        if changed := specs.differences(specs.from_json(found.metadata["spec"]), self.spec):
            raise ConfigError(f"the environment differs from the checkpoint's: {'; '.join(changed)}.")
        self._seconds_before = float(found.metadata["seconds"])
        self._episodes_before = found.metadata["episodes"]
        print(f"resumed at update {found.update:,} ({found.metadata['env_steps']:,} steps).", flush=True)
        return fresh._replace(
            params=found.params,
            target_params=found.state.get("target_params"),
            opt_state=found.state["opt_state"],
            updates=found.update,
            env_steps=int(found.metadata["env_steps"]),
        )

    def _seconds(self) -> float:
        """Wall time of the run, earlier sessions included."""
        return self._seconds_before + time.monotonic() - self._started

    def _finish(self, reason: str) -> None:
        self.front_end.stop(finished=reason not in ("SIGTERM", "SIGINT", "failed"))
        if self.learning:
            self.saving_since = time.monotonic()
            self._save(block=True)
            if self.keeper is not None:
                self.keeper.finish()
        self.checkpointer.close()
        self.saving_since = -math.inf
        self.profile.close()
        self.reporter.finish(reason)
        self.replay.close()


def _other_arrays(state: LearnerState) -> dict[str, Any]:
    """What a checkpoint holds beside the parameters."""
    target = {} if state.target_params is None else {"target_params": state.target_params}
    return {"opt_state": state.opt_state, **target}

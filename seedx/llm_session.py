"""One session of an LLM run: model, warm start, decode engine, rollouts, learner; from the first line to the last.

The engine decodes with the very arrays that the learner made, on the learner's mesh. In a run without staleness they
take turns: a batch is generated, scored, learned from and published before the next one begins.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from seedx.checks import ConfigError, require
from seedx.ending import Ending, StoppedError, TimeOverError, end_before_first_update
from seedx.llm_config import LlmConfig
from seedx.threads import Crew, spare_the_collector
from seedx.types import Tree

_POLL_S = 0.1


class LlmSession:
    """What lives as long as one learner process of an LLM run.

    Args:
        config: Of the run.
        run_dir: The run directory.
        resume: Whether to go on from its newest checkpoint.
        crew: Of the process.
        signals: That have come; grows.
        address: Where decode hosts read the weights.
        decode_hosts: Their addresses; empty: this process has an engine.

    Attributes:
        learning: Whether there is something to save.
        busy_since: When the last update or checkpoint was begun, on the monotonic clock; -inf between them.
    """

    def __init__(
        self,
        config: LlmConfig,
        run_dir: Path,
        resume: bool,
        crew: Crew,
        signals: list[int],
        address: str = "",
        decode_hosts: Sequence[str] = (),
    ) -> None:
        self._address, self._decode_hosts = address, decode_hosts
        self._config = config
        self._run_dir = run_dir
        self._resume = resume
        self._crew = crew
        self._signals = signals
        self._ending = Ending(config, run_dir, crew.stop, signals)
        self._server: Any = None  # Serving
        self._remote: Any = None  # RemoteScheduler
        self.learning = False
        self.busy_since = -math.inf

    def run(self, done: threading.Event) -> None:
        """All of it; sets `done`, whether it succeeds or fails."""
        try:
            self._set_up()
            self._build_learner()
            self._build_engine()
            self._build_rollouts()
            self._start()
            self._finish(self._learn())
        except TimeOverError:
            end_before_first_update(self._config, self._run_dir, self._ending.seconds)
        except StoppedError:
            pass
        except BaseException as error:
            self._crew.fail(error)
        finally:
            done.set()

    # ---- building

    def _set_up(self) -> None:
        from seedx.envs.text.prompts import PromptSource
        from seedx.metrics import Metrics

        config = self._config
        try:
            from seedx.llm_prompts import prompts_of
            from seedx.llm_setup import caster, set_up
        except ModuleNotFoundError as error:
            raise ConfigError(f"--agent grpo needs {error.name}: pip install -e '.[llm]' -c constraints.txt") from error
        self._metrics = Metrics(rates=("env_steps", "updates", "completion_tokens"))
        if self._decode_hosts:
            from seedx.security import Access
            from seedx.transport.open import open_publisher

            self._publisher = open_publisher(self._address, Access(), self._crew.fail, metrics=self._metrics)
        elif config.serve_port is not None:
            from seedx.llm_serving import Serving

            self._server = Serving(config.serve_port, self._crew)
        _say(f"loading {config.model}")
        self._setup, self._initial_params = set_up(config, _say)
        self._source = PromptSource(prompts_of(self._setup.task, config.task, "train"), config.seed)
        self._cast = caster(config.learner.dtype)

    def _build_learner(self) -> None:
        """The learner with its state: from a checkpoint, or from the model after its warm start."""
        from seedx.checkpoint import Checkpointer
        from seedx.learner.token_logprobs import Model
        from seedx.llm_parts import make_learner
        from seedx.llm_resume import Progress, resume_llm_run
        from seedx.llm_setup import layout_of
        from seedx.llm_warm_start import warm_started

        config, learner, setup = self._config, self._config.learner, self._setup
        params, self._initial_params = self._initial_params, None  # of the warm start; there is no room for both
        layout = layout_of(setup.config, setup.mesh, learner.zero)
        self._policy = Model(setup.config, config.rollout.temperature, learner.dtype, learner.remat, layout)
        self.learner = make_learner(
            config, setup, self._policy, params, publish=self._publish, metrics=self._metrics, run_dir=self._run_dir
        )
        try:
            self._checkpointer = Checkpointer(self._run_dir, keep=config.checkpoint.keep)
        except PermissionError as error:
            raise ConfigError(str(error)) from error
        resume = self._resume and self._checkpointer.any()
        if config.warm_start.reward and not resume:
            params = warm_started(config, setup, self._source, self._policy, params, self._ending.check, _say)
        state = self.learner.begin(params)
        self._earlier = Progress(0.0, [])
        if resume:
            state, self._earlier = resume_llm_run(self._checkpointer, config, self.learner.trainable, state)
        self.learner.state = state
        self._first_update = state.updates

    def _build_engine(self) -> None:
        """Compiles learning, and decoding unless others do it."""
        from seedx.llm_parts import make_remote_scheduler, make_scheduler
        from seedx.weights import Weights

        _say("compiling")
        zero = self._config.learner.zero if self._config.mesh.fsdp > 1 else None
        _say(self.learner.compile().describe(self._setup.mesh.size, zero))
        state = self.learner.state
        weights = Weights(state.updates, self._cast(state.params))
        if self._decode_hosts:
            self._remote = make_remote_scheduler(
                self._config, self._setup, weights, self._decode_hosts, self._publisher, self._crew, _say
            )
        self.scheduler = self._remote or make_scheduler(self._config, self._setup, weights, self._crew, _say)

    def _build_rollouts(self) -> None:
        from seedx.envs.text.group_queue import GroupQueue, example
        from seedx.envs.text.rollouts import Pace, Rollouts
        from seedx.envs.text.sample_log import SampleLog
        from seedx.llm_parts import make_curriculum, make_generation
        from seedx.llm_scores import Scores
        from seedx.llm_view import LLM_VIEW
        from seedx.llm_warnings import Warnings
        from seedx.profiling import ProfileWindow
        from seedx.replay.build import make_replay
        from seedx.report import Reporter

        config, state, tokenizer = self._config, self.learner.state, self._setup.tokenizer
        self._generation, self._pool = make_generation(config, self._setup, self.scheduler, self._metrics, self._crew)
        self._scores = Scores(config, self._setup, self.scheduler, self._generation, self._earlier.scores_before, _say)
        pace = Pace(config.learner.batch_size, config.max_staleness)
        self._curriculum = make_curriculum(config, pace, self._earlier.curriculum)
        title = f"{config.agent} on {config.task}, seed {config.seed}"
        samples = SampleLog(self._run_dir, lambda group: tokenizer.decode(group.prompt.tolist()), title)
        self._rollouts = Rollouts(
            self._generation,
            self.scheduler,
            self._source,
            self._setup.encode,
            pace=pace,
            config=config.grpo,
            seed=config.seed,
            position=state.position,
            updates=state.updates,
            rewards=self._earlier.rewards,
            window=config.metrics.return_window,
            told=lambda group: samples.add(group, self.learner.state.updates),
            metrics=self._metrics,
            crew=self._crew,
            curriculum=self._curriculum,
        )
        seconds_left = math.inf if config.seconds is None else config.seconds - self._ending.seconds
        self.replay = make_replay(config, example(config.grpo.group_size), self._resume, seconds_left)
        held = sum(getattr(self.replay, "held", {}).values())  # by a Reverb server
        self._groups = GroupQueue(self.replay, state.updates * config.learner.batch_size, self._metrics, held)
        for name, value in zip(
            ("updates", "env_steps", "completion_tokens"), (state.updates, state.env_steps, state.tokens), strict=True
        ):
            self._metrics.count(name, value)
        self._profile = ProfileWindow(config.metrics, self._run_dir)
        self._reporter = Reporter(
            config,
            self._run_dir,
            self._metrics,
            self._figures,
            self._crew.stop,
            LLM_VIEW,
            self._summary,
            Warnings(
                exact=config.learner.dtype == "float32",
                compared=config.grpo.advantage != "gae",
                under_way=pace.allowed(0) * (config.grpo.group_size + config.rollout.redundant),
                slots=self.scheduler.num_slots,
            ),
        )

    # ---- running

    def _start(self) -> None:
        spare_the_collector()
        self.scheduler.start()
        self._generation.start()
        self.learning = True
        if self.learner.state.updates == 0:
            self._save(block=True)  # so that a resume has the warm start, and the reference
            self._scores.begin(self._is_over)
        if self._server is not None:
            _say(f"the engine answers at {self._server.begin(self.scheduler, self._setup)}")
        self._reporter.start(self._opening())
        self._crew.spawn("report", self._reporter.loop)
        self._rollouts.start(self._groups)

    def _learn(self) -> str:
        """Learns until something says stop; what it was. Even a failure leaves the state of the last good update."""
        config, learner = self._config, self.learner
        try:
            last_checkpoint = time.monotonic()
            while (reason := self._ending.reason(learner.state.env_steps)) is None:
                items = self._next()
                if items is None:
                    continue
                solved = self._ending.is_solved(*self._rollouts.mean_reward())
                self.busy_since = time.monotonic()  # an update of a large model is not cut short either
                learner.step(items)
                self.busy_since = -math.inf
                self._profile.tick()
                interval = config.held_out.interval_updates
                if interval and learner.state.updates % interval == 0:
                    score = self._scores.between(learner.state.updates, self._is_over)
                    if score is not None:
                        self._metrics.gauge("held_out/reward", score)
                if self._curriculum is not None:
                    self._curriculum.learned(learner.state.position)
                self._rollouts.advance(learner.state.updates)  # only now: what is decoded together is always the same
                if config.checkpoint.interval_s and time.monotonic() - last_checkpoint > config.checkpoint.interval_s:
                    self._save()
                    last_checkpoint = time.monotonic()
                if solved:
                    return "solved"
            if reason == "seconds" and learner.state.updates == self._first_update:
                why = self._pool.why_nothing_scored()
                require(why is None, f"--seconds ({config.seconds:g}) are over without an update: {why}")
            return reason
        except Exception as error:
            self._crew.fail(error)
            return "failed"

    def _next(self) -> Any:
        from seedx.replay.replay import ReplayTimeoutError

        try:
            with self._metrics.timer("learner/wait_batch"):
                return self._groups.take(self._config.learner.batch_size, _POLL_S)
        except ReplayTimeoutError:
            return None

    def _publish(self, version: int, params: Tree) -> None:
        with self._metrics.timer("weights/publish"):
            self.scheduler.publish(version, self._cast(params))

    def _is_over(self) -> bool:
        return self._ending.reason(self.learner.state.env_steps) is not None

    def _interrupted(self) -> bool:
        return self._crew.stop.is_set() or bool(self._signals)

    # ---- telling

    def _opening(self) -> str:
        from seedx.console import opening_line

        config = self._config
        groups = f"{config.learner.batch_size} groups x {config.grpo.group_size} completions"
        devices = f"{self._setup.mesh.size} {self._setup.mesh.devices.flat[0].platform}"
        return opening_line(config.agent, config.task, config.seed, groups, devices, str(self._run_dir))

    def _figures(self) -> dict[str, Any]:
        """Figures of now, beside what the parts measured."""
        state = self.learner.state
        mean, count = self._rollouts.mean_reward()
        return {
            "frames": state.env_steps,
            "version": state.updates,
            "seconds": self._seconds(),
            "lag_updates_mean": self.learner.lag_sum / max(state.updates - self._first_update, 1),
            **({"reward_mean": mean, "reward_completions": count} if count else {}),
            **self.replay.info(),
            **self.scheduler.figures(),
            **({"learner/busy_s": time.monotonic() - since} if (since := self.busy_since) > -math.inf else {}),
            **self._ending.solved,
        }

    def _summary(self, row: dict[str, Any]) -> dict[str, Any]:
        """What summary.json has beside what all runs have."""
        state = self.learner.state
        return {
            "reward_mean": row.get("reward_mean"),
            "completions": state.env_steps,
            "completion_tokens": state.tokens,
            "completion_tokens_per_s": state.tokens / max(row["seconds"], 1e-9),
            **self._scores.summary(),
        }

    def _seconds(self) -> float:
        """Wall time of the run, earlier sessions included."""
        return self._earlier.seconds + self._ending.seconds

    def _save(self, block: bool = False) -> None:
        from seedx.llm_resume import Progress, save_llm_run

        learner = self.learner
        position = learner.state.position
        rewards = self._rollouts.rewards(position)
        curriculum = None if self._curriculum is None else self._curriculum.saved(position)
        progress = Progress(self._seconds(), rewards, self._scores.before.tolist(), curriculum)
        save_llm_run(self._checkpointer, self._config, learner.trainable, learner.state, progress, block)

    def _finish(self, reason: str) -> None:
        try:
            if self.learning:
                self.busy_since = time.monotonic()
                self._save(block=True)
                self.busy_since = -math.inf
                if reason in ("solved", "steps", "seconds") and self.learner.state.updates:
                    self._scores.end(self._interrupted)
        except BaseException as error:
            self._crew.fail(error)  # before the crew stops, after which nothing counts as a failure
        finally:
            self._checkpointer.close()
            self.busy_since = -math.inf
            self._profile.close()
            self._reporter.finish(reason)
            self._crew.stop.set()  # before what rollouts are still at is closed, which would be a failure to them
            if self._server is not None:
                self._server.stop()
            if self._remote is not None:
                self._remote.close()
            self._pool.close()
            self.replay.close()


def _say(text: str) -> None:
    print(text, flush=True)

"""One session of an LLM run: model, warm start, decode engine, rollouts, learner; from the first line to the last.

The engine decodes with the very arrays that the learner made, on the learner's mesh. In a run without staleness they
take turns: a batch is generated, scored, learned from and published before the next one begins.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from seedx.checks import ConfigError, require
from seedx.ending import Ending
from seedx.llm_config import LlmConfig
from seedx.threads import Crew, spare_the_collector
from seedx.types import Tree

_POLL_S = 0.1
_MAX_TOKENS = 256  # of a completion, where neither the run nor the task says
_MEASURED_PROMPTS = 2000  # that the length of the longest prompt is taken over
_ROUND = 16  # rows are a multiple of this long, so that they divide into chunks
_REWARD_WAIT_S = 2.0  # for the workers to end


class LlmSession:
    """What lives as long as one learner process of an LLM run.

    Attributes:
        learning: Whether there is something to save.
        saving_since: When the last checkpoint was begun, on the monotonic clock; -inf while none is being written.
    """

    def __init__(self, config: LlmConfig, run_dir: Path, resume: bool, crew: Crew, signals: list[int]) -> None:
        self._config = config
        self._run_dir = run_dir
        self._resume = resume
        self._crew = crew
        self._signals = signals
        self._ending = Ending(config, run_dir, crew.stop, signals)
        self._seconds_before = 0.0
        self._score_before: float | None = None
        self._score_after: float | None = None
        self._server: Any = None  # DecodeServer
        self.learning = False
        self.saving_since = -math.inf

    def run(self, done: threading.Event) -> None:
        """All of it; sets `done`, whether it succeeds or fails."""
        try:
            self._open()
            self._build_learner()
            self._build_engine()
            self._build_rollouts()
            self._start()
            self._finish(self._learn())
        except BaseException as error:
            self._crew.fail(error)
        finally:
            done.set()

    # ---- building

    def _open(self) -> None:
        """The task, the model, and how long their texts are."""
        from seedx import compilation_cache, sharding
        from seedx.envs.text.encode import encode_prompt
        from seedx.envs.text.load import load_task
        from seedx.envs.text.prompts import PromptSource
        from seedx.networks import transformer
        from seedx.networks.model_source import open_model

        compilation_cache.use()
        config, sizes = self._config, self._config.mesh
        self._task = load_task(config.task)
        self._mesh = sharding.serve_mesh(data=sizes.data, fsdp=sizes.fsdp, tensor=sizes.tensor)
        _say(f"loading {config.model}")
        model = open_model(
            config.model,
            "float32",
            lambda found: sharding.serve_shardings(
                self._mesh, transformer.logical_axes(found), transformer.abstract_params(found)
            ),
            seed=config.seed,
        )
        self._tokenizer, self._chat_template, self._model_name = model.tokenizer, model.chat_template, model.name
        self._model_config, self._initial_params = model.config, model.params
        prompts = self._task.prompts("train")
        self._source = PromptSource(prompts, config.seed)
        self._tokens_of = lambda prompt: encode_prompt(prompt, self._tokenizer, self._chat_template)
        self._max_prompt = config.rollout.max_prompt_tokens or max(
            len(self._tokens_of(prompts[i])) for i in range(min(len(prompts), _MEASURED_PROMPTS))
        )
        self._max_tokens = config.rollout.max_tokens or getattr(self._task, "max_tokens", _MAX_TOKENS)
        self._length = -(-(self._max_prompt + self._max_tokens) // _ROUND) * _ROUND
        require(
            self._length <= model.config.max_length,
            f"prompts of up to {self._max_prompt} tokens and completions of up to {self._max_tokens} are more than the "
            f"{model.config.max_length} that {model.name} knows; lower --rollout.max-prompt-tokens or "
            "--rollout.max-tokens.",
        )

    def _encode(self, prompt: Any) -> tuple[int, ...] | None:
        tokens = self._tokens_of(prompt)
        return tokens if len(tokens) <= self._max_prompt else None

    def _build_learner(self) -> None:
        """The learner with its state: from a checkpoint, or from the model after its warm start."""
        import jax

        from seedx import sharding
        from seedx.agents.grpo import Model
        from seedx.checkpoint import Checkpointer
        from seedx.learner.text_learner import Shapes, TextLearner, TextState, rows_of_a_part
        from seedx.llm_resume import resume_llm_run
        from seedx.metrics import Metrics

        config, learner = self._config, self._config.learner
        params, self._initial_params = self._initial_params, None  # of the warm start; there is no room for both
        self._policy = Model(self._model_config, config.rollout.temperature, learner.dtype, learner.remat)
        row_tokens = max(-(-learner.row_tokens // _ROUND) * _ROUND, self._length)
        rows = rows_of_a_part(
            learner, config.grpo.group_size, row_tokens // self._length, sharding.row_groups(self._mesh)
        )
        shapes = Shapes(self._max_tokens, row_tokens, rows)
        self._metrics = Metrics(rates=("env_steps", "updates", "completion_tokens"))
        self.learner = TextLearner(
            self._policy,
            config.grpo,
            learner,
            self._mesh,
            params,
            shapes,
            self._publish,
            self._metrics,
            self._run_dir,
        )
        try:
            self._checkpointer = Checkpointer(self._run_dir, keep=config.checkpoint.keep)
        except PermissionError as error:
            raise ConfigError(str(error)) from error
        reference = params if config.grpo.kl_cost else None
        state = TextState(params, self.learner.init(params), reference, 0, 0, 0, 0)
        self._earlier_rewards: list[float] = []
        if self._resume and self._checkpointer.any():
            state, progress = resume_llm_run(self._checkpointer, state)
            self._seconds_before, self._score_before, self._earlier_rewards = progress
        elif config.warm_start.reward:
            params = jax.block_until_ready(self._warm_start(params))
            state = state._replace(params=params, reference=params if config.grpo.kl_cost else None)
        self.learner.state = state
        self._first_update = state.updates

    def _build_engine(self) -> None:
        """Compiles learning and decoding, and starts to decode."""
        import jax

        from seedx import sharding
        from seedx.inference.engine import Engine
        from seedx.inference.memory_plan import plan_memory
        from seedx.inference.scheduler import Limits, Scheduler
        from seedx.weights import Weights

        config, state = self._config, self.learner.state
        _say("compiling")
        self.learner.compile()
        dtype = config.learner.dtype
        same = dtype == "float32"
        self._cast: Callable[[Tree], Tree] = (
            (lambda params: params)
            if same
            else jax.jit(lambda params: jax.tree.map(lambda leaf: leaf.astype(dtype), params))
        )
        params = self._cast(state.params)
        budget = self._decode_budget()
        launching = threading.Lock() if self._mesh.size > 1 else None
        plan = plan_memory(
            self._policy.config,
            params,
            budget,
            length=self._length,
            max_slots=config.decode.max_concurrent,
            prefix_cache_bytes=budget // 16,
            slots_multiple=sharding.row_groups(self._mesh),
            mesh=self._mesh,
        )
        _say(plan.describe())
        engine = Engine(
            self._policy.config,
            plan,
            mesh=self._mesh,
            steps_per_dispatch=min(config.decode.steps_per_dispatch, self._length),
            launching=launching,
        )
        weights = Weights(state.updates, params)
        engine.warm_up(weights)
        groups = (config.max_staleness + 1) * config.learner.batch_size * config.grpo.group_size
        limits = Limits(max_waiting=4 * (groups + 512), max_waiting_tokens=1 << 24)
        self.scheduler = Scheduler(engine, weights, tokenizer=self._tokenizer, limits=limits, crew=self._crew)

    def _decode_budget(self) -> int:
        from seedx.inference.engine_config import parse_bytes
        from seedx.memory import memory_bytes

        given = parse_bytes(self._config.decode.memory_budget, "--decode.memory-budget")
        return memory_bytes() // 4 if given is None else given

    def _build_rollouts(self) -> None:
        from seedx.envs.text.generation import Generation, Settings
        from seedx.envs.text.group import example_item
        from seedx.envs.text.rewards import RewardPool
        from seedx.envs.text.rollouts import Pace, Rollouts
        from seedx.envs.text.sample_log import SampleLog
        from seedx.llm_view import LLM_VIEW
        from seedx.replay.build import make_replay
        from seedx.report import Reporter

        config, state, tokenizer = self._config, self.learner.state, self._tokenizer
        settings = Settings(
            group_size=config.grpo.group_size,
            max_tokens=self._max_tokens,
            temperature=config.rollout.temperature,
            timeout_s=config.rollout.timeout_s,
            retries=config.rollout.retries,
            overlong_tokens=config.grpo.overlong_tokens,
        )
        self._pool = RewardPool(config.task, config.reward, self._metrics, self._crew)
        self._generation = Generation(
            self.scheduler, self._task, tokenizer, self._pool, settings, self._metrics, self._crew
        )
        title = f"{config.agent} on {config.task}, seed {config.seed}"
        samples = SampleLog(self._run_dir, lambda group: tokenizer.decode(group.prompt.tolist()), title)
        self._rollouts = Rollouts(
            self._generation,
            self.scheduler,
            self._source,
            self._encode,
            pace=Pace(config.learner.batch_size, config.max_staleness),
            config=config.grpo,
            seed=config.seed,
            position=state.position,
            updates=state.updates,
            rewards=self._earlier_rewards,
            window=config.metrics.return_window,
            told=lambda group: samples.add(group, self.learner.state.updates),
            metrics=self._metrics,
            crew=self._crew,
        )
        seconds_left = math.inf if config.seconds is None else config.seconds - self._ending.seconds
        self.replay = make_replay(config, example_item(config.grpo.group_size), self._resume, seconds_left)
        for name, value in zip(
            ("updates", "env_steps", "completion_tokens"), (state.updates, state.env_steps, state.tokens), strict=True
        ):
            self._metrics.count(name, value)
        self._reporter = Reporter(
            config, self._run_dir, self._metrics, self._figures, self._crew.stop, LLM_VIEW, self._summary
        )

    def _warm_start(self, params: Tree) -> Tree:
        from seedx.learner.warm_start import warm_start

        config, tokenizer = self._config.warm_start, self._tokenizer
        end = tokenizer.eos_ids[:1]
        position = iter(range(2**62))

        def pairs(_: int) -> list[tuple]:
            """The next prompts that are not too long, with their answers."""
            found: list[tuple] = []
            while len(found) < config.batch_size:
                prompt = self._source.at(next(position)).prompt
                tokens, answer = self._encode(prompt), tokenizer.encode(prompt.answer, add_bos=False)
                require(bool(prompt.answer), f"task {self._config.task} gives no answers to warm start with.")
                if tokens is not None and len(answer) < self._max_tokens:
                    found.append((tokens, (*answer, *end)))
            return found

        started = shown = time.monotonic()

        def progress(update: int, solved: float) -> None:
            nonlocal shown
            if self._crew.stop.is_set() or self._signals:
                raise SystemExit(1)
            if time.monotonic() - shown > 2.0:
                shown = time.monotonic()
                _say(f"warm start: {update:,} updates, {solved:.1%} right")

        _say(f"warm start: supervised on the task's answers until {config.reward:.0%} are right")
        params = warm_start(
            self._policy,
            config,
            params,
            pairs,
            mesh=self._mesh,
            row_tokens=self._length,
            progress=progress,
        )
        _say(f"warm start: done after {time.monotonic() - started:.1f} s")
        return params

    # ---- running

    def _start(self) -> None:
        config = self._config
        spare_the_collector()
        self.scheduler.start()
        self._generation.start()
        if self.learner.state.updates == 0:
            self._score_before = self._score("before the first update")
            if self._stopped():
                return
            self._save(block=True)  # so that a resume has the warm start, and the reference
        self.learning = True
        if config.serve_port is not None:
            self._serve(config.serve_port)
        self._reporter.start(self._opening())
        self._crew.spawn("report", self._reporter.loop)
        self._rollouts.start(self.replay)

    def _serve(self, port: int) -> None:
        """The learner's engine answers others too."""
        from seedx.inference.decode_metrics import DecodeMetrics
        from seedx.inference.decode_server import DecodeServer
        from seedx.inference.decode_service import DecodeService
        from seedx.inference.security import Access

        service = DecodeService(DecodeMetrics())
        self._server = DecodeServer(service, f"localhost:{port}", None, Access(), self._crew.fail)
        self._server.start()
        service.begin(self.scheduler, self._model_name, self._tokenizer, self._chat_template)
        _say(f"the engine answers at {self._server.address}")

    def _stopped(self) -> bool:
        return self._ending.reason(self.learner.state.env_steps) is not None

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
                learner.step(items)
                self._rollouts.advance(learner.state.updates)
                interval = config.held_out.interval_updates
                if interval and learner.state.updates % interval == 0:
                    score = self._score(f"after {learner.state.updates:,} updates")
                    if score is not None:
                        self._metrics.gauge("held_out/reward", score)
                if config.checkpoint.interval_s and time.monotonic() - last_checkpoint > config.checkpoint.interval_s:
                    self._save()
                    last_checkpoint = time.monotonic()
                if solved:
                    return "solved"
            return reason
        except Exception as error:
            self._crew.fail(error)
            return "failed"

    def _next(self) -> Any:
        from seedx.replay.replay import ReplayTimeoutError

        try:
            with self._metrics.timer("learner/wait_batch"):
                return self.replay.sample(self._config.learner.batch_size, _POLL_S).items
        except ReplayTimeoutError:
            return None

    def _publish(self, version: int, params: Tree) -> None:
        with self._metrics.timer("weights/publish"):
            self.scheduler.publish(version, self._cast(params))

    def _score(self, when: str) -> float | None:
        """Mean reward on held-out prompts; None if there are none, or the run is stopped meanwhile."""
        from seedx.envs.text.held_out import held_out

        config = self._config.held_out
        prompts = self._task.prompts("test")
        count = min(config.num_prompts, len(prompts))
        if not count:
            return None
        result = held_out(
            self._generation,
            self.scheduler,
            [prompts[i] for i in range(count)],
            self._encode,
            num_samples=config.num_samples,
            seed=self._config.seed,
            stop=self._interrupted,
        )
        if result is None or math.isnan(result.mean):
            return None
        low, high = result.interval
        _say(f"held-out reward {when}: {result.mean:.3f} ({low:.3f} to {high:.3f}) over {len(result.groups)} prompts")
        return result.mean

    def _interrupted(self) -> bool:
        return self._crew.stop.is_set() or bool(self._signals)

    # ---- telling

    def _opening(self) -> str:
        from seedx.console import opening_line

        config = self._config
        groups = f"{config.learner.batch_size} groups x {config.grpo.group_size} completions"
        devices = f"{self._mesh.size} {self._mesh.devices.flat[0].platform}"
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
            "held_out_reward_before": self._score_before,
            "held_out_reward_after": self._score_after,
        }

    def _seconds(self) -> float:
        """Wall time of the run, earlier sessions included."""
        return self._seconds_before + self._ending.seconds

    def _save(self, block: bool = False) -> None:
        from seedx.llm_resume import Progress, save_llm_run

        progress = Progress(self._seconds(), self._score_before, self._rollouts.rewards())
        save_llm_run(self._checkpointer, self._config, self.learner.state, progress, block)

    def _finish(self, reason: str) -> None:
        try:
            if self.learning:
                self.saving_since = time.monotonic()
                self._save(block=True)
                self.saving_since = -math.inf
                if reason in ("solved", "steps", "seconds"):
                    self._score_after = self._score("after the last update")
        finally:
            self._checkpointer.close()
            self.saving_since = -math.inf
            self._reporter.finish(reason)
            if self._server is not None:
                self._server.stop(0.0)
            self._pool.close()
            self.replay.close()


def _say(text: str) -> None:
    print(text, flush=True)

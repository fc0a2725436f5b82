"""The parts of an LLM run, each made of its configuration: learner, decode engine, rewards, curriculum."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from seedx import sharding
from seedx.agents.grpo import grpo_loss
from seedx.envs.text.curriculum import Curriculum
from seedx.envs.text.generation import Generation, Settings
from seedx.envs.text.rewards import RewardPool
from seedx.envs.text.rollouts import Pace
from seedx.inference.decoder import Decoder
from seedx.inference.engine import Engine
from seedx.inference.remote_scheduler import RemoteScheduler
from seedx.inference.scheduler import Limits, Scheduler
from seedx.learner.text_learner import TextLearner, shapes_of
from seedx.learner.token_logprobs import Model
from seedx.learner.trainable import Trainable
from seedx.llm_config import LlmConfig
from seedx.llm_setup import Setup, completions_ahead, layout_of, plan_engine
from seedx.metrics import Metrics
from seedx.threads import Crew
from seedx.transport.publisher import Publisher
from seedx.types import Tree
from seedx.weights import Weights


def make_learner(
    config: LlmConfig,
    setup: Setup,
    policy: Model,
    params: Tree,
    *,
    publish: Callable[[int, Tree], None],
    metrics: Metrics,
    run_dir: Path,
) -> TextLearner:
    """A learner without a state.

    Args:
        config: Of the run.
        setup: Of the run.
        policy: How log-probabilities are computed.
        params: Like those of the model, where they live.
        publish: Given every version and its parameters.
        metrics: Where figures go.
        run_dir: Where the batch is saved that made an update non-finite.
    """
    grpo = config.grpo
    trainable = Trainable(
        setup.config,
        setup.mesh,
        value_head=grpo.advantage == "gae",
        reference=grpo.kl_cost > 0,
        lora=config.lora,
        seed=config.seed,
        split=config.learner.zero == 3,
    )
    row_groups = sharding.row_groups(setup.mesh)
    return TextLearner(
        policy,
        partial(grpo_loss, policy, grpo),
        trainable,
        grpo,
        config.learner,
        setup.mesh,
        params,
        shapes_of(config.learner, grpo.group_size, setup.max_prompt_tokens, setup.max_tokens, row_groups),
        publish,
        metrics,
        run_dir,
        setup.launching,
    )


def make_scheduler(
    config: LlmConfig, setup: Setup, weights: Weights, crew: Crew, say: Callable[[str], None] | None = None
) -> Scheduler:
    """A decode engine with its scheduler, compiled but not started.

    Args:
        config: Of the run.
        setup: Of the run.
        weights: The first version, cast.
        crew: The scheduler's thread joins it.
        say: Told how memory is used.
    """
    return schedule(config, setup, make_engine(config, setup, weights, say), weights, crew)


def make_engine(config: LlmConfig, setup: Setup, weights: Weights, say: Callable[[str], None] | None = None) -> Engine:
    """A decode engine, compiled; `make_scheduler` says what the arguments are."""
    plan = plan_engine(config, setup, weights.params)
    if say is not None:
        say(plan.describe())
    engine = Engine(
        setup.config,
        plan,
        mesh=setup.mesh,
        steps_per_dispatch=min(config.decode.steps_per_dispatch, setup.length),
        launching=setup.launching,
        layout=layout_of(setup.config, setup.mesh, config.learner.zero),
    )
    engine.warm_up(weights)
    return engine


def schedule(config: LlmConfig, setup: Setup, engine: Engine, weights: Weights, crew: Crew) -> Scheduler:
    """A scheduler over an engine of the run; `make_scheduler` says what the other arguments are."""
    limits = Limits(max_waiting=4 * completions_ahead(config), max_waiting_tokens=1 << 24)
    return Scheduler(engine, weights, tokenizer=setup.tokenizer, limits=limits, crew=crew)


def make_remote_scheduler(
    config: LlmConfig,
    setup: Setup,
    weights: Weights,
    addresses: Sequence[str],
    publisher: Publisher,
    crew: Crew,
    say: Callable[[str], None],
) -> RemoteScheduler:
    """What has decode hosts generate, not started; it has published the first version.

    Args:
        config: Of the run.
        setup: Of the run.
        weights: The first version, cast.
        addresses: Of the hosts.
        publisher: Of the weights.
        crew: Its threads join it.
        say: Told how each host uses its memory.
    """
    plan = plan_engine(config, setup, weights.params)  # as the hosts make it
    say(f"decode hosts: {len(addresses)}, each with {plan.describe()}")
    slots = len(addresses) * plan.num_slots
    scheduler = RemoteScheduler(addresses, publisher, num_slots=slots, give_up_s=config.rollout.timeout_s, crew=crew)
    scheduler.publish(weights.version, weights.params)
    return scheduler


def make_generation(
    config: LlmConfig,
    setup: Setup,
    scheduler: Decoder,
    metrics: Metrics,
    crew: Crew,
    temperature: float | None = None,
) -> tuple[Generation, RewardPool]:
    """What makes scored groups, not started, and the processes that score them.

    Args:
        config: Of the run.
        setup: Of the run.
        scheduler: That generates.
        metrics: Where figures go.
        crew: Their threads join it.
        temperature: That tokens are drawn at; None: the run's.
    """
    rollout = config.rollout
    settings = Settings(
        group_size=config.grpo.group_size,
        max_tokens=setup.max_tokens,
        temperature=rollout.temperature if temperature is None else temperature,
        timeout_s=rollout.timeout_s,
        retries=rollout.retries,
        redundant=rollout.redundant,
        late_s=rollout.late_s,
        overlong_tokens=config.grpo.overlong_tokens,
    )
    asked = completions_ahead(config) * (1 + rollout.retries)  # replies to turns of groups that got lost are among them
    pool = RewardPool(config.task, config.reward, metrics, crew, max_waiting=asked)
    return Generation(scheduler, setup.task, setup.tokenizer, pool, settings, metrics, crew), pool


def make_curriculum(config: LlmConfig, pace: Pace, saved: Mapping[str, Any] | None) -> Curriculum | None:
    """Which prompts a run passes over; None: none.

    Args:
        config: Of the run.
        pace: Of its rollouts.
        saved: What the run had before (`Curriculum.saved`); None: nothing.
    """
    if config.curriculum.floor == 1:
        return None
    return Curriculum(config.curriculum, seed=config.seed, behind=pace.allowed(0), saved=saved)

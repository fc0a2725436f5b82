"""What training and evaluating a language model begin with: task, model, how long texts are, decode engine."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
from jax.sharding import Mesh

from seedx import compilation_cache, sharding
from seedx.chat import ChatTemplate
from seedx.checks import ConfigError, require
from seedx.device_config import parse_bytes
from seedx.envs.text.blame import blame
from seedx.envs.text.curriculum import check_num_prompts
from seedx.envs.text.encode import encode_prompt
from seedx.envs.text.held_out import AT_A_TIME
from seedx.envs.text.load import load_task
from seedx.envs.text.rewarded import Rewarded
from seedx.envs.text.sandbox_process import MODE
from seedx.envs.text.task import Prompt, Task
from seedx.inference.load_engine import memory_of
from seedx.inference.memory_plan import MemoryPlan, plan_memory
from seedx.llm_config import LlmConfig
from seedx.llm_prompts import prompt_tokens
from seedx.networks import transformer
from seedx.networks.lora import check_rank
from seedx.networks.model_source import open_model
from seedx.networks.transformer_config import TransformerConfig
from seedx.tokenizer import Tokenizer
from seedx.types import Tree

_MAX_TOKENS = 256  # of a completion, where neither the run nor the task says
_ROUND = 16  # texts have a multiple of this length, so that they divide into chunks


@dataclass(frozen=True)
class Setup:
    """A task and a model that fit together.

    Attributes:
        task: Of the run.
        name: Of the model.
        config: Of the transformer.
        tokenizer: The model's.
        chat_template: The model's; None: it has none.
        mesh: The devices.
        max_prompt_tokens: Longer prompts are passed over.
        max_tokens: Of a completion.
        launching: Held while a computation is launched (see `sharding.Meshes`).
    """

    task: Task
    name: str
    config: TransformerConfig
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    mesh: Mesh
    max_prompt_tokens: int
    max_tokens: int
    launching: contextlib.AbstractContextManager[Any]

    @property
    def length(self) -> int:
        """Tokens of a whole text, at most."""
        return -(-(self.max_prompt_tokens + self.max_tokens) // _ROUND) * _ROUND

    def encode(self, prompt: Prompt) -> tuple[int, ...] | None:
        """The prompt as the model reads it; None if it is too long."""
        tokens = encode_prompt(prompt, self.tokenizer, self.chat_template)
        return tokens if len(tokens) <= self.max_prompt_tokens else None


def set_up(config: LlmConfig, say: Callable[[str], None]) -> tuple[Setup, Tree]:
    """The setup of a run, and the parameters that the model comes with, float32.

    Args:
        config: Of the run.
        say: Told which prompts are passed over.

    Raises:
        ConfigError: there is no such task or model, the task fails, or they do not fit each other or the devices.
    """
    compilation_cache.use()
    rollout = config.rollout
    os.environ[MODE] = config.reward.sandbox  # for tasks that look whether the sandbox can be had
    with blame(f"task {config.task}: making it"):
        task = load_task(config.task)
    if isinstance(task, Rewarded):
        task.check_config(config.reward)
    mesh = sharding.whole_mesh(config.mesh, config.decode.max_concurrent)
    layout = partial(layout_of, mesh=mesh, zero=config.learner.zero)
    model = open_model(config.model, "float32", layout, seed=config.seed)
    max_tokens = rollout.max_tokens or getattr(task, "max_tokens", _MAX_TOKENS)
    room = model.config.max_length // _ROUND * _ROUND - max_tokens
    require(
        room > 0,
        f"completions of up to {max_tokens} tokens leave no room for a prompt in the {model.config.max_length} that "
        f"{model.name} knows; lower --rollout.max-tokens.",
    )
    encode = partial(encode_prompt, tokenizer=model.tokenizer, chat_template=model.chat_template)
    longest = prompt_tokens(task, config.task, encode, rollout.max_prompt_tokens, room, say)
    if config.curriculum.floor < 1:
        check_num_prompts(len(task.prompts("train")))
    launching = threading.Lock() if mesh.size > 1 else contextlib.nullcontext()
    setup = Setup(
        task, model.name, model.config, model.tokenizer, model.chat_template, mesh, longest, max_tokens, launching
    )
    require(
        setup.length <= model.config.max_length,
        f"prompts of up to {longest} tokens and completions of up to {max_tokens} are more than the "
        f"{model.config.max_length} that {model.name} knows; lower --rollout.max-prompt-tokens or "
        "--rollout.max-tokens.",
    )
    check_rank(model.config, config.lora.rank)
    overlong = config.grpo.overlong_tokens
    require(
        overlong <= max_tokens,
        f"grpo.overlong_tokens ({overlong}) must not exceed the {max_tokens} tokens of a completion; lower it, or "
        "raise --rollout.max-tokens.",
    )
    plan_engine(config, setup, model.params)  # before a warm start, rather than after it
    return setup, model.params


def layout_of(config: TransformerConfig, mesh: Mesh, zero: int = 3) -> Tree:
    """Where each parameter lives, for learning and for decoding; only ZeRO-3 splits it over fsdp."""
    axes, shapes = transformer.logical_axes(config), transformer.abstract_params(config)
    return sharding.serve_shardings(mesh, axes, shapes, split=zero == 3)


def caster(dtype: str) -> Callable[[Tree], Tree]:
    """Makes parameters as the engine computes with them; the same ones where it computes in float32."""
    if dtype == "float32":
        return lambda params: params
    return jax.jit(lambda params: jax.tree.map(lambda leaf: leaf.astype(dtype), params))


def completions_ahead(config: LlmConfig) -> int:
    """How many completions a run has under way at most, those of an evaluation in between included."""
    per_group = config.grpo.group_size + config.rollout.redundant
    rollouts = (config.max_staleness + 1) * config.learner.batch_size * per_group
    return rollouts + max(AT_A_TIME, config.held_out.num_samples)


def plan_engine(config: LlmConfig, setup: Setup, params: Tree) -> MemoryPlan:
    """The shapes of the run's decode engine.

    Args:
        config: Of the run.
        setup: Of the run.
        params: Where they live; cast, or as they are learned.

    Raises:
        ConfigError: `--decode.memory-budget` is more than there is, or holds no engine.
    """
    given = parse_bytes(config.decode.memory_budget, "--decode.memory-budget")
    memory = memory_of(setup.mesh)
    budget = memory // 4 // max(config.decode_hosts, 1) if given is None else given
    require(
        budget <= memory,
        f"--decode.memory-budget ({config.decode.memory_budget}) is more than the memory there is ({memory / 1e9:.1f} "
        "GB); give less, or leave it out for a quarter of it.",
    )
    dtype = config.learner.dtype
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=leaf.sharding), params)
    try:
        return plan_memory(
            setup.config,
            shapes,
            budget,
            length=setup.length,
            max_slots=config.decode.max_concurrent,
            prefix_cache_bytes=budget // 16,
            slots_multiple=sharding.row_groups(setup.mesh),
            mesh=setup.mesh,
        )
    except ConfigError as error:
        raise ConfigError(
            f"{error} The flags are --decode.memory-budget (bytes, for example 4GB), --rollout.max-tokens and "
            "--rollout.max-prompt-tokens."
        ) from None

"""What the GRPO benchmarks have in common: the tiny model, and a whole run of it without a process of its own."""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import jax
from decode_setup import TINY, tiny_params
from grpo_task import PROMPT_TOKENS

from seedx import compilation_cache, sharding
from seedx.agents.grpo import grpo_loss
from seedx.envs.text.generation import Generation, Settings
from seedx.envs.text.group_queue import GroupQueue
from seedx.envs.text.load import load_task
from seedx.envs.text.prompts import PromptSource
from seedx.envs.text.rewards import RewardPool
from seedx.envs.text.rollouts import Pace, Rollouts
from seedx.grpo_config import GrpoConfig, TextLearnerConfig
from seedx.learner.text_learner import TextLearner, shapes_of
from seedx.learner.token_logprobs import Model
from seedx.learner.trainable import Trainable
from seedx.llm_config import LlmConfig
from seedx.llm_parts import make_scheduler
from seedx.llm_setup import Setup, layout_of
from seedx.metrics import Metrics
from seedx.replay.fifo import Fifo
from seedx.reward_config import RewardConfig
from seedx.threads import Crew, spare_the_collector
from seedx.weights import Weights

GROUPS, GROUP_SIZE, NEW_TOKENS = 8, 8, 64
TOKENS = GROUPS * GROUP_SIZE * NEW_TOKENS
LEARNER = TextLearnerConfig(batch_size=GROUPS, microbatches=1, learning_rate=1e-5)


class Letters:
    """A tokenizer whose tokens are letters, and none of which ends a text: all completions are equally long."""

    vocab_size, bos_id, pad_id = TINY.vocab_size, None, 0
    eos_ids: tuple[int, ...] = ()

    def encode(self, text: str, add_bos: bool = True, parse_special: bool = False) -> list[int]:  # noqa: ARG002
        return [ord(letter) - 48 for letter in text]

    def literal(self, text: str) -> str:
        return text

    def token_bytes(self, token: int) -> bytes:
        return bytes([token + 48])

    def decode(self, tokens: Iterable[int]) -> str:
        return "".join(chr(token + 48) for token in tokens)


class Run:
    """All parts of a run on the tiny model, but for checkpoints and reports.

    Args:
        task: An import path of a task.
        max_staleness: As the flag.
        devices: That rows are spread over.
        reward: Of the workers.
    """

    def __init__(self, task: str, max_staleness: int, devices: int, reward: RewardConfig | None = None) -> None:
        compilation_cache.use()
        # Reward workers make the task too.
        os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
        made = load_task(task)
        config = LlmConfig(task=task, max_staleness=max_staleness, learner=LEARNER)
        mesh = sharding.serve_mesh(data=devices)
        launching = threading.Lock() if devices > 1 else contextlib.nullcontext()
        tokenizer = Letters()
        self.setup = Setup(made, "tiny", TINY, tokenizer, None, mesh, PROMPT_TOKENS, NEW_TOKENS, launching)
        params = jax.device_put(tiny_params(), layout_of(TINY, mesh))
        self.crew, self.metrics = Crew(), Metrics()
        self.learner = make_learner(self.setup, params, self._publish, self.metrics)
        self.scheduler = make_scheduler(config, self.setup, Weights(0, params), self.crew)
        self._pool = RewardPool(task, reward or RewardConfig(), self.metrics, self.crew)
        settings = Settings(GROUP_SIZE, NEW_TOKENS)
        generation = Generation(self.scheduler, made, tokenizer, self._pool, settings, self.metrics, self.crew)
        self._rollouts = Rollouts(
            generation,
            self.scheduler,
            PromptSource(made.prompts("train"), 0),
            self.setup.encode,
            pace=Pace(GROUPS, max_staleness),
            config=config.grpo,
            seed=0,
            position=0,
            updates=0,
            rewards=(),
            window=512,
            told=lambda *_: None,
            metrics=self.metrics,
            crew=self.crew,
        )
        self._groups = GroupQueue(Fifo(2 * GROUPS, 2**30), 0, self.metrics)
        spare_the_collector()
        self.scheduler.start()
        generation.start()
        self._rollouts.start(self._groups)

    def update(self) -> None:
        """One update, as soon as there is a batch."""
        items = self._groups.take(GROUPS, 600.0)
        self.learner.step(items)
        self._rollouts.advance(self.learner.state.updates)

    def close(self) -> None:
        """Ends the threads and the workers."""
        self.crew.join(10.0)
        self._pool.close()

    def _publish(self, version: int, params: object) -> None:
        self.scheduler.publish(version, params)


def make_learner(setup: Setup, params: object, publish: Callable[[int, object], None], metrics: Metrics) -> TextLearner:
    """A learner of the tiny model, compiled."""
    model, settings = Model(TINY), GrpoConfig(group_size=GROUP_SIZE)
    shapes = shapes_of(LEARNER, GROUP_SIZE, PROMPT_TOKENS, NEW_TOKENS, sharding.row_groups(setup.mesh))
    loss = partial(grpo_loss, model, settings)
    directory = Path(tempfile.gettempdir())
    trainable = Trainable(TINY, setup.mesh)
    learner = TextLearner(
        model, loss, trainable, settings, LEARNER, setup.mesh, params, shapes, publish, metrics, directory
    )
    learner.state = learner.begin(params)
    learner.compile()
    return learner

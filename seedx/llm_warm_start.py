"""The warm start of a run: supervised learning of the answers of its first prompts."""

from __future__ import annotations

import time
from collections.abc import Callable

from seedx.checks import require
from seedx.envs.text.prompts import PromptSource
from seedx.learner.token_logprobs import Model
from seedx.learner.warm_start import Pair, warm_start
from seedx.llm_config import LlmConfig
from seedx.llm_setup import Setup
from seedx.types import Tree

_SAY_EVERY_S = 2.0


def warm_started(
    config: LlmConfig,
    setup: Setup,
    source: PromptSource,
    model: Model,
    params: Tree,
    interrupted: Callable[[], bool],
    say: Callable[[str], None],
) -> Tree:
    """Parameters after the warm start.

    Args:
        config: Of the run.
        setup: Of the run.
        source: Of the prompts, which are taken from the first on.
        model: Of the parameters.
        params: To begin with.
        interrupted: Whether the process is to end.
        say: Told how it goes.

    Raises:
        ConfigError: the task gives no answers, or they are not learned.
        SystemExit: it was interrupted.
    """
    wanted, started = config.warm_start, time.monotonic()
    taken, shown = 0, started

    def pairs(_: int) -> list[Pair]:
        """The next prompts that are not too long, with their answers."""
        nonlocal taken
        found: list[Pair] = []
        unfit = 0  # in a row
        while len(found) < wanted.batch_size:
            prompt = source.at(taken).prompt
            taken += 1
            unfit += 1
            require(unfit <= 2 * source.num_prompts, f"task {config.task} has no prompts that fit.")
            require(prompt.answer != "", f"task {config.task} gives no answers to warm start with.")
            tokens, answer = setup.encode(prompt), setup.tokenizer.encode(prompt.answer, add_bos=False)
            if tokens is not None and len(answer) < setup.max_tokens:
                found.append((tokens, (*answer, *setup.tokenizer.eos_ids[:1])))
                unfit = 0
        return found

    def progress(updates: int, solved: float) -> None:
        nonlocal shown
        if interrupted():
            raise SystemExit(1)
        if time.monotonic() - shown > _SAY_EVERY_S:
            shown = time.monotonic()
            say(f"warm start: {updates:,} updates, {solved:.1%} right")

    say(f"warm start: supervised on the task's answers until {wanted.reward:.0%} are right")
    params = warm_start(model, wanted, params, pairs, mesh=setup.mesh, row_tokens=setup.length, progress=progress)
    say(f"warm start: done after {time.monotonic() - started:.1f} s and {taken:,} prompts")
    return params

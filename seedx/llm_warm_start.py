"""The warm start of a run: supervised learning of the answers of its first prompts."""

from __future__ import annotations

import time
from collections.abc import Callable

from seedx.checks import require
from seedx.envs.text.blame import blame
from seedx.envs.text.prompts import PromptSource
from seedx.envs.text.task import MultiTurnTask, Prompt
from seedx.learner.token_logprobs import Model
from seedx.learner.warm_start import Shown, warm_start
from seedx.llm_config import LlmConfig
from seedx.llm_setup import Setup
from seedx.types import Tree

_SAY_EVERY_S = 2.0
_LONG_S = 10.0  # without an end in sight
_ROOMY = 2  # times the tokens that the longest answer takes


def warm_started(
    config: LlmConfig,
    setup: Setup,
    source: PromptSource,
    model: Model,
    params: Tree,
    check: Callable[[], None],
    say: Callable[[str], None],
) -> Tree:
    """Parameters after the warm start.

    Args:
        config: Of the run.
        setup: Of the run.
        source: Of the prompts, which are taken from the first on.
        model: Of the parameters.
        params: To begin with.
        check: Called after each update; raises what ends it.
        say: Told how it goes.

    Raises:
        ConfigError: the task gives no answers, or they are not learned.
        What `check` raises.
    """
    wanted, started = config.warm_start, time.monotonic()
    taken, said_at, longest, is_advised = 0, started, 0, False

    def shown(_: int) -> list[Shown]:
        """The next prompts that fit, with their answers."""
        nonlocal taken, longest
        found: list[Shown] = []
        unfit = 0  # in a row
        while len(found) < wanted.batch_size:
            text = demonstration(config.task, setup, source.at(taken).prompt)
            taken += 1
            if text is None:
                unfit += 1
                require(unfit <= 2 * source.num_prompts, f"task {config.task} has no prompts and answers that fit.")
            else:
                found.append(text)
                longest = max(longest, len(text[1]) - text[1].index(True))
                unfit = 0
        return found

    def progress(updates: int, solved: float) -> None:
        nonlocal said_at, is_advised
        check()
        now = time.monotonic()
        if now - said_at > _SAY_EVERY_S:
            said_at = now
            each_s = (now - started) / (updates + 1)
            say(f"warm start: {updates:,} updates, {solved:.1%} right, {each_s:.2g} s each")
        if not is_advised and now - started > _LONG_S and setup.max_tokens >= _ROOMY * longest:
            is_advised = True
            say(
                f"warm start: an update computes {wanted.batch_size} rows of {setup.length} tokens, {setup.max_tokens} "
                f"of them for the completion (--rollout.max-tokens), and the longest answer so far has {longest}. Give "
                "what suffices, and all is faster, the run too."
            )

    say(f"warm start: supervised on the task's answers until {wanted.reward:.0%} are right")
    params = warm_start(
        model,
        wanted,
        params,
        shown,
        mesh=setup.mesh,
        row_tokens=setup.length,
        zero=config.learner.zero,
        progress=progress,
    )
    say(f"warm start: done after {time.monotonic() - started:.1f} s and {taken:,} prompts")
    return params


def demonstration(name: str, setup: Setup, prompt: Prompt) -> Shown | None:
    """A prompt with a right completion, all turns of it; None if it is too long.

    Args:
        name: Of the task, for messages.
        setup: Of the run.
        prompt: Of the task.

    Raises:
        ConfigError: the task does not say what is right, or fails at it.
    """
    task, tokenizer = setup.task, setup.tokenizer
    demonstrate = getattr(task, "demonstrate", None)
    with blame(f"task {name}: demonstrate(prompt)"):
        turns = list(demonstrate(prompt)) if demonstrate is not None else [prompt.answer]
    require(any(turns), "the task gives no answers to warm start with; leave --warm-start.reward at 0.")
    start = setup.encode(prompt)
    if start is None:
        return None
    tokens, own = list(start), [False] * len(start)
    for i, turn in enumerate(turns):
        said = [*tokenizer.encode(turn, add_bos=False), *tokenizer.eos_ids[:1]]
        tokens, own = tokens + said, own + [True] * len(said)
        with blame(f"task {name}: reply(prompt, turns)"):
            reply = task.reply(prompt, turns[: i + 1]) if isinstance(task, MultiTurnTask) else None
        replied = tokenizer.encode(reply, add_bos=False) if reply is not None else []
        tokens, own = tokens + replied, own + [False] * len(replied)
    return (tokens, own) if len(tokens) - len(start) <= setup.max_tokens else None

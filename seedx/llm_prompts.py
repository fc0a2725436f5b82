"""The prompts of an LLM run: what its task gives, and how long those are that the model has room for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from seedx.checks import require
from seedx.envs.text.blame import blame
from seedx.envs.text.task import Prompt, Split, Task

_MEASURED = 2000  # prompts that the length of the longest one is taken over
_TOLD = 5  # places of prompts


def prompts_of(task: Task, name: str, split: Split) -> Sequence[Any]:
    """Those of a split, as the task gives them.

    Raises:
        ConfigError: the task fails, or returns no sequence.
    """
    with blame(f"task {name}: prompts({split!r})"):
        prompts = task.prompts(split)
    require(
        hasattr(prompts, "__len__") and hasattr(prompts, "__getitem__"),
        f"task {name}: prompts({split!r}) returned {type(prompts).__name__}; it must return a list or the like.",
    )
    return prompts


def first_prompts(prompts: Sequence[Any], name: str, split: Split, count: int) -> list[Prompt]:
    """At most the first `count`.

    Raises:
        ConfigError: the task fails at making one, or one is no Prompt with a text or messages.
    """
    with blame(f"task {name}: a prompt of prompts({split!r})"):
        found = [prompts[i] for i in range(min(count, len(prompts)))]
    for i, prompt in enumerate(found):
        require(
            isinstance(prompt, Prompt) and isinstance(prompt.text, str) and isinstance(prompt.answer, str),
            f"task {name}: prompts({split!r})[{i}] is {repr(prompt)[:100]}; it must be a seedx.envs.text.task.Prompt "
            "whose text and answer are of type str.",
        )
    return found


def prompt_tokens(
    task: Task, name: str, encode: Callable[[Prompt], Sequence[int]], given: int, room: int, say: Callable[[str], None]
) -> int:
    """How long a prompt may be in a run; what is longer is passed over, and that is said.

    Args:
        task: Of the run.
        name: The task's.
        encode: A prompt as the model reads it.
        given: `--rollout.max-prompt-tokens`; 0: the longest of the first prompts that there is room for.
        room: Tokens that the model has beside a completion.
        say: Told how many are longer.

    Raises:
        ConfigError: there are no prompts, the task fails at making them, or all are longer.
    """
    prompts = prompts_of(task, name, "train")
    require(len(prompts) > 0, f"task {name} has no prompts (0) to train on; it must have at least one.")
    lengths = [len(encode(prompt)) for prompt in first_prompts(prompts, name, "train", _MEASURED)]
    most = given or room
    longer = [i for i, length in enumerate(lengths) if length > most]
    fitting = [length for length in lengths if length <= most]
    why = (
        f"--rollout.max-prompt-tokens ({given}); raise it"
        if given
        else f"the {room} tokens that the model has room for beside a completion; lower --rollout.max-tokens"
    )
    of = f"{len(prompts):,}" if len(prompts) <= _MEASURED else f"the first {_MEASURED:,}"
    require(
        bool(fitting) or (given > 0 and len(prompts) > _MEASURED),
        f"all {of} prompts are longer than {why}. The shortest has {min(lengths)} tokens.",
    )
    if longer:
        say(
            f"warning: {len(longer):,} of {of} prompts are passed over ({_places(task, longer)}): they have up to "
            f"{max(lengths)} tokens, more than {why}."
        )
    return given or max(fitting)


def _places(task: Task, indices: Sequence[int]) -> str:
    """Where the first of some prompts to train on stand, in the file that they come from if they do."""
    lines = getattr(task, "prompt_lines", None)
    what, numbers = ("line", [lines["train"][i] for i in indices]) if lines else ("number", [i + 1 for i in indices])
    several = "s" if len(numbers) > 1 else ""
    more = ", ..." if len(numbers) > _TOLD else ""
    return f"{what}{several} {', '.join(map(str, numbers[:_TOLD]))}{more}"

"""What of an LLM run goes into a checkpoint, and comes back at a resume."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

from seedx.checkpoint import Checkpointer
from seedx.checks import require
from seedx.learner.text_learner import TextState
from seedx.learner.trainable import Trainable
from seedx.llm_config import LlmConfig


class Progress(NamedTuple):
    """What is known of a run beside its arrays.

    Attributes:
        seconds: Wall time, earlier sessions included.
        rewards: The newest completions'.
        scores_before: On each held-out prompt before the first update, NaN where there is none; empty: not measured.
        curriculum: Success rates of prompts (`Curriculum.saved`); None: there are none.
    """

    seconds: float
    rewards: Sequence[float]
    scores_before: Sequence[float] = ()
    curriculum: dict[str, Any] | None = None


def save_llm_run(
    checkpointer: Checkpointer,
    config: LlmConfig,
    trainable: Trainable,
    state: TextState,
    progress: Progress,
    block: bool,
) -> None:
    """Writes a checkpoint; with `block` it is finished on return."""
    metadata = {
        "config": dataclasses.asdict(config),
        "updates": state.updates,
        "env_steps": state.env_steps,
        "tokens": state.tokens,
        "position": state.position,
        **progress._asdict(),
    }
    checkpointer.save(state.updates, state.params, _other_arrays(trainable, state), metadata, block=block)


def resume_llm_run(
    checkpointer: Checkpointer, config: LlmConfig, trainable: Trainable, fresh: TextState
) -> tuple[TextState, Progress]:
    """The newest good checkpoint.

    Raises:
        CheckpointError: there is no good one, or it is of another network or optimizer.
        ConfigError: it is of another task, or its adapters are scaled otherwise.
    """
    found = checkpointer.restore(fresh.params, _other_arrays(trainable, fresh))
    metadata: dict[str, Any] = found.metadata
    task = metadata["config"].get("task", config.task)
    require(
        task == config.task,
        f"--task {config.task} cannot go on with a run of {task}, whose prompts and scores are others; leave --task "
        "out, or start in another --run-dir.",
    )
    then = metadata["config"].get("lora", {"alpha": trainable.lora.alpha})["alpha"]
    require(
        then == trainable.lora.alpha,
        f"--lora.alpha ({trainable.lora.alpha:g}) was {then:g} when the adapters were trained, and must stay so.",
    )
    print(f"resumed at update {found.update:,} ({metadata['env_steps']:,} completions).", flush=True)
    state = TextState(
        found.params,
        *trainable.restored(found.params, found.state),
        found.state["opt_state"],
        found.update,
        *(int(metadata[name]) for name in ("env_steps", "tokens", "position")),
    )
    return state, Progress(**{name: metadata[name] for name in Progress._fields if name in metadata})


def _other_arrays(trainable: Trainable, state: TextState) -> dict[str, Any]:
    """What a checkpoint holds beside the parameters."""
    return {"opt_state": state.opt_state, **trainable.stored(state.trained, state.frozen)}

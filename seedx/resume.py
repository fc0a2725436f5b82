"""What of a run goes into a checkpoint, and comes back at a resume."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from seedx import sharding, specs
from seedx.checkpoint import Checkpointer
from seedx.checks import ConfigError
from seedx.config import Config
from seedx.hosts import Hosts
from seedx.learner.learner import LearnerState
from seedx.types import EnvSpec


class Resumed(NamedTuple):
    """What a run goes on from."""

    state: LearnerState
    seconds: float  # wall time of earlier sessions
    episodes: dict[str, Any] | None  # of `EpisodeStats`; None: the run begins


def save_run(
    checkpointer: Checkpointer,
    config: Config,
    spec: EnvSpec,
    state: LearnerState,
    seconds: float,
    episodes: dict[str, Any],
    block: bool,
) -> None:
    """Writes a checkpoint; with `block` it is finished on return.

    Args:
        checkpointer: Of the run directory.
        config: Of the run.
        spec: Of its environments.
        state: After the update that names the checkpoint.
        seconds: Wall time of the run, earlier sessions included.
        episodes: State of the training episodes' statistics.
        block: Whether to wait.
    """
    metadata = {
        "spec": specs.to_json(spec),
        "config": dataclasses.asdict(config),
        "updates": state.updates,
        "env_steps": state.env_steps,
        "seconds": seconds,
        "episodes": episodes,
    }
    checkpointer.save(state.updates, state.params, _other_arrays(state), metadata, block=block)


def resume_run(checkpointer: Checkpointer, run_dir: Path, spec: EnvSpec, fresh: LearnerState) -> Resumed:
    """The newest good checkpoint, or the fresh state where the run was stopped before its first one.

    Raises:
        ConfigError: it is of another environment.
        CheckpointError: there is no good one, or it is of another network or optimizer.
    """
    if not checkpointer.any():
        print(f"{run_dir} holds no checkpoint yet; starting from the beginning.", flush=True)
        return Resumed(fresh, seconds=0.0, episodes=None)
    found = checkpointer.restore(fresh.params, _other_arrays(fresh))
    if changed := specs.differences(specs.from_json(found.metadata["spec"]), spec):
        raise ConfigError(f"the environment differs from the checkpoint's: {'; '.join(changed)}.")
    print(f"resumed at update {found.update:,} ({found.metadata['env_steps']:,} steps).", flush=True)
    state = fresh._replace(
        params=found.params,
        target_params=found.state.get("target_params"),
        opt_state=found.state["opt_state"],
        updates=found.update,
        env_steps=int(found.metadata["env_steps"]),
    )
    return Resumed(state, float(found.metadata["seconds"]), found.metadata["episodes"])


def resume_together(
    checkpointer: Checkpointer, run_dir: Path, spec: EnvSpec, fresh: LearnerState, mesh: Mesh, hosts: Hosts
) -> Resumed:
    """`resume_run` on several hosts together: the first one reads its run directory and tells the others."""
    resumed = Resumed(fresh, seconds=0.0, episodes=None)
    if hosts.index == 0:
        resumed = resume_run(checkpointer, run_dir, spec, in_host_memory(fresh))
    state = resumed.state
    counts = np.array([state.updates, state.env_steps], np.int64).view(np.int32)  # jax has no int64 here
    arrays = state.params, state.target_params, state.opt_state, counts
    params, target_params, opt_state, counts = sharding.from_first_host(arrays, mesh)
    updates, env_steps = np.asarray(counts).view(np.int64).tolist()
    return resumed._replace(state=LearnerState(params, target_params, opt_state, updates, env_steps))


def in_host_memory(state: LearnerState) -> LearnerState:
    """The state as NumPy arrays, without a copy on a CPU: Orbax takes no arrays of one host among several."""
    arrays = state.params, state.target_params, state.opt_state
    params, target_params, opt_state = jax.tree.map(np.asarray, arrays)
    return state._replace(params=params, target_params=target_params, opt_state=opt_state)


def _other_arrays(state: LearnerState) -> dict[str, Any]:
    """What a checkpoint holds beside the parameters."""
    target = {} if state.target_params is None else {"target_params": state.target_params}
    return {"opt_state": state.opt_state, **target}

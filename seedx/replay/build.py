"""Makes the replay that a config names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from seedx.config import Config, ConfigError
from seedx.replay.description import TABLE
from seedx.replay.rate_limiter import limits_for
from seedx.replay.replay import Replay
from seedx.types import Tree


def snapshot_of(
    config: Config, replay: Replay, run_dir: Path, example: Tree, resume: bool
) -> Callable[[], object] | None:
    """What takes a snapshot of a replay, None for one that has none (a queue's items are gone in a moment).

    On a resume the table is restored first; a Reverb server restores its own.

    Args:
        config: Of the run.
        replay: The table.
        run_dir: Snapshots of an embedded one are in its directory "replay".
        example: An item like those in the table, leaves `[1, ...]`.
        resume: Whether there may be a snapshot to go on from.
    """
    from seedx.replay.table import Table

    if isinstance(replay, Table) and config.checkpoint.replay_max_bytes:
        from seedx.replay.snapshot import Snapshots

        snapshots = Snapshots(run_dir / "replay", config.checkpoint.replay_max_bytes, replay, example)
        if resume:
            print(f"{snapshots.load():,} unrolls are back in the replay.", flush=True)
        return snapshots.save
    if config.replay.startswith("reverb://"):
        return replay.checkpoint  # type: ignore[attr-defined]
    return None


def make_replay(config: Config, example: Tree) -> Replay:
    """The table between acting and learning.

    Args:
        config: Of the run; `config.replay` is "embedded" or "reverb://host:port".
        example: An item like those in the table, leaves `[1, ...]`.

    Raises:
        ConfigError: a batch does not fit, or no Reverb server with such a table was there in time.
    """
    table, batch_size = config.table, config.learner.batch_size
    limits = limits_for(table, batch_size)
    if config.replay.startswith("reverb://"):
        from seedx.replay.reverb_client import ReverbLostError
        from seedx.replay.reverb_replay import ReverbReplay

        print(f"waiting for Reverb at {config.replay.removeprefix('reverb://')}", flush=True)
        overlap = config.learner.rows - config.learner.stride
        try:
            return ReverbReplay(config.replay, TABLE, overlap=overlap, example=example, give_up_s=table.give_up_s)
        except (ReverbLostError, ValueError) as error:  # not there, no address, no such table
            raise ConfigError(f"--replay {config.replay}: {error}") from error
    if table.is_queue:
        from seedx.replay.fifo import Fifo

        return Fifo(table.max_size or 2 * batch_size, table.max_bytes)
    from seedx.replay.table import Table

    replay = Table(table, limits, config.seed)
    megabytes = replay.size_estimate(example) / 1e6
    print(
        f"replay: {table.max_size:,} unrolls of {config.learner.rows} rows, {megabytes:,.1f} MB when full.", flush=True
    )
    return replay

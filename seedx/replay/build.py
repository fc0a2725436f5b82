"""Makes the replay that a config names."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

from seedx.checks import ConfigError
from seedx.config import Config
from seedx.llm_config import LlmConfig
from seedx.replay.description import TABLE, table_description
from seedx.replay.rate_limiter import limits_for
from seedx.replay.replay import Replay
from seedx.reverb_address import SCHEME
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
    if config.replay.startswith(SCHEME):
        return replay.try_checkpoint  # type: ignore[attr-defined]
    return None


def make_replay(
    config: Config | LlmConfig, example: Tree, resume: bool = False, seconds_left: float = math.inf
) -> Replay:
    """The table between acting and learning.

    Args:
        config: Of the run; `config.replay` is "embedded" or "reverb://host:port".
        example: An item like those in the table, leaves `[1, ...]`.
        resume: Whether items that a Reverb server holds already may well be this run's own.
        seconds_left: Until the run ends; a Reverb server is not waited for longer than that.

    Raises:
        ConfigError: a batch does not fit, the table does not fit into memory, no Reverb server with such a table was
            there in time, or it holds other items.
    """
    table, batch_size = config.table, config.learner.batch_size
    limits = limits_for(table, batch_size)
    if config.replay.startswith(SCHEME):
        try:
            from seedx.replay.reverb_client import ReverbLostError
            from seedx.replay.reverb_replay import ReverbReplay
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"--replay {config.replay} needs {error.name}: pip install -e '.[reverb]' -c constraints.txt"
            ) from error
        connect_s = min(table.give_up_s, max(seconds_left, 0.0))
        why = "--table.give-up-s" if connect_s == table.give_up_s else "then --seconds are over"
        where = config.replay.removeprefix(SCHEME)
        print(f"waiting for Reverb at {where}, for {connect_s:.0f} s at most ({why})", flush=True)
        try:
            replay = ReverbReplay(
                config.replay,
                TABLE,
                overlap=config.overlap,
                max_sources=2 * config.num_slots,  # those of actors that were replaced are forgotten first
                example=example,
                give_up_s=table.give_up_s,
                connect_s=connect_s,
            )
        except (ReverbLostError, ValueError) as error:  # not there, no address, no such table
            raise ConfigError(f"--replay {config.replay}: {error}") from error
        for difference in replay.differences(table_description(table, batch_size)):
            print(f"{difference}; a server's settings count, and those of its checkpoint before these.", flush=True)
        for address, count in replay.held.items():
            if count:
                whose = "from before it was resumed" if resume else "that others inserted, and trains on them too"
                if isinstance(config, LlmConfig):
                    whose = "that are not its own, and passes over them"
                print(f"table {TABLE!r} at {address}: this run begins with {count:,} items {whose}.", flush=True)
        return replay
    if table.is_queue:
        from seedx.replay.fifo import Fifo

        return Fifo(table.max_size or 2 * batch_size, table.max_bytes)
    assert isinstance(config, Config)  # LLM runs have queues
    from seedx.replay.capacity import check_needs, needs_of
    from seedx.replay.table import Table

    needs = needs_of(example, table, config.overlap, max_sources=config.num_slots)
    check_needs(needs, table)
    replay = Table(table, limits, config.seed, config.overlap, max_sources=config.num_slots)
    print(
        f"replay: {table.max_size:,} unrolls of {config.unroll_rows} rows, {config.overlap} of them those of the "
        f"unroll before; {needs.total_bytes / 1e6:,.1f} MB when full.",
        flush=True,
    )
    return replay

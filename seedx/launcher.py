"""What launchers do on one machine: prepare the run directory and run the roles there to their end."""

from __future__ import annotations

import argparse
import dataclasses
import sys
import tempfile
from pathlib import Path

from seedx import cli, rundir, supervisor
from seedx.bucket import BucketError
from seedx.checks import ConfigError, require
from seedx.config_file import AnyConfig, differing_flags, from_json
from seedx.hosts import ONE_HOST, Hosts
from seedx.llm_config import LlmConfig
from seedx.program import OPEN_REVERB, make_program

_MAX_SOCKET_PATH = 100  # The kernel allows 107 bytes.


def own_flags() -> argparse.ArgumentParser:
    """A parser of the flags that are no settings of the run, since hosts differ in them."""
    own = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    own.add_argument("--address", help="host:port where actors of other machines reach the learner")
    own.add_argument("--start-actors", "--start_actors", type=int, help="how many of --num-actors are started here")
    return own


def launch(
    config: AnyConfig,
    name: str,
    hosts: Hosts = ONE_HOST,
    address: str | None = None,
    start_actors: int | None = None,
) -> int:
    """Runs a run, or this host's part of it; the exit code.

    Args:
        config: Of the run.
        name: Of the launcher, in messages.
        hosts: Whose learners learn together.
        address: Where the learner serves actors; None: where only those that are started here find it.
        start_actors: How many of the training actors are started here; None: all.

    Raises:
        ConfigError: it cannot be started.
    """
    server = None
    if isinstance(config, LlmConfig):
        require(address is None and start_actors is None, "--address and --start-actors: an LLM run has no actors.")
    elif address is not None:
        from seedx.security import check_listen_address  # Loads gRPC.

        check_listen_address(address, config.inference)
        host, _, port = address.rpartition(":")
        server = f"localhost:{port}" if host in ("0.0.0.0", "[::]") else None
    former_file = Path(config.run_dir or "") / "config.json"
    former = former_file.read_text() if config.resume and former_file.is_file() else None
    config = cli.prepare_run_dir(config)
    assert config.run_dir is not None
    config_file = Path(config.run_dir) / "config.json"
    before = rundir.newest_update(config.run_dir)
    with _socket_directory() as directory:
        where = address or f"unix:{directory}/learner.sock"
        program = make_program(config, config.run_dir, where, server=server, hosts=hosts, start_actors=start_actors)
        if config.replay == "reverb":
            print(f"{name}: {OPEN_REVERB}", file=sys.stderr)
        code = supervisor.supervise(program)
    began = former is not None or rundir.finished_checkpoints(Path(config.run_dir) / "checkpoints")
    if config.resume and code == supervisor.USER_ERROR and not began:
        config_file.unlink(missing_ok=True)  # Else the line that mends what was refused would go by it.
    if former is not None and hosts.alone and rundir.newest_update(config.run_dir) == before:
        rundir.write_config(config.run_dir, former)  # Nothing was learned with the new one, which may not even fit.
        goal = "stop_at_reward" if isinstance(config, LlmConfig) else "stop_at_return"
        lasts = {name: getattr(config, name) for name in ("steps", "seconds", goal)}  # refuses nothing
        as_before = dataclasses.replace(from_json(former), resume=True, run_dir=config.run_dir, **lasts)
        if code == supervisor.USER_ERROR and (changed := differing_flags(as_before, config)):
            print(f"{name}: this run was resumed with {', '.join(changed)}.", file=sys.stderr)
    return code


def _socket_directory() -> tempfile.TemporaryDirectory:
    """A directory that only this user can enter, with a path short enough for a socket."""
    short = len(tempfile.gettempdir()) + len("/seedx-12345678/learner.sock") <= _MAX_SOCKET_PATH
    return tempfile.TemporaryDirectory(prefix="seedx-", dir=None if short else "/tmp", ignore_cleanup_errors=True)


def report(name: str, error: ConfigError | BucketError) -> int:
    """Says what a launcher could not do; its exit code."""
    print(f"{name}: {error}", file=sys.stderr)
    return supervisor.USER_ERROR if isinstance(error, ConfigError) else 1

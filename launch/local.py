"""Runs everything on this machine: a learner with its policy server, and actor processes that step environments.

    python launch/local.py --agent impala
    python launch/local.py --agent impala --env Pong-v5 --num-actors 4 --envs-per-actor 16
    python launch/local.py --agent grpo
    python launch/local.py --resume --run-dir RUN_DIR

The run directory gets config.json, metrics.jsonl, summary.json, checkpoints/, curve.png and logs/<role>.log. Exit
codes: 0 done, 2 wrong flags, 130 after Ctrl-C and 143 after SIGTERM or SIGHUP (with a checkpoint), else failure.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import tempfile
from pathlib import Path

# As `python -m` does, so that `--env my_env:make` finds the user's module; the roles are run with -m in this directory.
sys.path.insert(0, os.getcwd())

_MAX_SOCKET_PATH = 100  # The kernel allows 107 bytes.


def main(argv: list[str]) -> int:
    """Parses the flags, runs the program, and returns the exit code."""
    from seedx import cli, rundir
    from seedx.checks import ConfigError
    from seedx.config_file import differing_flags, from_json
    from seedx.llm_config import LlmConfig
    from seedx.program import OPEN_REVERB, make_program
    from seedx.supervisor import USER_ERROR, supervise

    try:
        config = cli.parse(argv, description=__doc__ or "")
        config_file = Path(config.run_dir or "") / "config.json"
        former = config_file.read_text() if config.resume and config_file.is_file() else None
        config = cli.prepare_run_dir(config)
    except ConfigError as error:
        print(f"local.py: {error}", file=sys.stderr)
        return USER_ERROR
    assert config.run_dir is not None
    before = rundir.newest_update(config.run_dir)
    with _socket_directory() as directory:
        try:
            program = make_program(config, config.run_dir, f"unix:{directory}/learner.sock")
        except ConfigError as error:
            print(f"local.py: {error}", file=sys.stderr)
            return USER_ERROR
        if config.replay == "reverb":
            print(f"local.py: {OPEN_REVERB}", file=sys.stderr)
        code = supervise(program)
    if former is not None and rundir.newest_update(config.run_dir) == before:
        rundir.write_config(config.run_dir, former)  # Nothing was learned with the new one, which may not even fit.
        goal = "stop_at_reward" if isinstance(config, LlmConfig) else "stop_at_return"
        lasts = {name: getattr(config, name) for name in ("steps", "seconds", goal)}  # refuses nothing
        as_before = dataclasses.replace(from_json(former), resume=True, run_dir=config.run_dir, **lasts)
        if code == USER_ERROR and (changed := differing_flags(as_before, config)):
            print(f"local.py: this run was resumed with {', '.join(changed)}.", file=sys.stderr)
    return code


def _socket_directory() -> tempfile.TemporaryDirectory:
    """A directory that only this user can enter, with a path short enough for a socket."""
    short = len(tempfile.gettempdir()) + len("/seedx-12345678/learner.sock") <= _MAX_SOCKET_PATH
    return tempfile.TemporaryDirectory(prefix="seedx-", dir=None if short else "/tmp", ignore_cleanup_errors=True)


if __name__ == "__main__":
    from seedx.signals import on_stop

    on_stop(lambda number: sys.exit(128 + number))
    sys.exit(main(sys.argv[1:]))

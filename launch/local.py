"""Runs everything on this machine: a learner with its policy server, and actor processes that step environments.

    python launch/local.py --agent impala
    python launch/local.py --agent impala --env Pong-v5 --num-actors 4 --envs-per-actor 16
    python launch/local.py --resume --run-dir RUN_DIR

The run directory gets config.json, metrics.jsonl, summary.json, checkpoints/, curve.png and logs/<role>.log. Exit
codes: 0 done, 2 wrong flags, 130 after Ctrl-C and 143 after SIGTERM (both with a checkpoint), else failure.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile

# As `python -m` does, so that `--env my_env:make` finds the user's module; the roles are run with -m in this directory.
sys.path.insert(0, os.getcwd())

_MAX_SOCKET_PATH = 100  # The kernel allows 107 bytes.


def main(argv: list[str]) -> int:
    """Parses the flags, runs the program, and returns the exit code."""
    from seedx import cli
    from seedx.config import ConfigError
    from seedx.program import make_program
    from seedx.supervisor import supervise

    try:
        config = cli.prepare_run_dir(cli.parse(argv, description=__doc__ or ""))
    except ConfigError as error:
        print(f"local.py: {error}", file=sys.stderr)
        return 2
    assert config.run_dir is not None
    with _socket_directory() as directory:
        return supervise(make_program(config, config.run_dir, f"unix:{directory}/learner.sock"))


def _socket_directory() -> tempfile.TemporaryDirectory:
    """A directory that only this user can enter, with a path short enough for a socket."""
    short = len(tempfile.gettempdir()) + len("/seedx-12345678/learner.sock") <= _MAX_SOCKET_PATH
    return tempfile.TemporaryDirectory(prefix="seedx-", dir=None if short else "/tmp", ignore_cleanup_errors=True)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)

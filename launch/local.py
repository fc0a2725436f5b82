"""Runs everything on this machine: a learner with its policy server, and actor processes that step environments.

    python launch/local.py --agent impala
    python launch/local.py --agent impala --env Pong-v5 --num-actors 4 --envs-per-actor 16
    python launch/local.py --agent grpo
    python launch/local.py --resume --run-dir RUN_DIR

With `--address 0.0.0.0:7778` actors on other machines reach the learner; `--start-actors K` starts only K of
`--num-actors` here. The run directory gets config.json, metrics.jsonl, summary.json, checkpoints/, curve.png and
logs/<role>.log; with `--run-dir gs://BUCKET/RUN` all of it is sent to a bucket. Exit codes: 0 done, 2 wrong flags, 130
after Ctrl-C and 143 after SIGTERM or SIGHUP (with a checkpoint), else failure.
"""

from __future__ import annotations

import os
import sys

# As `python -m` does, so that `--env my_env:make` finds the user's module; the roles are run with -m in this directory.
sys.path.insert(0, os.getcwd())


def main(argv: list[str]) -> int:
    """Parses the flags, runs the program, and returns the exit code."""
    from seedx import bucket, cli, launcher
    from seedx.checks import ConfigError

    flags, given = launcher.own_flags().parse_known_args(argv)
    try:
        with bucket.kept(given) as rest:
            config = cli.parse(rest, description=__doc__ or "")
            return launcher.launch(config, "local.py", address=flags.address, start_actors=flags.start_actors)
    except (ConfigError, bucket.BucketError) as error:
        return launcher.report("local.py", error)


if __name__ == "__main__":
    from seedx.signals import on_stop

    on_stop(lambda number: sys.exit(128 + number))
    sys.exit(main(sys.argv[1:]))

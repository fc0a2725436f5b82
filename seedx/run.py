"""One role of a run in one process; the only place that puts the parts together.

    python -m seedx.run learner --run-dir DIR --listen unix:/path|host:port [--resume]
        [--replay reverb://host:port] [--coordinator host:port --num-hosts N --host-index I] [--decode-host ADDRESS]...
    python -m seedx.run decode --run-dir DIR --listen unix:/path|host:port --server unix:/path|host:port [--index I]
    python -m seedx.run actor --run-dir DIR --server unix:/path|host:port --actor-id I [--evaluation] [--session U]
        [--restart N]

Exit codes: 0 done, 2 what no restart mends, 77 another actor with this id took over, 130 after SIGINT, 143 after
SIGTERM or SIGHUP, else failure.
"""

# ruff: noqa: E402

from __future__ import annotations

import signal

signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback while modules load; the roles install their own handlers
signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # the supervisor has kept it back until here

import argparse
import contextlib
import dataclasses
import io
import logging
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from seedx.checks import ConfigError, require
from seedx.config import Config
from seedx.config_file import AnyConfig, env_config, read_config
from seedx.hosts import Hosts
from seedx.llm_config import LlmConfig
from seedx.parent import die_with_parent
from seedx.signals import on_stop
from seedx.supervisor import REPLACED, USER_ERROR

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

_LEAVE_S = 5  # for an actor to close its environments; the supervisor would kill it after 10


def main(argv: Sequence[str]) -> int:
    """Runs the role that the arguments name; the exit code."""
    die_with_parent()
    _open_closed_streams()
    arguments = _parser().parse_args(argv)
    try:
        config = read_config(arguments.run_dir)
        if arguments.role == "actor":
            return _run_actor(arguments, env_config(config))
        if arguments.role == "decode":
            return _run_decode_host(arguments, config)
        return _run_learner(arguments, config)
    except ConfigError as error:
        print(f"{arguments.role}: {error}", file=sys.stderr)
        return USER_ERROR


def _open_closed_streams() -> None:
    """Gives a process that was started without stdout or stderr (`>&-`) one that nobody reads."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115  for the life of the process


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m seedx.run", description=__doc__.splitlines()[0])
    roles = parser.add_subparsers(dest="role", required=True)
    learner = roles.add_parser("learner", help="serves the policy and learns")
    learner.add_argument("--listen", required=True, help="unix:/path or host:port")
    learner.add_argument("--replay", help="where the replay is, if not where config.json says")
    learner.add_argument("--resume", action="store_true", help="go on from the last checkpoint in the run directory")
    learner.add_argument("--coordinator", default="", help="host:port of host 0, if several hosts learn together")
    learner.add_argument("--num-hosts", type=int, default=1, help="how many these are")
    learner.add_argument("--host-index", type=int, default=0, help="which of them this is, from 0")
    learner.add_argument("--decode-host", action="append", default=[], help="its address; may be repeated")
    decode = roles.add_parser("decode", help="generates what a language model's learner asks for")
    decode.add_argument("--listen", required=True, help="unix:/path or host:port")
    decode.add_argument("--server", required=True, help="unix:/path or host:port of the learner")
    decode.add_argument("--index", type=int, default=0, help="which of the run's decode hosts this is, from 0")
    actor = roles.add_parser("actor", help="steps environments")
    actor.add_argument("--server", required=True, help="unix:/path or host:port of the learner")
    actor.add_argument("--actor-id", type=int, required=True, help="unique in the run, from 0")
    actor.add_argument("--evaluation", action="store_true", help="act greedily and stay out of training")
    actor.add_argument("--session", type=int, default=0, help="update that the run was resumed at; changes the seeds")
    actor.add_argument("--restart", type=int, default=0, help="how often this actor was restarted; changes its seeds")
    for role in (learner, decode, actor):
        role.add_argument("--run-dir", required=True, help="directory with the run's config.json")
    return parser


def _run_learner(arguments: argparse.Namespace, config: AnyConfig) -> int:
    from seedx.learner_role import run_learner, run_llm_learner

    display = io.BufferedWriter(_Display(sys.stdout.fileno(), "w", closefd=False))
    sys.stdout = io.TextIOWrapper(display, sys.stdout.encoding, sys.stdout.errors, line_buffering=True)
    # The terminal, not only the log, tells of a damaged checkpoint.
    logging.getLogger("seedx").addHandler(logging.StreamHandler(sys.stdout))
    if arguments.replay is not None:
        config = dataclasses.replace(config, replay=arguments.replay)
    hosts = Hosts(arguments.coordinator, arguments.num_hosts, arguments.host_index)
    if isinstance(config, LlmConfig):
        require(hosts.alone, "an LLM run has one host; leave --num-hosts out.")
        return run_llm_learner(
            config, Path(arguments.run_dir), arguments.resume, arguments.listen, arguments.decode_host
        )
    return run_learner(config, Path(arguments.run_dir), arguments.listen, arguments.resume, hosts)


def _run_decode_host(arguments: argparse.Namespace, config: AnyConfig) -> int:
    from seedx.decode_role import run_decode_host

    require(isinstance(config, LlmConfig), "only a language model's run has decode hosts.")
    assert isinstance(config, LlmConfig)
    return run_decode_host(config, arguments.listen, arguments.server, arguments.index)


class _Display(io.FileIO):
    """Standard output that may go away (`... | head -1`): a run must not end because nobody watches it."""

    def write(self, data: ReadableBuffer) -> int:
        try:
            return super().write(data)
        except OSError:
            return memoryview(data).nbytes


def _run_actor(arguments: argparse.Namespace, config: Config) -> int:
    from seedx.envs.actor import run_actor
    from seedx.envs.make import make_env
    from seedx.inference.client import Replaced, ServerLostError

    on_stop(_leave)
    try:
        run_actor(
            config,
            arguments.server,
            arguments.actor_id,
            lambda seeds: make_env(config, len(seeds), seeds),
            restart=arguments.restart,
            session=arguments.session,
            evaluation=arguments.evaluation,
        )
    except ServerLostError as error:
        print(f"actor {arguments.actor_id} ends: {error}", file=sys.stderr)
        return 1
    except Replaced as replaced:
        print(f"actor {arguments.actor_id} ends: {replaced}", file=sys.stderr)
        return REPLACED
    return 0


def _leave(number: int) -> None:
    """Ends whatever the main thread waits for, so that environments are closed on the way.

    An exception out of a signal's handler may come between taking a lock and the code that gives it back; a way out
    that then waits for this lock is cut short.
    """
    signal.signal(signal.SIGALRM, lambda *_: _exit(128 + number))
    signal.alarm(_LEAVE_S)
    sys.exit(128 + number)


def _exit(code: int) -> None:
    """Ends the process now: threads that wait inside native code must not hold it up."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            with contextlib.suppress(OSError):
                stream.flush()
    os._exit(code)


if __name__ == "__main__":
    try:
        code = main(sys.argv[1:])
    except KeyboardInterrupt:  # before a role has its own handlers
        code = 128 + signal.SIGINT
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
        code = 1
    _exit(code)

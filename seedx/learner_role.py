"""The learner's process, from its start to its exit code.

Threading: the main thread waits for signals, failures and the end; the session runs on threads of the crew. Before
the first update a signal ends the process at once; afterwards the learner finishes its update and checkpoints first.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from seedx import rundir
from seedx.checks import ConfigError, require
from seedx.config import Config
from seedx.hosts import Hosts
from seedx.inference.frontend import FrontEnd
from seedx.inference.remote_scheduler import DecodeHostLostError
from seedx.inference.streams import Streams
from seedx.lifeline import HostLostError
from seedx.llm_config import LlmConfig
from seedx.llm_session import LlmSession
from seedx.replay.reverb_client import ReverbLostError
from seedx.session import Session
from seedx.signals import on_stop
from seedx.threads import Crew

_POLL_S = 0.1
_STOP_GRACE_S = 8.0  # of the supervisor's 10
_TOLD = (ReverbLostError, HostLostError, DecodeHostLostError)  # say all; a traceback says no more
_SAVE_S = 600.0  # a last checkpoint that takes longer than that will never be finished


def run_learner(config: Config, run_dir: Path, address: str, resume: bool, hosts: Hosts) -> int:
    """Learns until the config says stop; the exit code."""
    require(
        hosts.alone or not config.deterministic,
        "a deterministic run has one host: when a host is short of data depends on timing. Drop --deterministic.",
    )
    rundir.claim(run_dir)
    crew = Crew()
    signals: list[int] = []
    on_stop(signals.append)
    streams = Streams(config.num_slots, config.inference.max_streams)
    front_end = FrontEnd(address, config.inference, streams, crew.fail, env=config.env)
    front_end.start()
    session = Session(config, run_dir, resume, crew, front_end, signals, hosts)
    return _run(crew, session, signals, run_dir)


def run_llm_learner(config: LlmConfig, run_dir: Path, resume: bool, address: str, decode_hosts: Sequence[str]) -> int:
    """Generates, scores and learns until the config says stop; the exit code."""
    rundir.claim(run_dir)
    crew = Crew()
    signals: list[int] = []
    on_stop(signals.append)
    session = LlmSession(config, run_dir, resume, crew, signals, address, decode_hosts)
    return _run(crew, session, signals, run_dir)


def _run(crew: Crew, session: Session | LlmSession, signals: list[int], run_dir: Path) -> int:
    done = threading.Event()
    crew.spawn("learner", session.run, done)
    return _wait(crew, session, done, signals, run_dir)


def _wait(crew: Crew, session: Session | LlmSession, done: threading.Event, signals: list[int], run_dir: Path) -> int:
    """Waits for the end, a failure or a signal, whichever is first; the exit code."""
    while not done.is_set() and not crew.stop.is_set() and not signals:
        done.wait(_POLL_S)
    deadline = time.monotonic() + _STOP_GRACE_S
    while session.learning and not done.wait(_POLL_S):
        if time.monotonic() - session.busy_since < _SAVE_S:
            rundir.show_progress(run_dir)
            deadline = time.monotonic() + _STOP_GRACE_S
        if time.monotonic() > deadline:
            print(f"the learner has hung for {_STOP_GRACE_S:g} s and is ended as it is.", flush=True)
            break
    if isinstance(crew.failure, ConfigError):
        raise crew.failure
    if isinstance(crew.failure, _TOLD):
        print(f"learner: {crew.failure}", file=sys.stderr, flush=True)
        return 1
    if crew.failure is not None:
        try:
            print(crew.describe_failure(), file=sys.stderr, flush=True)
        except OSError:  # The disk that is full may hold the log too.
            print(crew.describe_failure(), flush=True)
        return 1
    if signals and not session.learning:
        print("stopped before the first update; there is nothing to save.", flush=True)
    return 128 + signals[0] if signals else 0

"""Runs a program's roles as child processes: restarts actors, ends the run with its learner, leaves no orphan.

One thread. Signal handlers only take notes; the loop in `supervise` polls children and notes alike. A terminal's Ctrl-C
reaches the supervisor alone, which decides who is told what.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path

from seedx import rundir
from seedx.child import Child
from seedx.program import Program
from seedx.signals import on_stop

_POLL_S = 0.05

USER_ERROR = 2  # A role's exit code for what no restart mends.
REPLACED = 77  # An actor's exit code when another one with its id took its place.


@dataclass(frozen=True)
class Limits:
    """How patient a supervisor is.

    Attributes:
        restarts: Restarts of one role within `window_s` before the run is given up.
        window_s: Seconds after which a restart is forgotten.
        backoff_s: Pause before the first restart, seconds; it doubles with each further one.
        grace_s: From a signal until a role is killed, seconds; it starts anew while the learner writes a checkpoint.
        second_interrupt_s: A second Ctrl-C kills at once, unless it follows within these seconds: wrappers such as
            `uv run` forward the terminal's Ctrl-C a second time.
    """

    restarts: int = 5
    window_s: float = 600.0
    backoff_s: float = 0.1
    grace_s: float = 10.0
    second_interrupt_s: float = 0.5


def supervise(program: Program, limits: Limits | None = None) -> int:
    """Runs `program` to its end and returns the exit code of the run.

    The learner's stdout is ours; everything else goes to RUN_DIR/logs/<role>.log. A failed actor is restarted; the run
    stops when a restart cannot help (exit code 2), when an actor's restarts are used up, and when the learner ends. An
    actor that was replaced (exit code 77) stays away.
    SIGINT and SIGTERM are passed to the learner, which may write a checkpoint; then the actors are told. SIGHUP counts
    as SIGTERM.

    Must be called in the main thread.

    Returns:
        0 when the learner is done; 130 after SIGINT and 143 after SIGTERM; 2 after a user error; else the learner's
        code, or 1 when an actor is the reason.
    """
    limits = limits or Limits()
    logs = Path(program.run_dir) / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    children = [Child(role, logs / f"{role.name}.log") for role in program.roles]
    with _noted_signals() as notes:
        try:
            for child in children:
                if not notes:
                    child.start()
            code = None
            while code is None and not notes:
                code = _round(children, limits)
                time.sleep(_POLL_S)
            return _stop(children, notes, code, limits, program.run_dir)
        finally:
            for child in children:
                child.kill()


def _round(children: Sequence[Child], limits: Limits) -> int | None:
    """Looks at every child once; the exit code of the run if it is over."""
    for child in children:  # The learner comes first: when it died, how the actors took it does not matter.
        if child.restart_at is not None and time.monotonic() >= child.restart_at:
            child.start()
        if child.poll() and (code := _ended(child, limits)) is not None:
            return code
    return None


def _ended(child: Child, limits: Limits) -> int | None:
    """What the end of `child` means for the run: its exit code if the run is over."""
    if child.code == 0:
        return 0 if child.role.kind == "learner" else None
    if child.code == REPLACED and child.role.kind == "actor":
        _say(f"{child.role.name} was replaced by another actor with its id and is not restarted; log: {child.log}")
        return None
    if child.code == USER_ERROR:
        _report(child, f"{child.death()}; a restart cannot help")
        return USER_ERROR
    if child.role.restart:
        plan = child.schedule_restart(limits.restarts, limits.window_s, limits.backoff_s)
        if plan is not None:
            _say(f"{child.death()}; {plan}; log: {child.log}")
            return None
        _report(child, f"{child.death()}, after {limits.restarts} restarts; the run stops. {_resume_hint(child)}")
        return 1
    _report(child, f"{child.death()}; the run stops. {_resume_hint(child)}")
    assert child.code is not None
    return _exit_code(child.code)


def _stop(
    children: Sequence[Child], notes: list[tuple[float, int]], code: int | None, limits: Limits, run_dir: str
) -> int:
    """Ends all children, the learner first, and returns the exit code of the run.

    Args:
        children: All children, ended ones too.
        notes: Signals received: time and number; it grows meanwhile.
        code: The run's exit code, or None if it is a signal that stops it.
        limits: The limits.
        run_dir: Where the learner may write a checkpoint.
    """
    number = notes[0][1] if code is None else signal.SIGTERM
    learners = [c for c in children if c.role.kind == "learner"]
    actors = [c for c in children if c.role.kind != "learner"]
    _end(learners, number, notes, limits, run_dir)
    _end(actors, signal.SIGTERM, notes, limits, run_dir)
    if code is not None:
        return code
    for learner in learners:
        if learner.code == 0:  # It was done before the signal reached it.
            return 0
        if learner.code is None or _exit_code(learner.code) == 128 + number:
            continue
        _report(learner, f"{learner.death()} while it stopped")
        return _exit_code(learner.code)
    return 128 + number


def _end(children: Sequence[Child], number: int, notes: list[tuple[float, int]], limits: Limits, run_dir: str) -> None:
    """Sends signal `number`, waits while checkpoints are written and `limits.grace_s` more, kills what is left."""
    for child in children:
        child.signal(number)
    seen, deadline = rundir.progress(run_dir), time.monotonic() + limits.grace_s
    while running := [c for c in children if c.process is not None and not c.poll()]:
        if (now_seen := rundir.progress(run_dir)) != seen:
            seen, deadline = now_seen, time.monotonic() + limits.grace_s
        again = _interrupted_twice(notes, limits)
        if again or time.monotonic() > deadline:
            for child in running:
                why = "at the second Ctrl-C" if again else f"{limits.grace_s:g} s after signal {number}"
                _say(f"{child.role.name} is killed {why}")
                child.kill()
        time.sleep(_POLL_S)


def _interrupted_twice(notes: list[tuple[float, int]], limits: Limits) -> bool:
    return any(n == signal.SIGINT and t - notes[0][0] > limits.second_interrupt_s for t, n in notes)


@contextlib.contextmanager
def _noted_signals() -> Generator[list[tuple[float, int]]]:
    """Instead of acting, SIGINT and SIGTERM append their time and number to the list."""
    notes: list[tuple[float, int]] = []
    before = on_stop(lambda number: notes.append((time.monotonic(), number)))
    try:
        yield notes
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _exit_code(code: int) -> int:
    """The shell's code for subprocess's: 128 + n for a process that signal n killed."""
    return code if code >= 0 else 128 - code


def _resume_hint(child: Child) -> str:
    run_dir = child.log.parent.parent
    if "--coordinator" in child.role.command:
        lost = "jax ends a learner like that when host 0 is lost. " if child.code == -signal.SIGABRT else ""
        return f"{lost}If there is a checkpoint, it is host 0's: continue with --resume on all hosts."
    if not rundir.newest_update(run_dir):
        return "There is no checkpoint yet."
    return f"Continue it with --resume --run-dir {run_dir}"


def _report(child: Child, text: str) -> None:
    with contextlib.suppress(OSError):
        print(child.tail(), file=sys.stderr)
    _say(text)


def _say(text: str) -> None:
    with contextlib.suppress(OSError):  # In `... 2>&1 | tee log`, Ctrl-C ends tee before the learner's checkpoint.
        print(f"seedx: {text}", file=sys.stderr, flush=True)

"""A role's process as its parent has it: a process group of its own that dies with the parent, and a log."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Generator
from pathlib import Path

from seedx.parent import PARENT_PID
from seedx.program import Role

_TAIL_LINES = 40
_TAIL_BYTES = 16_384


class Child:
    """A role, its process, and the history of its failures.

    Args:
        role: What to run.
        log: The file that its output goes to, but for the learner's stdout, which is ours.

    Attributes:
        process: None while there is none.
        code: Of the last process that ended unless by `kill`; negative: minus the signal.
        restart_at: When to start again, by `time.monotonic`; None: not planned.
    """

    def __init__(self, role: Role, log: Path):
        self.role = role
        self.log = log
        self.process: subprocess.Popen | None = None
        self.code: int | None = None
        self.restart_at: float | None = None
        self._restarts = 0
        self._failures: list[float] = []
        self._log_start = 0

    def start(self) -> None:
        """Starts a process; one of an actor is told how many there were before."""
        learner = self.role.kind == "learner"
        restart = ("--restart", str(self._restarts)) if self._restarts and self.role.kind == "actor" else ()
        env = {**os.environ, **self.role.env, PARENT_PID: str(os.getpid())}
        with self.log.open("ab") as log, _interrupts_kept(learner):
            self._log_start = log.tell()
            self.process = subprocess.Popen(
                (*self.role.command, *restart),
                env=env,
                stdin=None if learner else subprocess.DEVNULL,  # A breakpoint() in the learner can be answered.
                stdout=None if learner else log,
                stderr=log,
                start_new_session=True,
            )
        self.restart_at = None

    def poll(self) -> bool:
        """Whether the process has ended since the last call; its code is then in `code`."""
        if self.process is None or not os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            return False
        self._kill_group()  # While the unreaped process still holds its id, which is its group's.
        self.code = self.process.wait()
        self.process = None
        return True

    def signal(self, number: int) -> None:
        """Sends a signal, if the process lives."""
        if self.process is not None:
            os.kill(self.process.pid, number)  # Popen.send_signal would reap it, behind the back of `poll`.

    def kill(self) -> None:
        """Kills the process and all it started, and reaps it."""
        if self.process is not None:
            self._kill_group()
            self.process.wait()
            self.process = None

    def _kill_group(self) -> None:
        assert self.process is not None
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def schedule_restart(self, restarts: int, window_s: float, backoff_s: float) -> str | None:
        """Notes a failure and when to start again; returns that as text, or None if the restarts are used up.

        Args:
            restarts: Of this role that are allowed within `window_s`.
            window_s: Seconds after which a restart is forgotten.
            backoff_s: Pause before the first restart, seconds; it doubles with each further one.
        """
        now = time.monotonic()
        self._failures = [t for t in self._failures if now - t < window_s] + [now]
        count = len(self._failures)
        if count > restarts:
            return None
        pause = backoff_s * 2 ** (count - 1)
        self.restart_at = now + pause
        self._restarts += 1
        return f"restart {count} of {restarts} in {pause:g} s"

    def death(self) -> str:
        """How the last process ended, in words."""
        assert self.code is not None
        if self.code < 0:
            return f"{self.role.name} died with signal {-self.code} ({signal.Signals(-self.code).name})"
        return f"{self.role.name} ended with code {self.code}"

    def tail(self) -> str:
        """The last lines that the last process left in its log."""
        with self.log.open("rb") as log:
            log.seek(max(self._log_start, log.seek(0, os.SEEK_END) - _TAIL_BYTES))
            lines = log.read().decode(errors="replace").splitlines()[-_TAIL_LINES:]
        return "\n".join([f"--- {self.log} ---", *lines, "---"])


@contextlib.contextmanager
def _interrupts_kept(keep: bool) -> Generator[None]:
    """A process that is started here with `keep` gets a SIGINT only once `seedx.run` lets it in.

    Before that, Python's own start-up would answer it with a traceback.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT} if keep else ())
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

"""A process above another one, so that nothing which that one starts outlives it.

The guardian is a subreaper: descendants that leave their session, and those whose parent has ended, become its own
children. It does nothing but wait, so it is there whatever the process below it does.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from pathlib import Path

from seedx.parent import PARENT_PID, die_with_parent

_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
_AGAIN_S = 0.005
_WAITED_FOR = {signal.SIGTERM, signal.SIGCHLD}


def fork_under_guardian() -> None:
    """Forks and returns in the child alone, in a process group of its own; the process itself becomes its guardian.

    The guardian ends when the child does, with its exit code, or at SIGTERM, which it also gets when its own parent
    dies; first it kills all that descends from it. stdin and stdout are the child's alone. Of a killed guardian, the
    child dies too.

    Must be called while there is one thread.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _WAITED_FOR)
    die_with_parent(signal.SIGTERM)
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    guardian = os.getpid()
    child = os.fork()
    if child == 0:
        os.setpgid(0, 0)
        os.environ[PARENT_PID] = str(guardian)
        die_with_parent()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return
    with contextlib.suppress(OSError):  # Whichever of the two comes first.
        os.setpgid(child, child)
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing, 1)
    code = _wait(child)
    _kill_descendants(child)
    os._exit(code)


def _wait(child: int) -> int:
    """Waits for the child's end or SIGTERM; the exit code. Reaps whatever else ends meanwhile."""
    while signal.sigwait(_WAITED_FOR) == signal.SIGCHLD:
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == child:
                code = os.waitstatus_to_exitcode(ended[1])
                return code if code >= 0 else 128 - code
    return 128 + signal.SIGTERM


def _kill_descendants(child: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child, signal.SIGKILL)  # At once, so that no member can fork away from it.
    while True:
        for pid in _descendants(os.getpid()):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(_AGAIN_S)  # Looks again: one may have forked meanwhile.


def _descendants(ancestor: int) -> set[int]:
    """Process ids of all that descend from a process, as /proc says."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = stat.read_bytes().rpartition(b")")[2].split()  # The name before it may hold anything.
            parents[int(stat.parent.name)] = int(fields[1])
    found, more = set(), {ancestor}
    while more:
        found |= more
        more = {pid for pid, parent in parents.items() if parent in more} - found
    return found - {ancestor}

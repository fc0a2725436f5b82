"""Ties a process to the one that started it."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PARENT_PID = "SEEDX_PARENT_PID"  # the environment variable in which a parent leaves its process id
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def die_with_parent(number: int = signal.SIGKILL) -> None:
    """Has this process get signal `number` when the thread that started it ends, or its process dies.

    Does nothing if the one that started it did not leave its process id in the environment.
    """
    parent = os.environ.pop(PARENT_PID, None)  # Popped: children of this process have another parent.
    if parent is None or sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != int(parent):  # It died before the line above.
        os._exit(1)

"""The signals that end a process of a run."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any


def on_stop(act: Callable[[int], Any]) -> dict[signal.Signals, Any]:
    """Calls `act` with SIGINT or SIGTERM whenever one comes; returns the handlers before.

    SIGHUP, which says that the terminal is gone, counts as SIGTERM, unless it is ignored: `nohup` does that.
    """
    meanings = {signal.SIGINT: signal.SIGINT, signal.SIGTERM: signal.SIGTERM, signal.SIGHUP: signal.SIGTERM}
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        del meanings[signal.SIGHUP]
    return {number: signal.signal(number, lambda *_, m=meaning: act(m)) for number, meaning in meanings.items()}

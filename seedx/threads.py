"""Threads that fail together: the first exception in any of them stops all, and the process with it."""

from __future__ import annotations

import gc
import threading
import traceback
from collections.abc import Callable
from typing import Any


class Crew:
    """The threads of one process and the one signal that stops them.

    Invariant: `stop` is set as soon as any thread fails; `failure` is the first exception, and later ones (often
    consequences of the stop) are dropped.
    """

    def __init__(self) -> None:
        self.stop = threading.Event()
        self.failure: BaseException | None = None
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()

    def spawn(self, name: str, target: Callable[..., Any], *args: Any) -> threading.Thread:
        """Runs `target(*args)` on a daemon thread; an exception in it is recorded and stops the crew."""
        thread = threading.Thread(target=self._run, args=(target, args), name=name, daemon=True)
        self._threads.append(thread)
        thread.start()
        return thread

    def _run(self, target: Callable[..., Any], args: tuple) -> None:
        try:
            target(*args)
        except BaseException as error:
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """Records a failure and stops the crew."""
        with self._lock:
            if self.failure is None and not self.stop.is_set():
                self.failure = error
        self.stop.set()

    def join(self, timeout_s: float) -> list[str]:
        """Stops the crew and waits for its threads; the names of those still alive at the deadline."""
        self.stop.set()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(timeout_s / max(len(self._threads), 1))
        return [t.name for t in self._threads if t.is_alive() and t is not threading.current_thread()]

    def describe_failure(self) -> str:
        """The traceback of the first failure."""
        return "" if self.failure is None else "".join(traceback.format_exception(self.failure))


def spare_the_collector() -> None:
    """Has the garbage collector pass over what lives now, and run less often; called once all is loaded.

    Thousands of requests in flight are so many objects that it would run all the time, over all of JAX's modules too.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000)

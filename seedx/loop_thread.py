"""A server's asyncio loop on a thread of its own."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any

_START_S = 30.0


class LoopThread:
    """Runs one coroutine on a loop of its own; when it is done, what it left is cancelled, and the loop closes.

    Args:
        name: Of the thread.
        serve: Makes the coroutine, which calls `ready` once it serves.
        on_failure: Told of an exception after that; one before it is raised by `start`.

    Attributes:
        loop: The loop.
    """

    def __init__(
        self, name: str, serve: Callable[[], Coroutine[Any, Any, None]], on_failure: Callable[[BaseException], None]
    ) -> None:
        self.loop = asyncio.new_event_loop()
        self._serve, self._on_failure = serve, on_failure
        self._started: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Returns once the coroutine is ready; raises what it raises before."""
        self._thread.start()
        self._started.result(_START_S)

    def ready(self) -> None:
        """Has `start` return; for the coroutine."""
        self._started.set_result(None)

    def call(self, function: Callable[..., Any], *args: Any) -> None:
        """Has the loop call a function soon; nothing once it is closed. Any thread may call."""
        with contextlib.suppress(RuntimeError):  # it is closed
            self.loop.call_soon_threadsafe(function, *args)

    def join(self, timeout_s: float) -> None:
        """Waits for the end of the coroutine, but no longer than that."""
        self._thread.join(timeout_s)

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            with asyncio.Runner(loop_factory=lambda: self.loop) as runner:
                runner.run(self._serve())
        except BaseException as error:
            if self._started.done():
                self._on_failure(error)
            else:
                self._started.set_exception(error)

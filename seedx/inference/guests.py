"""A scheduler for others than those whose weights it decodes with."""

from __future__ import annotations

import dataclasses

from seedx.inference.decode_service import Scheduler
from seedx.inference.requests import Handle, Listener, Request


class Guests:
    """Takes requests like the scheduler; none goes before the owner's, and none holds back a swap of the weights."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    @property
    def healthy(self) -> bool:
        """Whether requests are served."""
        return self._scheduler.healthy

    def submit(self, request: Request, listener: Listener | None = None) -> Handle:
        """See `Scheduler.submit`."""
        modest = dataclasses.replace(request, priority=min(request.priority, 0), on_swap="continue")
        return self._scheduler.submit(modest, listener)

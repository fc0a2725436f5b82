"""What generates for a run: a scheduler in its process, or decode hosts."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Protocol, runtime_checkable

from seedx.inference.requests import Handle, Request
from seedx.metrics import Number
from seedx.types import Tree


@runtime_checkable
class Decoder(Protocol):
    """What a run needs of `scheduler.Scheduler` or `remote_scheduler.RemoteScheduler`; see there."""

    @property
    def num_slots(self) -> int: ...  # noqa: D102

    def start(self) -> None: ...  # noqa: D102

    def submit(self, request: Request) -> Handle: ...  # noqa: D102

    def together(self) -> contextlib.AbstractContextManager[None]: ...  # noqa: D102

    def publish(self, version: int, params: Tree) -> None: ...  # noqa: D102

    def figures(self) -> Mapping[str, Number]: ...  # noqa: D102

"""What passes between the front-end and the policy server."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from seedx.inference.streams import Stream, Streams


@dataclass(eq=False)
class Request:
    """The rows of one group, waiting for actions."""

    stream: Stream
    payload: memoryview
    reply: asyncio.Future[bytes]

    @property
    def rows(self) -> int:
        """Environments of the group."""
        return self.stream.rows


@runtime_checkable
class Policy(Protocol):
    """What the front-end needs of the policy server."""

    def attach(self, stream: Stream) -> None:
        """A stream begins; its slots are fresh."""
        ...

    def detach(self, stream: Stream) -> None:
        """A stream is gone."""
        ...

    def offer(self, request: Request) -> None:
        """A request to be answered through `FrontEnd.deliver`."""
        ...

    def watch(self, streams: Streams) -> None:
        """Called a few times a second with the connected streams."""
        ...

"""The engine of an LLM run for others: `--serve-port`."""

from __future__ import annotations

from seedx.inference.decode_metrics import DecodeMetrics
from seedx.inference.decode_server import DecodeServer
from seedx.inference.decode_service import DecodeService
from seedx.inference.guests import Guests
from seedx.inference.scheduler import Scheduler
from seedx.llm_setup import Setup
from seedx.security import Access
from seedx.threads import Crew


class Serving:
    """A server at a port of localhost, which takes no requests before `begin`.

    Args:
        port: 0: a free one.
        crew: A failure of the server is its.

    Raises:
        ConfigError: the port is taken.
    """

    def __init__(self, port: int, crew: Crew) -> None:
        self._service = DecodeService(DecodeMetrics())
        self._server = DecodeServer(self._service, f"localhost:{port}", None, Access(), crew.fail)
        self._server.start()

    def begin(self, scheduler: Scheduler, setup: Setup) -> str:
        """Has the engine answer; at which address."""
        self._service.begin(Guests(scheduler), setup.name, setup.tokenizer, setup.chat_template)
        return self._server.address

    def stop(self) -> None:
        """Ends it at once, with all that it is asked."""
        self._server.stop(0.0)

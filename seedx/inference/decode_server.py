"""The decode server: gRPC and HTTP over one scheduler, on one asyncio loop that has a thread of its own.

Addresses are bound before the model is loaded, so that one which is taken is told at once; until `DecodeService.begin`
all requests are answered with UNAVAILABLE.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

import grpc
import grpc.aio
from aiohttp import web
from aiohttp.http import HttpProcessingError
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer

from seedx import grpc_options, security
from seedx.inference.decode_rpc import DecodeMethods
from seedx.inference.decode_service import DecodeService
from seedx.inference.http_server import HttpApi
from seedx.loop_thread import LoopThread

MAX_MESSAGE_BYTES = 4 << 20
_POLL_S = 0.05
_CLOSE_S = 5.0


class DecodeServer:
    """Serves a decode service; `start` returns once its addresses are bound.

    Args:
        service: Does the work.
        address: Of gRPC: unix:/path or host:port; port 0 takes a free one.
        http_address: Of HTTP: host:port; None: no HTTP.
        access: Credentials, without which only this machine may connect.
        on_failure: Told of an exception on the loop's thread.

    Attributes:
        address: Of gRPC, with the port that was taken.
        http_address: Of HTTP, with the port that was taken.

    Raises:
        ConfigError: an address is none, or other machines could reach it without credentials, or these cannot be read.
    """

    def __init__(
        self,
        service: DecodeService,
        address: str,
        http_address: str | None,
        access: security.Credentials,
        on_failure: Callable[[BaseException], None],
    ) -> None:
        for wanted in (address, http_address):
            if wanted is not None:
                security.check_listen_address(wanted, access)
        self.address, self.http_address = address, http_address
        self._service, self._access = service, access
        self._token = security.read_token(access)
        self._drain_s: float | None = None
        self._stopping = asyncio.Event()
        self._health = HealthServicer()
        self._thread = LoopThread("decode-server", self._serve, on_failure)

    def start(self) -> None:
        """Binds and answers.

        Raises:
            ConfigError: an address is in use or cannot be bound, or the credentials cannot be read.
        """
        self._thread.start()

    def stop(self, drain_s: float) -> None:
        """Takes no more requests, lets those at work finish for so long, ends the others and closes; returns after."""
        self._service.drain()
        self._drain_s = drain_s
        self._thread.call(self._stopping.set)
        self._thread.join(drain_s + 2 * _CLOSE_S)

    # ---- the loop's thread

    async def _serve(self) -> None:
        server = grpc.aio.server(options=[("grpc.max_receive_message_length", MAX_MESSAGE_BYTES), *grpc_options.SERVER])
        server.add_generic_rpc_handlers(DecodeMethods(self._service, self._token).handlers())
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        await self._health.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
        port = security.bind(server, self.address, self._access)
        if not self.address.startswith("unix:"):
            self.address = f"{self.address.rpartition(':')[0]}:{port}"
        runner = await self._start_http()
        await server.start()
        self._thread.ready()
        await self._watch()
        await self._close(server, runner)

    async def _start_http(self) -> web.AppRunner | None:
        if self.http_address is None:
            return None
        api = HttpApi(self._service, self._token, local_only=security.is_local(self.http_address))
        runner = web.AppRunner(
            api.app(), handler_cancellation=True, access_log=None, logger=_http_log(), shutdown_timeout=_CLOSE_S
        )
        await runner.setup()
        host, _, port = self.http_address.rpartition(":")
        tls = security.http_tls(self._access)
        try:
            for own in security.own_hosts(self.http_address):
                await web.TCPSite(runner, own, int(port), ssl_context=tls, reuse_port=False).start()
        except OSError as error:
            await runner.cleanup()
            raise security.taken(self.http_address) from error
        self.http_address = f"{host}:{runner.addresses[0][1]}"
        return runner

    async def _watch(self) -> None:
        """Keeps gRPC's health service up to date until the server is stopped."""
        shown = False
        while not self._stopping.is_set():
            if shown != self._service.is_live:
                shown = self._service.is_live
                status = health_pb2.HealthCheckResponse
                await self._health.set("", status.SERVING if shown else status.NOT_SERVING)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), _POLL_S)

    async def _close(self, server: grpc.aio.Server, runner: web.AppRunner | None) -> None:
        await self._health.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
        deadline = self._thread.loop.time() + (self._drain_s or 0.0)
        while self._service.num_open and self._thread.loop.time() < deadline:
            await asyncio.sleep(_POLL_S)
        self._service.interrupt()
        while self._service.num_open and self._thread.loop.time() < deadline + _CLOSE_S:
            await asyncio.sleep(_POLL_S)  # they write their last words
        await server.stop(grace=1.0)
        if runner is not None:
            await runner.cleanup()


def _http_log() -> logging.Logger:
    """aiohttp's, without what is no HTTP: its sender is told so, and the server is not at fault."""
    log = logging.getLogger("aiohttp.server")
    log.addFilter(_is_ours)  # once, however often it is added
    return log


def _is_ours(record: logging.LogRecord) -> bool:
    return not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError))

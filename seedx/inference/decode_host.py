"""The server of a decode host: takes a learner's requests over one stream, gives back completions.

A request is done for the learner once its completions are whole, so pieces are put together here.

Threading: `begin` and `close` are for any thread, listeners are called on the scheduler's, all else runs on the loop's.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from functools import partial

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from seedx import grpc_options, security
from seedx.inference import decode_pb2 as pb
from seedx.inference.decode_rpc import reply_of, request_of
from seedx.inference.decode_service import joined
from seedx.inference.requests import Delta, Handle, QueueFullError, Request
from seedx.inference.scheduler import Scheduler
from seedx.loop_thread import LoopThread

SERVICE = "seedx.v1.DecodeHost"
_MAX_MESSAGE_BYTES = 2**30  # the prompts of all groups that are begun together
_POLL_S = 0.002
_CLOSE_S = 5.0


class DecodeHost:
    """A server that answers with UNAVAILABLE before `begin`.

    Args:
        address: unix:/path or host:port, which only this machine may reach.
        on_failure: Told of an exception on the loop's thread.

    Raises:
        ConfigError: the address is none, not local, in use or cannot be bound.
    """

    def __init__(self, address: str, on_failure: Callable[[BaseException], None]) -> None:
        self._access = security.Access()
        security.check_listen_address(address, self._access)
        self._address = address
        self._scheduler: Scheduler | None = None
        self._stopping = asyncio.Event()
        self._thread = LoopThread("decode-host", self._serve, on_failure)
        self._thread.start()

    def begin(self, scheduler: Scheduler) -> None:
        """Takes requests from now on."""
        self._scheduler = scheduler

    def close(self) -> None:
        """Ends all calls."""
        self._thread.call(self._stopping.set)
        self._thread.join(_CLOSE_S)

    # ---- the loop's thread

    async def _serve(self) -> None:
        server = grpc.aio.server(
            options=[("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES), *grpc_options.SERVER]
        )
        methods = {
            "Generate": grpc.stream_stream_rpc_method_handler(self._generate),
            "Figures": grpc.unary_unary_rpc_method_handler(self._figures),
        }
        server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(SERVICE, methods)])
        security.bind(server, self._address, self._access)
        await server.start()
        self._thread.ready()
        await self._stopping.wait()
        await server.stop(grace=None)

    async def _ready(self, context: grpc.aio.ServicerContext) -> Scheduler:
        if self._scheduler is None:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the engine is being loaded, or waits for weights.")
        assert self._scheduler is not None
        return self._scheduler

    async def _figures(self, _: bytes, context: grpc.aio.ServicerContext) -> bytes:
        scheduler = await self._ready(context)
        return pb.FiguresReply(
            figures={name: float(value) for name, value in scheduler.figures().items()}
        ).SerializeToString()

    async def _generate(self, messages: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> None:
        call = _Call(await self._ready(context))
        await context.send_initial_metadata(())  # says that requests are taken
        reading = asyncio.create_task(call.read(messages))
        try:
            async for reply in call.replies(reading):
                await context.write(reply)
            await reading
        except (ValueError, DecodeError) as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except RuntimeError as error:
            await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
        finally:
            reading.cancel()
            call.close()


class _Call:
    """One learner's stream; closing it ends all that it asked for."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler, self._loop = scheduler, asyncio.get_running_loop()
        self._handles: dict[int, Handle] = {}
        self._pieces: dict[tuple[int, int], list[Delta]] = {}  # the scheduler's thread's
        self._whole: deque[tuple[int, Delta]] = deque()
        self._arrived = asyncio.Event()

    async def read(self, messages: AsyncIterator[bytes]) -> None:
        """Takes requests as they come.

        Raises:
            DecodeError, ValueError: a message is malformed, or a request cannot be done.
            RuntimeError: the scheduler is closed or failed.
        """
        async for message in messages:
            orders = pb.Orders.FromString(message)
            for id_ in orders.cancelled:
                if (handle := self._handles.get(id_)) is not None:
                    handle.cancel()
            while self._scheduler.version < orders.version:
                if not self._scheduler.healthy:
                    raise RuntimeError("the scheduler is closed.")
                await asyncio.sleep(_POLL_S)
            await self._submit([(order.id, _request(order.request)) for order in orders.orders])

    async def _submit(self, requests: Sequence[tuple[int, Request]]) -> None:
        left = deque(requests)
        while left:
            try:
                with self._scheduler.together():
                    while left:
                        id_, request = left[0]
                        handle = self._scheduler.submit(request, partial(self._receive, id_))
                        self._handles[id_] = handle
                        handle.add_done_callback(partial(self._forget, id_))
                        left.popleft()
            except QueueFullError as error:  # guests have filled it
                await asyncio.sleep(error.retry_after_s)

    async def replies(self, reading: asyncio.Task[None]) -> AsyncGenerator[bytes]:
        """Completions as they come, until there are no more requests."""
        reading.add_done_callback(lambda _: self._arrived.set())
        while not reading.done():
            await self._arrived.wait()
            self._arrived.clear()
            while self._whole:
                id_, delta = self._whole.popleft()
                yield pb.OrderReply(id=id_, completion=reply_of(delta.index, delta)).SerializeToString()

    def close(self) -> None:
        """Frees the slots."""
        for handle in list(self._handles.values()):
            handle.cancel()

    # ---- the scheduler's thread

    def _receive(self, id_: int, delta: Delta) -> None:
        pieces = self._pieces.setdefault((id_, delta.index), [])
        if delta.restarted:
            pieces.clear()
        pieces.append(delta)
        if delta.finish_reason is not None:
            del self._pieces[id_, delta.index]
            self._whole.append((id_, joined(pieces)))
            self._soon(self._arrived.set)

    def _forget(self, id_: int, _: Handle) -> None:
        self._soon(self._handles.pop, id_, None)

    def _soon(self, function: Callable[..., object], *args: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(function, *args)


def _request(given: pb.GenerateRequest) -> Request:
    return request_of(given, tuple(given.tokens.ids), tuple(given.stop_tokens), None)

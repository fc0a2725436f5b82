"""The gRPC side of the policy server: hello, streams, health, credentials.

Threading: one thread runs one asyncio loop; `Streams` is touched by it alone. Invariant: a stream has at most one
request with the policy server, and its next message is read only after the reply was written.
"""

from __future__ import annotations

import asyncio
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer

from seedx import grpc_options, security, specs
from seedx.config import InferenceConfig
from seedx.inference import policy_pb2 as pb
from seedx.inference import wire
from seedx.inference.hello import parse_hello
from seedx.inference.request import Policy, Request
from seedx.inference.streams import Refused, Status, Stream, Streams
from seedx.loop_thread import LoopThread
from seedx.types import EnvSpec

_CODES = {
    Status.FINISHED: grpc.StatusCode.OUT_OF_RANGE,  # of a hello; a stream ends with OK
    Status.INVALID_ARGUMENT: grpc.StatusCode.INVALID_ARGUMENT,
    Status.FAILED_PRECONDITION: grpc.StatusCode.FAILED_PRECONDITION,
    Status.ALREADY_EXISTS: grpc.StatusCode.ALREADY_EXISTS,
    Status.RESOURCE_EXHAUSTED: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Status.ABORTED: grpc.StatusCode.ABORTED,
    Status.UNAVAILABLE: grpc.StatusCode.UNAVAILABLE,
}
_LIVE_CHECK_S = 0.1
_CLOSE_S = 5.0
_ANSWER_S = 30.0  # the loop may be slow while programs are compiled beside it


class FrontEnd:
    """Serves actors; `start` returns once the address is bound.

    Args:
        address: unix:/path or host:port.
        config: Limits and credentials.
        streams: The bookkeeping of slots.
        on_failure: Told of an exception on the loop's thread.
        env: Id of the environments that are expected; None takes those of the first actor.
    """

    def __init__(
        self,
        address: str,
        config: InferenceConfig,
        streams: Streams,
        on_failure: Callable[[BaseException], None],
        env: str | None = None,
    ) -> None:
        security.check_listen_address(address, config)
        self.address = address
        self._config = config
        self._streams = streams
        self._env = env
        self._token = security.read_token(config)
        self._server_id = uuid.uuid4().hex
        self._policy: Policy | None = None
        self._ready = asyncio.Event()
        self._stopping = asyncio.Event()
        self._closing: Refused | None = None
        self._opening: set[asyncio.Task] = set()  # calls of streams that are not attached yet
        self._health = HealthServicer()
        self._thread = LoopThread("front-end", self._serve, on_failure)
        self.first_spec: Future[EnvSpec] = Future()
        self.port = 0

    def start(self) -> None:
        """Binds and serves; hellos wait until `serve` is called.

        Raises:
            ConfigError: the address is in use or cannot be bound, or the credentials cannot be read.
        """
        self._thread.start()

    def serve(self, policy: Policy) -> None:
        """Admits actors from now on."""
        self._policy = policy
        self._call(self._open())

    def deliver(self, replies: Sequence[tuple[Request, bytes | Refused]]) -> None:
        """Answers requests; any thread may call."""
        self._thread.call(self._deliver, replies)

    def stop(self, finished: bool) -> None:
        """Ends every stream, with OK if training is finished and UNAVAILABLE if it may go on later."""
        if not self._thread.loop.is_running():
            return
        self._closing = (
            Refused(Status.FINISHED, "training is finished")
            if finished
            else Refused(Status.UNAVAILABLE, "the server stops; it may come back")
        )
        self._thread.call(self._stopping.set)
        self._thread.join(_CLOSE_S)

    # ---- the loop's thread

    def _call(self, coroutine: object) -> None:
        asyncio.run_coroutine_threadsafe(coroutine, self._thread.loop).result(timeout=_ANSWER_S)  # type: ignore[arg-type]

    async def _serve(self) -> None:
        options = [
            ("grpc.max_receive_message_length", wire.MAX_MESSAGE_BYTES),
            ("grpc.max_send_message_length", wire.MAX_MESSAGE_BYTES),
            ("grpc.max_concurrent_streams", self._config.max_streams),
            *grpc_options.SERVER,
        ]
        server = grpc.aio.server(options=options)
        server.add_generic_rpc_handlers([self._handlers()])
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        await self._health.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
        self.port = security.bind(server, self.address, self._config)
        await server.start()
        self._thread.ready()
        watcher = asyncio.create_task(self._watch())
        await self._stopping.wait()
        watcher.cancel()
        await self._close(server)

    def _handlers(self) -> grpc.GenericRpcHandler:
        # Raw bytes come in: gRPC would answer what it cannot parse with UNKNOWN.
        hello = grpc.unary_unary_rpc_method_handler(self._hello, None, pb.HelloReply.SerializeToString)
        act = grpc.stream_stream_rpc_method_handler(self._act)
        return grpc.method_handlers_generic_handler("seedx.v1.PolicyServer", {"Hello": hello, "Act": act})

    async def _open(self) -> None:
        await self._health.set("", health_pb2.HealthCheckResponse.SERVING)
        self._ready.set()

    async def _close(self, server: grpc.aio.Server) -> None:
        assert self._closing is not None
        self._ready.set()  # hellos that wait are turned away
        for stream in self._streams.all():
            self._end(stream, self._closing)
        for task in self._opening:
            task.cancel()
        await asyncio.sleep(0.05)  # the handlers write their last status
        await server.stop(grace=1.0)

    async def _watch(self) -> None:
        before: set[int] = set()
        while True:
            await asyncio.sleep(_LIVE_CHECK_S)
            if self._policy is not None:
                self._policy.watch(self._streams)
            now = self._streams.actors()
            for actor_id in sorted(before ^ now):
                what = "has joined" if actor_id in now else "is gone"
                print(f"{time.strftime('%H:%M:%S')} actor {actor_id} {what}", file=sys.stderr)
            before = now

    def _deliver(self, replies: Sequence[tuple[Request, bytes | Refused]]) -> None:
        for request, reply in replies:
            if request.reply.done():
                continue  # the stream ended meanwhile
            if isinstance(reply, Refused):
                request.reply.set_exception(reply)
            else:
                request.reply.set_result(reply)

    def _end(self, stream: Stream, why: Refused) -> None:
        if stream.ended is None:
            stream.ended = why
            if stream.task is not None:
                stream.task.cancel()

    async def _authorize(self, context: grpc.aio.ServicerContext) -> None:
        if not security.authorized(tuple(context.invocation_metadata() or ()), self._token):
            await context.abort(
                grpc.StatusCode.UNAUTHENTICATED, "missing or wrong token; start the actor with --inference.token-file."
            )

    async def _hello(self, message: bytes, context: grpc.aio.ServicerContext) -> pb.HelloReply:
        await self._authorize(context)
        try:
            request, spec = parse_hello(message)
            if not self.first_spec.done():
                if self._env not in (None, spec.env):
                    raise Refused(
                        Status.FAILED_PRECONDITION, f"env is {spec.env!r}, this server's run is on {self._env!r}."
                    )
                self.first_spec.set_result(spec)
            await self._ready.wait()
            if self._closing is not None:
                raise self._closing
            found = specs.differences(self.first_spec.result(), spec)
            if found:
                raise Refused(Status.FAILED_PRECONDITION, "the environment differs: " + "; ".join(found) + ".")
            run_id = (request.run_id.start_time_ns, request.run_id.nonce)
            replaced = self._streams.hello(
                request.actor_id, run_id, request.groups, request.envs_per_group, request.evaluation
            )
            for stream in replaced:
                self._end(stream, Refused(Status.ABORTED, f"replaced by a newer run of actor {request.actor_id}."))
        except Refused as refused:
            await context.abort(_CODES[refused.status], str(refused))
        return pb.HelloReply(protocol=wire.PROTOCOL, server_id=self._server_id)

    async def _act(self, _: object, context: grpc.aio.ServicerContext) -> None:
        await self._authorize(context)
        stream: Stream | None = None
        try:
            stream = await self._attach(context)
            if stream is not None:
                await self._exchange(stream, context)
        except wire.WireError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except Refused as refused:
            await _end_call(context, refused)
        except asyncio.CancelledError:
            why = self._closing if stream is None else stream.ended
            if why is None:
                raise  # the other side went away
            await _end_call(context, why)
        finally:
            if stream is not None:
                self._forget(stream)

    async def _attach(self, context: grpc.aio.ServicerContext) -> Stream | None:
        task = asyncio.current_task()
        assert task is not None
        self._opening.add(task)
        try:
            message = await context.read()
        finally:
            self._opening.discard(task)
        if message is grpc.aio.EOF:
            return None
        if self._policy is None or self._closing is not None:
            raise self._closing or Refused(Status.FAILED_PRECONDITION, "say Hello before opening a stream.")
        request = wire.parse_request(message)
        if request.WhichOneof("request") != "attach":
            raise wire.WireError("the first message of a stream must be `attach`.")
        attach = request.attach
        run_id = (attach.run_id.start_time_ns, attach.run_id.nonce)
        stream = self._streams.attach(attach.actor_id, run_id, attach.group, self.first_spec.result())
        stream.task = task
        try:
            self._policy.attach(stream)
        except Refused:
            self._streams.detach(stream)
            raise
        return stream

    async def _exchange(self, stream: Stream, context: grpc.aio.ServicerContext) -> None:
        assert self._policy is not None
        while (message := await context.read()) is not grpc.aio.EOF:
            request = Request(stream, stream.timesteps.payload(message), self._thread.loop.create_future())
            stream.asking = True
            self._policy.offer(request)
            reply = await request.reply
            stream.asking = False
            stream.last_seen = time.monotonic()
            await context.write(reply)

    def _forget(self, stream: Stream) -> None:
        if stream.ended is None:
            stream.ended = Refused(Status.ABORTED, "the stream is closed")
        self._streams.detach(stream)
        if self._policy is not None:
            self._policy.detach(stream)


async def _end_call(context: grpc.aio.ServicerContext, why: Refused) -> None:
    """Ends a call with the status that fits; FINISHED is an ordinary end."""
    if why.status is not Status.FINISHED:
        await context.abort(_CODES[why.status], str(why))

"""The decode server's gRPC methods: our own Generate, and JetStream's Decode and HealthCheck.

Messages come in as raw bytes, since gRPC would answer what it cannot parse with UNKNOWN. gRPC cancels a method's task
when its client goes away or its deadline passes, which leaves the stream's block and so frees the slots.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, cast

import grpc
import grpc.aio
import numpy as np
from google.protobuf.message import DecodeError

from seedx import security
from seedx.inference import decode_pb2 as pb
from seedx.inference.decode_service import RETRY_AFTER_S, DecodeService, UnavailableError
from seedx.inference.requests import Delta, OnSwap, QueueFullError, Request

GENERATE = "/seedx.v1.DecodeService/Generate"
RETRY_KEY = "retry-after-ms"

Context = grpc.aio.ServicerContext


class DecodeMethods:
    """The methods of both services.

    Args:
        service: Does the work.
        token: That every call must carry; None: none.
    """

    def __init__(self, service: DecodeService, token: str | None) -> None:
        self._service, self._token = service, token

    def handlers(self) -> list[grpc.GenericRpcHandler]:
        """For `grpc.aio.Server.add_generic_rpc_handlers`."""
        ours = {"Generate": grpc.unary_stream_rpc_method_handler(self._method(self._generate, "grpc"))}
        theirs = {
            "Decode": grpc.unary_stream_rpc_method_handler(self._method(self._decode, "jetstream")),
            "HealthCheck": grpc.unary_unary_rpc_method_handler(self._method(self._health_check, None)),
        }
        return [
            grpc.method_handlers_generic_handler("seedx.v1.DecodeService", ours),
            grpc.method_handlers_generic_handler("jetstream_proto.Orchestrator", theirs),
        ]

    def _method(
        self, work: Callable[[bytes, Context], Awaitable[Any]], protocol: str | None
    ) -> Callable[[bytes, Context], Awaitable[Any]]:
        """Checks the token first, and turns refusals into a status; calls without a protocol are not counted."""

        async def method(message: bytes, context: Context) -> Any:
            if not security.authorized(tuple(context.invocation_metadata() or ()), self._token):
                if protocol is not None:
                    self._service.metrics.ended(protocol, "unauthenticated")
                await context.abort(grpc.StatusCode.UNAUTHENTICATED, "missing or wrong token; give --token-file.")
            try:
                return await work(message, context)
            except (ValueError, DecodeError) as error:
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
            except QueueFullError as error:
                await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error), _retry_after(error.retry_after_s))
            except UnavailableError as error:
                await context.abort(grpc.StatusCode.UNAVAILABLE, str(error), _retry_after(RETRY_AFTER_S))

        return method

    async def _generate(self, message: bytes, context: Context) -> None:
        with self._service.reading("grpc"):
            request = await self._generate_request(_parse(pb.GenerateRequest, message), context)
        async with self._service.open("grpc", [request]) as stream:
            async for index, part in stream.parts():
                await context.write(reply_of(index, part).SerializeToString())
        await _end(context, stream.outcome)

    async def _generate_request(self, given: pb.GenerateRequest, context: Context) -> Request:
        prompt = await self._prompt(given.WhichOneof("prompt"), given.text, given.tokens.ids, "text or tokens")
        stop_tokens = (*self._service.tokenizer.eos_ids, *given.stop_tokens)
        return request_of(given, prompt, stop_tokens, _deadline(context.time_remaining()))

    async def _decode(self, message: bytes, context: Context) -> None:
        """As JetStream does: greedily, and without the stop token."""
        with self._service.reading("jetstream"):
            given = _parse(pb.JetStreamRequest, message)
            text, ids = given.text_content.text, given.token_content.token_ids
            request = Request(
                prompt=await self._prompt(given.WhichOneof("content"), text, ids, "text_content or token_content"),
                max_tokens=given.max_tokens,
                temperature=0.0,
                stop_tokens=self._service.tokenizer.eos_ids,
                priority=given.priority,
                deadline_s=_deadline(context.time_remaining()),
            )
        is_text = given.WhichOneof("content") == "text_content"
        async with self._service.open("jetstream", [request]) as stream:
            async for _, part in stream.parts():
                reply = pb.JetStreamReply()
                tokens = part.tokens[np.isin(part.tokens, request.stop_tokens, invert=True)].tolist()
                reply.stream_content.samples.add(text=(part.text or "") if is_text else "", token_ids=tokens)
                await context.write(reply.SerializeToString())
        await _end(context, stream.outcome)

    async def _health_check(self, _: bytes, __: Context) -> bytes:
        return pb.HealthCheckReply(is_live=self._service.is_live).SerializeToString()

    async def _prompt(self, which: str | None, text: str, ids: Any, allowed: str) -> tuple[int, ...]:
        if which is None:
            raise ValueError(f"prompt is missing; give {allowed}.")
        self._service.check_serving()
        return await self._service.encode(text) if which.startswith("text") else tuple(ids)


def _parse(kind: Any, message: bytes) -> Any:
    try:
        return kind.FromString(message)
    except DecodeError:
        raise ValueError(f"the message is no {kind.DESCRIPTOR.name}.") from None


def request_of(
    given: pb.GenerateRequest, prompt: tuple[int, ...], stop_tokens: tuple[int, ...], deadline_s: float | None
) -> Request:
    """The request of a message.

    Args:
        given: The message.
        prompt: Its prompt.
        stop_tokens: Its own, and what others there are.
        deadline_s: Of its call.

    Raises:
        ValueError: `on_swap` is none.
    """
    return Request(
        prompt=prompt,
        max_tokens=given.max_tokens,
        temperature=given.temperature if given.HasField("temperature") else 1.0,
        top_k=given.top_k,
        top_p=given.top_p if given.HasField("top_p") else 1.0,
        seed=given.seed if given.HasField("seed") else None,
        stop_tokens=stop_tokens,
        stop=tuple(given.stop),
        num_samples=given.num_samples if given.HasField("num_samples") else 1,
        priority=given.priority,
        deadline_s=deadline_s,
        on_swap=_on_swap(given.on_swap),
    )


def _on_swap(value: int) -> OnSwap:
    policies = pb.GenerateRequest.OnSwap
    if value not in policies.values():
        raise ValueError(f"on_swap ({value}) must be one of {', '.join(policies.keys())}.")
    return cast(OnSwap, policies.Name(value).lower())


def _deadline(left_s: float | None) -> float | None:
    """Of a request whose call has so long left."""
    return None if left_s is None else max(left_s, 1e-3)


def reply_of(index: int, part: Delta) -> pb.GenerateReply:
    """The message of what came of a sample."""
    return pb.GenerateReply(
        sample=index,
        tokens=part.tokens.tolist(),
        logprobs=part.logprobs.tolist(),
        raw_logprobs=part.raw_logprobs.tolist(),
        versions=part.versions.tolist(),
        text=part.text or "",
        finish_reason=(part.finish_reason or "running").upper(),
        restarted=part.restarted,
    )


def _retry_after(seconds: float) -> tuple[tuple[str, str], ...]:
    return ((RETRY_KEY, str(max(1, round(1e3 * seconds)))),)


async def _end(context: Context, outcome: str) -> None:
    """The status of a call whose request did not come to its own end."""
    if outcome == "deadline":
        await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "the call's deadline has passed.")
    if outcome == "interrupted":
        await context.abort(grpc.StatusCode.UNAVAILABLE, "the server ended before this was finished.")

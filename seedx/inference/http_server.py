"""OpenAI's /v1/completions and /v1/chat/completions, /v1/models, /healthz and /metrics over a decode service.

Other pages in a browser cannot use it: there is no CORS, bodies must be application/json, and where only this machine
may connect, the Host header must name it, which a rebound DNS name does not. aiohttp cancels a handler whose client
goes away, which leaves the stream's block and so frees the slots.
"""

from __future__ import annotations

import dataclasses
import math
import re
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Any

from aiohttp import web

from seedx import security
from seedx.inference import decode_metrics, openai_replies
from seedx.inference.decode_service import RETRY_AFTER_S, DecodeService, UnavailableError
from seedx.inference.openai_replies import Choice, Replies
from seedx.inference.openai_requests import ApiError, Asked, parse_chat, parse_completion
from seedx.inference.requests import Delta, QueueFullError, Request

MAX_BODY_BYTES = 4 << 20
_COMPLETIONS, _CHAT = "/v1/completions", "/v1/chat/completions"
_PROTOCOLS = {_COMPLETIONS: "completions", _CHAT: "chat"}  # for the metrics
_TO_THE_END = 2**31 - 1  # max_tokens where none is given: the context ends the completion
_FIELDS = {name: name for name in ("prompt", "messages", "max_tokens", "temperature", "top_k", "top_p", "seed", "stop")}
_FIELDS["num_samples"] = "n"  # the scheduler's names -> the API's

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class HttpApi:
    """The routes.

    Args:
        service: Does the work.
        token: That every request but /healthz must carry; None: none.
        local_only: Whether the server listens on loopback, so that the Host header must name it.
    """

    def __init__(self, service: DecodeService, token: str | None, local_only: bool) -> None:
        self._service, self._token, self._local_only = service, token, local_only
        self._created = int(time.time())

    def app(self) -> web.Application:
        """For an `aiohttp.web.AppRunner` with `handler_cancellation`."""
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[self._guard])
        app.router.add_get("/healthz", self._health)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/v1/models/{name:.+}", self._model)
        app.router.add_post(_COMPLETIONS, self._completions)
        app.router.add_post(_CHAT, self._chat)
        return app

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Lets nobody in who must not, and turns refusals into OpenAI's error objects."""
        try:
            self._admit(request)
        except ApiError as error:
            protocol = _PROTOCOLS.get(request.path)
            if protocol is not None and request.method == "POST":
                self._service.metrics.ended(protocol, "unauthenticated" if error.status == 401 else "invalid")
            return _refusal(error)
        try:
            return await handler(request)
        except ApiError as error:
            return _refusal(error)
        except web.HTTPRequestEntityTooLarge:
            return _refusal(ApiError(413, f"the body is larger than {MAX_BODY_BYTES:,} bytes."))
        except web.HTTPException as error:
            return _refusal(ApiError(error.status, f"{request.method} {request.path}: {error.reason}."))

    def _admit(self, request: web.Request) -> None:
        host = _with_port(request.host)
        if self._local_only and (host.startswith("unix:") or not security.is_local(host)):
            raise ApiError(403, f"host {request.host[:100]!r} is not this machine; connect to localhost or 127.0.0.1.")
        given = (("authorization", request.headers.get("Authorization", "")),)
        if request.path != "/healthz" and not security.authorized(given, self._token):
            message = "missing or wrong token; send it as `Authorization: Bearer TOKEN`."
            raise ApiError(401, message, code="invalid_api_key")
        if request.method == "POST" and request.content_type != "application/json":
            raise ApiError(415, f"content type {request.content_type[:100]!r} must be application/json.")

    async def _health(self, _: web.Request) -> web.Response:
        live = self._service.is_live
        return web.Response(text="ok\n" if live else "not serving\n", status=200 if live else 503)

    async def _metrics(self, _: web.Request) -> web.Response:
        return web.Response(body=self._service.metrics.text(), headers={"Content-Type": decode_metrics.CONTENT_TYPE})

    async def _models(self, _: web.Request) -> web.Response:
        listed = [self._described()] if self._service.name else []
        return web.json_response({"object": "list", "data": listed})

    async def _model(self, request: web.Request) -> web.Response:
        self._check_model(request.match_info["name"])
        return web.json_response(self._described())

    def _described(self) -> dict[str, Any]:
        return {"id": self._service.name, "object": "model", "created": self._created, "owned_by": "seedx"}

    def _check_model(self, name: str | None) -> None:
        if name is not None and name != self._service.name:
            message = f"the model {name[:100]!r} is not here; {self._service.name!r} is."
            raise ApiError(404, message, param="model", code="model_not_found")

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, parse_completion, _PROTOCOLS[_COMPLETIONS])

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, parse_chat, _PROTOCOLS[_CHAT])

    async def _answer(self, request: web.Request, parse: Callable[[bytes], Asked], protocol: str) -> web.StreamResponse:
        try:
            asked, requests = await self._read(request, parse, protocol)
            replies = Replies(
                chat=bool(asked.messages),
                model=self._service.name,
                logprobs=asked.logprobs,
                tokenizer=self._service.tokenizer,
            )
            async with self._service.open(protocol, requests) as stream, aclosing(stream.parts()) as parts:
                if asked.stream:
                    return await _stream(request, asked, replies, requests, parts)
                choices = await _gathered(requests, parts)
            return web.json_response(replies.whole(choices, _prompt_tokens(requests)))
        except ValueError as error:
            raise _refused(error) from None
        except QueueFullError as error:
            raise ApiError(429, str(error), code="rate_limit_exceeded", retry_after_s=error.retry_after_s) from None
        except UnavailableError as error:
            raise ApiError(503, str(error), retry_after_s=RETRY_AFTER_S) from None

    async def _read(
        self, request: web.Request, parse: Callable[[bytes], Asked], protocol: str
    ) -> tuple[Asked, list[Request]]:
        """What is asked for."""
        with self._service.reading(protocol, ApiError, web.HTTPRequestEntityTooLarge):
            asked = parse(await _body(request))
            self._service.check_serving()
            self._check_model(asked.model)
            return asked, await self._requests(asked)

    async def _requests(self, asked: Asked) -> list[Request]:
        """A request for each prompt."""
        if asked.messages:
            prompts = [await self._service.encode_chat(asked.messages)]
        else:
            prompts = [await self._service.encode(p) if isinstance(p, str) else p for p in asked.prompts]
        common = Request(
            prompt=(),
            max_tokens=_TO_THE_END if asked.max_tokens is None else asked.max_tokens,
            stop_tokens=self._service.tokenizer.eos_ids,
            **asked.options,
        )
        return [dataclasses.replace(common, prompt=prompt) for prompt in prompts]


async def _body(request: web.Request) -> bytes:
    try:
        return await request.read()
    except web.RequestPayloadError as error:  # compressed, it says, but it is not, or cut off
        raise ApiError(400, f"the body cannot be read: {error}") from None


async def _gathered(requests: Sequence[Request], parts: AsyncGenerator[tuple[int, Delta]]) -> list[Choice]:
    """All choices, complete."""
    choices = [Choice() for _ in range(sum(request.num_samples for request in requests))]
    async for index, part in parts:
        choice, new = choices[index], _choice(part)
        choice.text += new.text
        choice.tokens += new.tokens
        choice.logprobs += new.logprobs
        choice.finish_reason = new.finish_reason
    return choices


async def _stream(
    request: web.Request,
    asked: Asked,
    replies: Replies,
    requests: Sequence[Request],
    parts: AsyncGenerator[tuple[int, Delta]],
) -> web.StreamResponse:
    """Server-sent events; a failure on the way is one more event, since the status is gone already."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await response.prepare(request)
    tokens = 0
    try:
        async for index, part in parts:
            new = _choice(part)
            tokens += len(new.tokens)
            if new.text or new.finish_reason or asked.logprobs:
                await response.write(replies.chunk(index, new))
        if asked.include_usage:
            await response.write(replies.usage_chunk(_prompt_tokens(requests), tokens))
    except UnavailableError as error:
        await response.write(openai_replies.event(ApiError(503, str(error)).body()))
    await response.write(openai_replies.DONE)
    await response.write_eof()
    return response


def _choice(part: Delta) -> Choice:
    if part.finish_reason not in (None, "stop", "length"):
        raise UnavailableError("the server ended before this was finished.")
    return Choice(part.text or "", part.tokens.tolist(), part.raw_logprobs.tolist(), part.finish_reason)


def _prompt_tokens(requests: Sequence[Request]) -> int:
    return sum(len(request.prompt) for request in requests)


def _refused(error: ValueError) -> ApiError:
    """The refusal of a request; its message begins with the scheduler's name of the field."""
    name = re.match(r"\w*", str(error))[0]  # type: ignore[unsupported-operation]  it always matches
    field = _FIELDS.get(name)
    return ApiError(400, str(error) if field is None else f"{field}{str(error)[len(name) :]}", param=field)


def _refusal(error: ApiError) -> web.Response:
    headers = {}
    if error.retry_after_s is not None:
        headers["Retry-After"] = str(math.ceil(error.retry_after_s))
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return web.json_response(error.body(), status=error.status, headers=headers)


def _with_port(host: str) -> str:
    """A Host header, whose port may be missing, as an address."""
    return host if host.rpartition(":")[2].isdecimal() and not host.endswith("]") else f"{host}:80"

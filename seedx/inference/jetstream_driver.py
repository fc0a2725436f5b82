"""JetStream's driver and gRPC service, with what a server needs beside: checked requests, cancellation, and failures
that are told.

JetStream 0.2.2 kills its whole process without a word to anyone if one of its threads raises; puts a beginning-of-
sequence token before every list of tokens; cuts prompts that are too long, and goes on with a wrong length; and
generates to the end for clients that are gone. Each is mended in the method that it overrides here; all else is
JetStream's own code.
"""

from __future__ import annotations

import dataclasses
import queue
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

import grpc
import jax
import numpy as np

from seedx.inference.jetstream_engine import JetStreamEngine
from seedx.inference.jetstream_shims import orchestrator, token_utils
from seedx.inference.requests import Request
from seedx.threads import Crew
from seedx.types import Tree


class CancellableRequest(orchestrator.ActiveRequest):
    """A request whose slot is free after the next token if its client is gone."""

    def enqueue_samples(self, generated_samples: list[Any]) -> None:
        """Hands on the tokens of a step; for the driver."""
        if self.return_channel.cancelled():
            self.complete[:] = True  # which the driver looks at next
        else:
            super().enqueue_samples(generated_samples)


class JetStreamDriver(orchestrator.Driver):
    """Prefills and generates; its threads run from the start until `stop`.

    Args:
        crew: Told of the first exception in a thread; `live` is false then.
        prefill_engines: Those that compute prompts.
        generate_engines: Those that generate; None: the same ones, which do both in turn.
        max_waiting: Requests that wait to be prefilled.
    """

    def __init__(
        self,
        crew: Crew,
        prefill_engines: Sequence[JetStreamEngine],
        generate_engines: Sequence[JetStreamEngine] | None = None,
        max_waiting: int = 1024,
    ) -> None:
        self._crew, self._max_waiting = crew, max_waiting
        generating = generate_engines or prefill_engines
        self._tokenizer, self._vocab_size = generating[0].tokenizer, generating[0].engine.config.vocab_size
        self._max_prompt = min(engine.max_prompt for engine in [*prefill_engines, *generating])
        super().__init__(
            prefill_engines=list(prefill_engines),
            generate_engines=list(generating),
            prefill_params=[engine.load_params() for engine in prefill_engines],
            generate_params=[engine.load_params() for engine in generating],
            interleaved_mode=generate_engines is None,
            jax_padding=False,
        )

    def publish(self, version: int, params: Tree) -> None:
        """New weights for all engines, which each takes before its next prefill or step.

        Raises what `LiveWeights.publish` raises.
        """
        for holder in dict.fromkeys(self._prefill_params + self._generate_params):
            holder.publish(version, params)

    def place_request_on_prefill_queue(self, request: orchestrator.ActiveRequest) -> None:
        """Takes a request.

        Raises:
            ValueError: it cannot be done; names the field.
            queue.Full: too many wait.
        """
        content = request.prefill_content
        if isinstance(content, str):
            content = self._tokenizer.encode(content, add_bos=not request.history_path)
        Request(tuple(content), request.max_tokens).check(self._vocab_size, self._max_prompt + 1, has_tokenizer=False)
        if self._prefill_backlog.qsize() >= self._max_waiting:
            raise queue.Full
        fields = {field.name: getattr(request, field.name) for field in dataclasses.fields(request)}
        super().place_request_on_prefill_queue(CancellableRequest(**{**fields, "prefill_content": content}))

    def _process_prefill_content(
        self, request: orchestrator.ActiveRequest, tokenizer: Any, is_bos: bool, max_prefill_length: int
    ) -> tuple[jax.Array | np.ndarray, int]:
        """Pads the tokens, which have their BOS if they want one, and counts them."""
        del is_bos
        tokens = np.asarray(request.prefill_content, np.int32)
        return token_utils.pad_tokens(
            tokens,
            tokenizer.bos_id,
            tokenizer.pad_id,
            is_bos=False,
            max_prefill_length=max_prefill_length,
            jax_padding=self._jax_padding,
        )

    # ---- failures: JetStream's threads would kill the process; these stop the driver, and say why

    def _prefill_thread(self, idx: int) -> None:
        self._guard(super()._prefill_thread, idx)

    def _transfer_thread(self, idx: int) -> None:
        self._guard(super()._transfer_thread, idx)

    def _generate_thread(self, idx: int) -> None:
        self._guard(super()._generate_thread, idx)

    def _detokenize_thread(self, idx: int) -> None:
        self._guard(super()._detokenize_thread, idx)

    def _guard(self, body: Callable[[int], None], idx: int) -> None:
        try:
            body(idx)
        except Exception as error:
            if self.live:  # else it is a consequence of the end
                self.live = False
                self._crew.fail(error)


class JetStreamService(orchestrator.LLMOrchestrator):
    """JetStream's service; a request that cannot be done is INVALID_ARGUMENT, and names the field."""

    async def Decode(self, request: Any, context: grpc.aio.ServicerContext) -> AsyncGenerator[Any]:  # noqa: N802
        """Streams the tokens of a request."""
        if request.WhichOneof("content") is None:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "content is missing: text_content or token_content.")
        try:
            async for reply in super().Decode(request, context):
                yield reply
        except ValueError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))

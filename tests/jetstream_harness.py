"""Our engine under JetStream's drivers, in this process; without google-jetstream tests that import it are skipped."""

import asyncio
import functools
import importlib.util
import os
import threading

import numpy as np
import pytest
from decode_harness import make_engine, make_params

if importlib.util.find_spec("jetstream") is None:
    reason = "google-jetstream is not installed; see docs/jetstream.md"
    if "jetstream" in os.environ.get("SEEDX_REQUIRE", "").split():
        raise ModuleNotFoundError(f"SEEDX_REQUIRE names jetstream, and {reason}")
    pytest.skip(reason, allow_module_level=True)

from seedx.inference.jetstream_engine import JetStreamEngine
from seedx.inference.jetstream_shims import jetstream_pb2, orchestrator
from seedx.weights import Weights

DecodeRequest, TokenContent = jetstream_pb2.DecodeRequest, jetstream_pb2.DecodeRequest.TokenContent
TextContent = jetstream_pb2.DecodeRequest.TextContent


class Letters:
    """Token n is character 64 + n; token 1 stands before every text."""

    vocab_size, bos_id, eos_ids, pad_id = 64, 1, (), 0

    def encode(self, text, add_bos=True, parse_special=False):
        return [self.bos_id] * add_bos + [ord(letter) - 64 for letter in text]

    def literal(self, text):
        return text

    def token_bytes(self, token):
        return bytes([64 + token])

    def decode(self, tokens):
        return "".join(chr(64 + token) for token in tokens)


class SteppedEngine(JetStreamEngine):
    """Generates only as often as it is let, or breaks."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.permits = threading.Semaphore(0)
        self.error = None
        self.made = 0

    def generate(self, params, decode_state):
        if self.error is not None:
            raise self.error
        assert self.permits.acquire(timeout=60)
        self.made += 1
        return super().generate(params, decode_state)


@functools.cache
def shared_engine():
    """One compiled engine for all tests of a process, which use it in turn."""
    engine = make_engine(steps=1)
    engine.warm_up(Weights(0, make_params(0)))
    return engine


def make_jetstream(kind=JetStreamEngine, *, engine=None, **options):
    return kind(engine or shared_engine(), Weights(0, make_params(0)), Letters(), **options)


def stock_driver(prefill, generate=None):
    """JetStream's own driver, nothing overridden."""
    generating = generate or prefill
    return orchestrator.Driver(
        [prefill], [generating], [prefill.load_params()], [generating.load_params()], interleaved_mode=generate is None
    )


async def decode(service, prompt, max_tokens, on_message=lambda number: None):
    """Tokens of each sample, without gRPC."""
    content = {"text_content": TextContent(text=prompt)} if isinstance(prompt, str) else {}
    content = content or {"token_content": TokenContent(token_ids=prompt)}
    messages = []
    async for reply in service.Decode(DecodeRequest(max_tokens=max_tokens, **content), None):
        messages.append(reply.stream_content.samples)
        on_message(len(messages))
    return [[token for samples in messages for token in samples[g].token_ids] for g in range(len(messages[0]))]


def decode_all(driver, prompts, max_tokens, service=orchestrator.LLMOrchestrator):
    """Samples of all prompts, asked for at once; stops the driver."""

    async def gather():
        try:
            return await asyncio.gather(*[decode(service(driver), prompt, max_tokens) for prompt in prompts])
        finally:
            await asyncio.to_thread(driver.stop)

    return asyncio.run(gather())


def generate(engine, state, steps):
    """Tokens int32 `[steps, rows]` and versions of the same shape."""
    results = []
    for _ in range(steps):
        state, result = engine.generate(engine.params, state)
        results.append(np.array(result.convert_to_numpy().data))
    return np.stack(results)[:, :, 0], np.stack(results)[:, :, 3]


def prefill(engine, prompt):
    """As JetStream's driver calls it."""
    padded = np.zeros(engine.max_prefill_length, np.int32)
    padded[: len(prompt)] = prompt
    return engine.prefill(params=engine.params, padded_tokens=padded, true_length=len(prompt))

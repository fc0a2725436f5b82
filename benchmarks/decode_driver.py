"""What scheduling costs: host time for each delivered token outside `generate`, ours against JetStream's driver.

    pip install -e ".[test,jetstream]" -c constraints.txt && pip install --no-deps google-jetstream==0.2.2
    python benchmarks/decode_driver.py

Both serve the same requests on the same engine: the random model of benchmarks/decode.py, 32 slots, one step a
dispatch, 128 requests of 16 prompt tokens and 64 new ones, all there from the start. `stream` is our scheduler with
listeners, which get every token as it comes; `driver` is JetStream's, whose channels one coroutine each reads; `whole`
is our scheduler without listeners, as for learning. JetStream's log is off, and neither has a network.

Host time is the CPU time of all Python threads less what they spend inside of `generate`; XLA's threads, which compute,
do not count. `host` has prefill and insertion in it, `host_outside_engine` leaves them out: they start, and partly are,
the computation of prompts. `wall` is the time of the whole run less that of as many bare calls of `generate` that are
waited for one by one; it is negative where the host works while the device does. Contenders take turns, and figures are
medians. Prints one line for each figure: RESULT <name> <value> <unit>. Target: `host_stream_over_driver` <= 0.33.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np

from seedx.bpe import byte_tokenizer
from seedx.inference.engine import Engine, Placement
from seedx.inference.jetstream_driver import JetStreamDriver
from seedx.inference.jetstream_engine import JetStreamEngine
from seedx.inference.jetstream_shims import orchestrator
from seedx.inference.memory_plan import plan_memory
from seedx.inference.requests import Delta, Request
from seedx.inference.scheduler import Scheduler
from seedx.networks import transformer
from seedx.networks.transformer_config import TransformerConfig
from seedx.threads import Crew, spare_the_collector
from seedx.types import Tree
from seedx.weights import Weights

SLOTS, REQUESTS, NEW_TOKENS, PROMPT_TOKENS = 32, 128, 64, 16
TOKENS = REQUESTS * NEW_TOKENS
TINY = TransformerConfig(
    vocab_size=64, width=128, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=32, ffn_width=256, max_length=128
)
PROMPTS = np.random.default_rng(0).integers(0, TINY.vocab_size, (REQUESTS, PROMPT_TOKENS)).tolist()


class Took(NamedTuple):
    """Seconds of one run."""

    host: float
    host_outside_engine: float
    wall: float


class Meter:
    """CPU seconds of Python's threads, and of their calls of an engine."""

    def __init__(self, engine: Engine | JetStreamEngine) -> None:
        self._in = dict.fromkeys(("generate", "prefill", "insert"), 0.0)
        self._generates = 0
        for name in self._in:
            setattr(engine, name, partial(self._timed, name, getattr(engine, name)))

    def _timed(self, name: str, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        start = time.thread_time()
        made = method(*args, **kwargs)
        self._in[name] += time.thread_time() - start
        self._generates += name == "generate"
        return made

    def measure(self, run: Callable[[], None], step_s: float) -> Took:
        """A run; the threads that it needs live before and after."""
        self._in, self._generates = dict.fromkeys(self._in, 0.0), 0
        threads = threading.enumerate()
        before, start = _cpu_s(threads), time.perf_counter()
        run()
        wall, after = time.perf_counter() - start, _cpu_s(threads)
        cpu = sum(seconds - before.get(thread, 0.0) for thread, seconds in after.items())
        return Took(cpu - self._in["generate"], cpu - sum(self._in.values()), wall - step_s * self._generates)


def _cpu_s(threads: list[threading.Thread]) -> dict[threading.Thread, float]:
    """Of each thread that lives."""
    seconds = {}
    for thread in threads:
        with contextlib.suppress(ProcessLookupError):
            if thread.ident:
                seconds[thread] = time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
    return seconds


def serve_whole(scheduler: Scheduler) -> None:
    """All requests; completions come back whole."""
    handles = [scheduler.submit(Request(tuple(prompt), NEW_TOKENS, temperature=0.0)) for prompt in PROMPTS]
    assert sum(len(handle.result()[0].tokens) for handle in handles) == TOKENS


def serve_stream(scheduler: Scheduler) -> None:
    """All requests; tokens come one by one."""
    came: list[int] = []

    def listener(delta: Delta) -> None:
        came.append(len(delta.tokens))

    handles = [scheduler.submit(Request(tuple(prompt), NEW_TOKENS, temperature=0.0), listener) for prompt in PROMPTS]
    for handle in handles:
        handle.result()
    assert sum(came) == TOKENS


def serve_driver(driver: orchestrator.Driver) -> None:
    """All requests; tokens come one by one."""

    async def read(prompt: list[int]) -> int:
        channel = orchestrator.async_multifuture.AsyncMultifuture()
        request = orchestrator.ActiveRequest(
            max_tokens=NEW_TOKENS, prefill_content=prompt, is_client_side_tokenization=True, return_channel=channel
        )
        driver.place_request_on_prefill_queue(request)
        return sum([len(samples[0].token_ids) async for samples in channel])

    async def read_all() -> int:
        return sum(await asyncio.gather(*[read(prompt) for prompt in PROMPTS]))

    assert asyncio.run(read_all()) == TOKENS


def bare_step_s(engine: Engine, weights: Weights) -> float:
    """Seconds of a step of all slots that is waited for."""
    prompts = [np.asarray(prompt, np.int32) for prompt in PROMPTS[:SLOTS]]
    prefixes = engine.prefill(weights, prompts)
    engine.insert([Placement(slot, prefix, 0.0, 0, 1.0, 0) for slot, prefix in enumerate(prefixes)])
    start = time.perf_counter()
    for _ in range(NEW_TOKENS):
        engine.generate(weights).fetch()
    took = time.perf_counter() - start
    engine.free(np.arange(SLOTS))
    return took / NEW_TOKENS


def make_engine(params: Tree) -> Engine:
    """With every program compiled."""
    engine = Engine(TINY, plan_memory(TINY, params, 10**9, max_slots=SLOTS), steps_per_dispatch=1)
    engine.warm_up(Weights(0, params))
    return engine


def main() -> None:
    """Rounds of all contenders."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    weights = Weights(0, transformer.init_params(TINY, jax.random.key(0)))
    ours, bare = make_engine(weights.params), make_engine(weights.params)
    theirs = JetStreamEngine(make_engine(weights.params), weights, byte_tokenizer())
    theirs.warm_up()
    meters = {"ours": Meter(ours), "theirs": Meter(theirs)}
    scheduler, driver = Scheduler(ours, weights), JetStreamDriver(Crew(), [theirs])
    scheduler.start()
    contenders = {
        "driver": (meters["theirs"], partial(serve_driver, driver)),
        "stream": (meters["ours"], partial(serve_stream, scheduler)),
        "whole": (meters["ours"], partial(serve_whole, scheduler)),
    }
    spare_the_collector()
    took: dict[str, list[Took]] = {name: [] for name in contenders}
    for number in range(rounds + 1):
        step_s = bare_step_s(bare, weights)
        for name, (meter, serve) in contenders.items():
            measured = meter.measure(serve, step_s)
            if number:  # the first round warms up
                took[name].append(measured)
    scheduler.close()
    driver.stop()
    medians = {name: Took(*np.median(values, axis=0)) for name, values in took.items()}
    for name, median in medians.items():
        for figure, seconds in median._asdict().items():
            print(f"RESULT {figure}_{name}_us_per_token {seconds / TOKENS * 1e6:.2f} us", flush=True)
    for name in ("stream", "whole"):
        for figure in ("host", "host_outside_engine"):
            ratio = getattr(medians[name], figure) / getattr(medians["driver"], figure)
            print(f"RESULT {figure}_{name}_over_driver {ratio:.3f} of the driver's", flush=True)


if __name__ == "__main__":
    main()

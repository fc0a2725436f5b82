"""`smollm2`: 32 greedy completions of 64 tokens by SmolLM2-135M-Instruct, against Hugging Face's generate.

Both compute in float32 from the same GGUF file. Prompts are random tokens, and no completion ends early. `--int8` has
an engine with int8 weights take turns with them.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial

from decode_peer import Peer
from decode_setup import random_prompts, ready_engine, result, result_load, smollm2, start_scheduler, take_turns

from seedx.inference.requests import Request
from seedx.inference.scheduler import Scheduler
from seedx.networks.smollm2 import smollm2_file

BATCH, NEW_TOKENS, PROMPT_TOKENS, LENGTH, STEPS = 32, 64, 32, 128, 8
TOKENS = BATCH * NEW_TOKENS


def run(plan: argparse.Namespace) -> None:
    """Rounds of all."""
    config, params = smollm2()
    prompts = random_prompts(config.vocab_size, [PROMPT_TOKENS] * BATCH)
    engine = ready_engine(config, params, BATCH, LENGTH, STEPS)
    scheduler = start_scheduler(engine, params)
    contenders: dict[str, Callable[[], float]] = {"seedx": partial(time_scheduler, scheduler, prompts)}
    small = None
    if plan.int8:
        small = start_scheduler(ready_engine(config, params, BATCH, LENGTH, STEPS, int8=True), params)
        contenders["int8"] = partial(time_scheduler, small, prompts)
    peer = Peer(plan.peer_python, {"gguf": str(smollm2_file())}) if plan.peer_python else None
    if peer:
        contenders["generate"] = partial(peer.time, prompts, NEW_TOKENS)
    seconds = take_turns(contenders, plan.rounds)
    scheduler.close()
    if small:
        small.close()
        result("smollm2_int8_over_full", seconds["seedx"] / seconds["int8"], "of float32")
        for name, gap in zip(("mean", "max"), small.logprob_gap or (), strict=True):
            result(f"smollm2_int8_logprob_gap_{name}", gap, "nats")
    if peer:
        peer.close()
        result("smollm2_over_generate", seconds["generate"] / seconds["seedx"], "of generate")
    for name, values in seconds.items():
        result(f"smollm2_{name}_tokens_per_s", TOKENS / values, "tokens/s")
    result("smollm2_compilations", engine.compilations, "programs")
    result_load()


def time_scheduler(scheduler: Scheduler, prompts: list[tuple[int, ...]]) -> float:
    """Seconds from the first submission to the last completion."""
    start = time.perf_counter()
    handles = [scheduler.submit(Request(prompt, NEW_TOKENS, temperature=0.0)) for prompt in prompts]
    completions = [handle.result() for handle in handles]
    took = time.perf_counter() - start
    assert sum(len(done.tokens) for (done,) in completions) == TOKENS
    return took

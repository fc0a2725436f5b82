"""`load`: SmolLM2-135M under Poisson arrivals of mixed lengths, against static batches of Hugging Face's generate.

Prompts have 16 to 128 tokens and completions 8 to 128, log-uniform, all from a seed; no completion ends early. They
come at the rate that keeps 32 slots busy by Little's law: 32 over the mean time that a request takes when 32 of them
come at once. Useful tokens are those that were asked for; the time is from the first arrival to the last token.
generate takes the same requests 32 at a time, in the order of their arrival, as if they had all come already: padded to
the longest prompt, run until the longest completion. Time to first token is from a request's arrival, waiting included.
"""

from __future__ import annotations

import argparse
import time
from typing import NamedTuple

import numpy as np
from decode_peer import Peer
from decode_setup import log_uniform, random_prompts, ready_engine, result, result_load, smollm2, start_scheduler

from seedx.inference.requests import Delta, Request
from seedx.inference.scheduler import Scheduler
from seedx.networks.smollm2 import smollm2_file

SLOTS, REQUESTS, LENGTH, STEPS = 32, 96, 256, 8
PROMPT_TOKENS, COMPLETION_TOKENS = (16, 128), (8, 128)


class Served(NamedTuple):
    """Seconds from the first arrival to the last token, and of each request from its arrival."""

    seconds: float
    first_token_s: list[float]
    whole_s: list[float]


class Load(NamedTuple):
    """Requests and when they come, seconds from the first."""

    requests: list[Request]
    arrivals_s: np.ndarray

    @property
    def tokens(self) -> int:
        """That are asked for."""
        return sum(request.max_tokens for request in self.requests)


def run(plan: argparse.Namespace) -> None:
    """Pairs of a load and its static batches."""
    config, params = smollm2()
    scheduler = start_scheduler(ready_engine(config, params, SLOTS, LENGTH, STEPS), params)
    peer = Peer(plan.peer_python, {"gguf": str(smollm2_file())}) if plan.peer_python else None
    at_once = make_load(config.vocab_size, SLOTS, np.inf, seed=0)
    serve(scheduler, at_once)  # warms up
    whole_s = serve(scheduler, at_once).whole_s
    rate = SLOTS / float(np.mean(whole_s))
    ours, theirs, waits, occupancy = [], [], [], []
    for number in range(plan.rounds):
        load = make_load(config.vocab_size, REQUESTS, rate, seed=number + 1)
        scheduler.figures()  # begins an interval
        served = serve(scheduler, load)
        occupancy.append(scheduler.figures()["decode/occupancy"])
        ours.append(load.tokens / served.seconds)
        waits.append(served.first_token_s)
        if peer:
            theirs.append(load.tokens / serve_static(peer, load))
    scheduler.close()
    result("load_requests_per_s", rate, "requests/s")
    result("load_occupancy", np.array(occupancy), "of the slots, mean over dispatches")
    result("load_seedx_useful_tokens_per_s", np.array(ours), "tokens/s")
    for percent in (50, 99):
        result(f"load_first_token_p{percent}_s", np.percentile(np.concatenate(waits), percent), "s")
    if peer:
        peer.close()
        result("load_static_useful_tokens_per_s", np.array(theirs), "tokens/s")
        result("load_over_static", np.array(ours) / np.array(theirs), "of static batches")
    result_load()


def make_load(vocab_size: int, count: int, rate: float, seed: int) -> Load:
    """Requests at `rate` per second."""
    rng = np.random.default_rng(seed)
    prompts = random_prompts(vocab_size, log_uniform(rng, *PROMPT_TOKENS, count), seed)
    new_tokens = log_uniform(rng, *COMPLETION_TOKENS, count)
    requests = [Request(prompt, new, temperature=0.0) for prompt, new in zip(prompts, new_tokens, strict=True)]
    gaps = rng.exponential(1 / rate, count)
    return Load(requests, np.cumsum(gaps) - gaps[0])


def serve(scheduler: Scheduler, load: Load) -> Served:
    """All requests, each at its time."""
    listeners, handles, start = [], [], time.perf_counter()
    for request, arrival in zip(load.requests, load.arrivals_s, strict=True):
        time.sleep(max(start + arrival - time.perf_counter(), 0))
        listeners.append(Stopwatch(start + arrival))
        handles.append(scheduler.submit(request, listeners[-1]))
    completions = [handle.result()[0] for handle in handles]
    seconds = time.perf_counter() - start
    assert sum(len(completion.tokens) for completion in completions) == load.tokens
    return Served(seconds, [one.first_token_s for one in listeners], [one.whole_s for one in listeners])


class Stopwatch:
    """A listener that notes when the first token and the last one came, seconds from `arrival`."""

    def __init__(self, arrival: float) -> None:
        self._arrival = arrival
        self.first_token_s = self.whole_s = 0.0

    def __call__(self, delta: Delta) -> None:
        if len(delta.tokens):
            self.whole_s = time.perf_counter() - self._arrival
            self.first_token_s = self.first_token_s or self.whole_s


def serve_static(peer: Peer, load: Load) -> float:
    """Seconds that generate computes."""
    batches = [load.requests[i : i + SLOTS] for i in range(0, len(load.requests), SLOTS)]
    return sum(
        peer.time([request.prompt for request in batch], max(request.max_tokens for request in batch))
        for batch in batches
    )

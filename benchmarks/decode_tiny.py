"""`tiny`: 64 streams of 64 new tokens, against the bare jitted scan and Hugging Face's generate.

Sampling and log-probabilities are on. The bare scan is one program that takes the same steps without engine, scheduler
or requests; generate has the same shapes.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from decode_peer import Peer
from decode_setup import TINY, random_prompts, ready_engine, result, start_scheduler, take_turns, tiny_params
from jax.sharding import Mesh, PartitionSpec

from seedx import sharding
from seedx.inference.requests import Request
from seedx.inference.sampling import Sampling, sample, uniforms
from seedx.inference.scheduler import Scheduler
from seedx.networks import transformer
from seedx.types import Tree

STREAMS, NEW_TOKENS, PROMPT_TOKENS, LENGTH = 64, 64, 16, 128
TOKENS = STREAMS * NEW_TOKENS
LLAMA = {
    "vocab_size": TINY.vocab_size,
    "hidden_size": TINY.width,
    "intermediate_size": TINY.ffn_width,
    "num_hidden_layers": TINY.num_layers,
    "num_attention_heads": TINY.num_heads,
    "num_key_value_heads": TINY.num_kv_heads,
    "max_position_embeddings": TINY.max_length,
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}


def run(plan: argparse.Namespace) -> None:
    """Rounds of all contenders."""
    jax.config.update("jax_num_cpu_devices", plan.devices)
    params = tiny_params()
    prompts = random_prompts(TINY.vocab_size, [PROMPT_TOKENS] * STREAMS)
    contenders: dict[str, Callable[[], float]] = {
        "scan": partial(time_scan, make_scan(), params, np.array(prompts, np.int32))
    }
    engines, schedulers = [], []
    for devices in sorted({1, plan.devices}):
        engines.append(ready_engine(TINY, params, STREAMS, LENGTH, plan.steps, devices=devices))
        schedulers.append(start_scheduler(engines[-1], params))
        contenders[f"seedx_{devices}"] = partial(time_scheduler, schedulers[-1], prompts)
    peer = Peer(plan.peer_python, {"llama": LLAMA}) if plan.peer_python else None
    if peer:
        contenders["generate"] = partial(peer.time, prompts, NEW_TOKENS, sample=True)
    seconds = take_turns(contenders, plan.rounds)
    for scheduler in schedulers:
        scheduler.close()
    if peer:
        peer.close()
    for name, values in seconds.items():
        result(f"tiny_{name}_tokens_per_s", TOKENS / values, "tokens/s")
        for ours in seconds:
            if ours.startswith("seedx") and not name.startswith("seedx"):
                result(f"tiny_{ours}_over_{name}", values / seconds[ours], f"of {name}")
    result("tiny_compilations", sum(engine.compilations for engine in engines), "programs")


def time_scheduler(scheduler: Scheduler, prompts: list[tuple[int, ...]]) -> float:
    """Seconds for all streams, from the first submission to the last completion."""
    requests = [Request(prompt, NEW_TOKENS, seed=i) for i, prompt in enumerate(prompts)]
    start = time.perf_counter()
    handles = [scheduler.submit(request) for request in requests]
    completions = [handle.result() for handle in handles]
    took = time.perf_counter() - start
    assert sum(len(done.logprobs) for (done,) in completions) == TOKENS
    return took


def make_scan(mesh: Mesh | None = None) -> Callable[..., tuple]:
    """Prefill and all steps of all streams as one program; the devices of a mesh share the streams."""

    def decode(params: Tree, prompts: jax.Array, sampling: Sampling) -> tuple:
        rows, prompt_length = prompts.shape
        cache = transformer.init_cache(TINY, rows, LENGTH)
        positions = jnp.broadcast_to(jnp.arange(prompt_length - 1, dtype=jnp.int32), (rows, prompt_length - 1))
        cache = transformer.apply(TINY, params, prompts[:, :-1], positions, cache=cache)[1]

        def step(carry: tuple, at: tuple[jax.Array, jax.Array]) -> tuple:
            (cache, token), (position, uniform) = carry, at
            here = jnp.full((rows, 1), position, jnp.int32)
            logits, cache = transformer.apply(TINY, params, token[:, None], here, cache=cache)
            drawn = sample(logits[:, 0], sampling, uniform)
            return (cache, drawn.token), drawn

        steps = prompt_length - 1 + jnp.arange(NEW_TOKENS, dtype=jnp.int32)
        seeds = jnp.broadcast_to(sampling.seed, (NEW_TOKENS, rows))
        random = uniforms(seeds, jnp.broadcast_to(steps[:, None] + 1, seeds.shape))
        return jax.lax.scan(step, (cache, prompts[:, -1]), (steps, random))[1]

    if mesh is None:
        return jax.jit(decode)
    rows = sharding.split_rows(mesh).spec
    specs = (PartitionSpec(), rows, rows)
    return jax.jit(
        jax.shard_map(decode, mesh=mesh, in_specs=specs, out_specs=PartitionSpec(None, *rows), check_vma=False)
    )


def time_scan(scan: Callable[..., tuple], params: Tree, prompts: np.ndarray) -> float:
    """Seconds of the bare scan."""
    ones = np.ones(STREAMS, np.float32)
    sampling = Sampling(ones, np.zeros(STREAMS, np.int32), ones, np.arange(STREAMS, dtype=np.uint32))  # type: ignore[arg-type]
    start = time.perf_counter()
    jax.tree.map(np.asarray, scan(params, prompts, sampling))
    return time.perf_counter() - start

"""A small model, engines over it, and the oracle: a plain loop of full forward passes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from seedx.inference.engine import Engine
from seedx.inference.memory_plan import plan_memory
from seedx.inference.requests import Request
from seedx.inference.scheduler import Scheduler
from seedx.networks import transformer
from seedx.networks.transformer_config import TransformerConfig
from seedx.weights import Weights

CONFIG = TransformerConfig(
    vocab_size=64, width=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, ffn_width=64, max_length=64
)
MARGIN = 1e-4  # top-two logits closer than this may change places


def make_params(seed, config=CONFIG):
    """Random weights, larger than at initialisation: texts differ and margins are wide."""
    return jax.tree.map(lambda leaf: leaf * 8, _init(config)(seed))


@functools.cache
def _init(config):
    return jax.jit(lambda seed: transformer.init_params(config, jax.random.key(seed)))


def make_engine(config=CONFIG, *, slots=4, chunk=16, steps=2, prefix_cache_bytes=1 << 20, mesh=None, **options):
    plan = plan_memory(
        config,
        jax.eval_shape(lambda: transformer.init_params(config, jax.random.key(0))),
        10**9,
        max_slots=slots,
        chunk=chunk,
        prefix_cache_bytes=prefix_cache_bytes,
    )
    return Engine(config, plan, mesh=mesh, steps_per_dispatch=steps, **options)


@functools.cache
def warm_engine():
    """One engine for all tests of a process, idle between them."""
    engine = make_engine()
    engine.warm_up(Weights(0, make_params(0)))
    return engine


def greedy(prompt, max_tokens=8, **options):
    return Request(tuple(int(token) for token in prompt), max_tokens, temperature=0.0, **options)


def random_prompts(count, low, high, seed=0, vocab=CONFIG.vocab_size):
    rng = np.random.default_rng(seed)
    return [tuple(rng.integers(0, vocab, n).tolist()) for n in rng.integers(low, high + 1, count)]


class Serving:
    """A scheduler on an engine, closed at the end."""

    def __init__(self, engine, params, version=0, **options):
        self.scheduler = Scheduler(engine, Weights(version, params), **options)

    def __enter__(self):
        self.scheduler.start()
        return self.scheduler

    def __exit__(self, kind, *_):
        self.scheduler.close(drain=kind is None, timeout_s=60)


@functools.cache
def _forward(config):
    positions = jnp.arange(config.max_length, dtype=jnp.int32)[None]
    return jax.jit(
        lambda params, tokens: transformer.apply(config, params, tokens, jnp.broadcast_to(positions, tokens.shape))[0]
    )


def full_logits(params, texts, config=CONFIG):
    """Logits `[N, max_length, V]` of whole texts in one forward pass without a cache."""
    tokens = np.zeros((len(texts), config.max_length), np.int32)
    for row, text in zip(tokens, texts, strict=True):
        row[: len(text)] = text
    return np.asarray(_forward(config)(params, tokens))


def near_misses(params, prompt, tokens, config=CONFIG):
    """Checks greedy tokens against full forward passes; how many of them differ, all within the margin."""
    text = [*prompt, *tokens.tolist()]
    logits = full_logits(params, [text], config)[0, len(prompt) - 1 : len(text) - 1]
    best, misses = logits.max(axis=1), 0
    for k in range(len(tokens)):
        if tokens[k] != logits[k].argmax():
            assert best[k] - logits[k, tokens[k]] < MARGIN, f"token {k} of a completion is not the likeliest"
            misses += 1
    return misses


def logprob_bound(logits):
    """Design decision 15: what two programs may differ by, float32."""
    return 2e-6 * max(1.0, float(np.abs(logits).max()))

"""Our decode engine as an `Engine` of google-jetstream 0.2.2, so that JetStream's own driver and server run on it.

JetStream's slot j with G samples is our slots j*G to j*G + G-1, filled from one prefix. All tokens of a prompt but the
last are prefilled; the last is the first input of `generate`, as JetStream 0.2.2 wants no token from `prefill`.

What JetStream calls params is a `JetStreamParams` here. It is read once in a call: every token is made by one version.

Threading: as JetStream's driver calls it: `prefill` on one thread, all else on one other.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Int32

from seedx import sharding
from seedx.checks import require
from seedx.inference.engine import Engine, Placement
from seedx.inference.engine import Prefix as Prompt
from seedx.inference.jetstream_shims import engine_api, tokenizer_pb2
from seedx.inference.jetstream_tokenizer import JetStreamTokenizer
from seedx.inference.live_weights import LiveWeights
from seedx.inference.requests import Request
from seedx.networks.transformer import Cache
from seedx.tokenizer import Tokenizer
from seedx.types import Tree
from seedx.weights import Weights

VERSION_COLUMN = 3  # of the results, beside JetStream's tokens, validity and lengths: the weights' version
_SMALLEST_BUCKET = 16  # of JetStream's, which are its doubles


class JetStreamParams:
    """`LiveWeights` that JetStream's threads hold for ever; raises what these raise. Any thread may use it."""

    def __init__(self, engine: Engine, weights: Weights) -> None:
        self._live = LiveWeights(engine, weights)
        self._lock = threading.Lock()

    def publish(self, version: int, params: Tree) -> None:
        """New weights for all calls that begin from now on; raises what `LiveWeights.publish` raises.

        Keys and values that were computed before stay.
        """
        self._live.publish(Weights(version, params))
        with self._lock:
            if self._live.swap():
                self._live.release()

    def latest(self) -> Weights:
        """The newest version."""
        return self._live.current


class Prefix(NamedTuple):
    """A prompt that was prefilled. The driver deletes its device arrays after the insertion."""

    rows: Cache  # keys and values of all its tokens but the last, in row 0 of each leaf
    prompt: np.ndarray | jax.Array  # int32 [n]


@dataclass(eq=False)
class Slots:
    """JetStream's decode state: what `init_decode_state` began and `insert` and `generate` went on with.

    The arrays on the device are the engine's, which has one such state at a time.
    """

    prompts: np.ndarray  # int32 [S], tokens of each prompt; 0: a free slot
    lengths: np.ndarray  # int32 [S], tokens made since
    inserted: int = field(default=0)  # prompts so far


class JetStreamEngine(engine_api.Engine):
    """A JetStream engine over ours.

    Args:
        engine: With one step a dispatch; warmed up by `warm_up` of this class.
        weights: The first version.
        tokenizer: Of the model.
        name: Of the model.
        sampling: How all completions are sampled, for JetStream has no such option: temperature, top_k, top_p and seed
            of a request, whose other fields are not read. None: the likeliest token.
        samples_per_slot: G.

    Raises:
        ConfigError: the engine makes several tokens a dispatch, its slots are no multiple of G, or hold no bucket.
        ValueError: the weights are not finite.
    """

    def __init__(
        self,
        engine: Engine,
        weights: Weights,
        tokenizer: Tokenizer,
        *,
        name: str = "seedx",
        sampling: Request | None = None,
        samples_per_slot: int = 1,
    ) -> None:
        plan, steps = engine.plan, engine.steps_per_dispatch
        require(
            steps == 1, f"steps_per_dispatch ({steps}) must be 1: JetStream ends completions after whole dispatches."
        )
        require(
            plan.num_slots % samples_per_slot == 0,
            f"the {plan.num_slots} slots must be a multiple of samples_per_slot ({samples_per_slot}).",
        )
        require(plan.length >= _SMALLEST_BUCKET, f"a slot's length ({plan.length}) must be at least 16 for JetStream.")
        self.engine = engine
        self.params = JetStreamParams(engine, weights)
        self.tokenizer, self._name = tokenizer, name
        self._sampling = sampling or Request((0,), 1, temperature=0.0, seed=0)
        self._samples_per_slot = samples_per_slot
        self._results = jax.jit(_results, out_shardings=sharding.replicated(engine.mesh))
        self._slots: Slots | None = None

    # ---- what the driver calls

    def load_params(self, *args: Any, **kwargs: Any) -> JetStreamParams:  # noqa: ARG002
        """The holder of the weights; always the same."""
        return self.params

    def prefill(
        self,
        *,
        params: JetStreamParams,
        existing_prefix: Prefix | None = None,
        padded_tokens: jax.Array | np.ndarray,
        true_length: int,
    ) -> Prefix:
        """Computes a prompt, in chunks if it is long.

        Args:
            params: Read once.
            existing_prefix: Its tokens go before; they are computed anew, but for chunks in the prefix cache.
            padded_tokens: int32 `[bucket]`.
            true_length: How many of them are the prompt's.

        Raises:
            ValueError: the prompt is empty or too long.
        """
        weights, engine = params.latest(), self.engine
        if not 0 < true_length <= len(padded_tokens):
            raise ValueError(f"true_length ({true_length}) must be from 1 to the {len(padded_tokens)} padded tokens.")
        prompt = np.asarray(padded_tokens, np.int32)[:true_length]
        if existing_prefix is not None:
            prompt = np.concatenate([np.asarray(existing_prefix.prompt), prompt])
        if len(prompt) > self.max_prompt:
            raise ValueError(f"the prompt has {len(prompt)} tokens; 1 to {self.max_prompt} are allowed.")
        if engine.is_long(prompt):
            long = engine.begin(weights, prompt)
            while not long.ready:
                engine.extend(weights, long)
            rows = long.staged
        else:
            whole = (
                prompt if len(prompt) > 1 else np.repeat(prompt, 2)
            )  # a single token's rows: `generate` writes them anew
            rows = engine.prefill(weights, [whole])[0].rows
        assert rows is not None
        return Prefix(rows, prompt)

    def init_decode_state(self, *args: Any, **kwargs: Any) -> Slots:  # noqa: ARG002
        """Empty slots; the decode state before, if there was one, is void."""
        num_slots = self.engine.plan.num_slots
        self.engine.free(np.arange(num_slots))
        self._slots = Slots(np.zeros(num_slots, np.int32), np.zeros(num_slots, np.int32))
        return self._slots

    def insert(self, prefix: Prefix, decode_state: Slots, slot: int) -> Slots:
        """Copies a prompt to all G samples of a slot; what the slot held is gone."""
        self._check(decode_state)
        prompt = Prompt(0, np.asarray(prefix.prompt), prefix.rows, 0)
        first, how = slot * self._samples_per_slot, self._sampling
        self.engine.insert(
            [
                Placement(first + g, prompt, how.temperature, how.top_k, how.top_p, self._seed(decode_state, g))
                for g in range(self._samples_per_slot)
            ]
        )
        mine = slice(first, first + self._samples_per_slot)
        decode_state.prompts[mine], decode_state.lengths[mine] = len(prompt.prompt), 0
        decode_state.inserted += 1
        return decode_state

    def generate(self, params: JetStreamParams, decode_state: Slots) -> tuple[Slots, Any]:
        """One token for every slot.

        JetStream does not say when a completion is done, so a slot goes on until it is filled anew or full.
        """
        self._check(decode_state)
        weights, engine, slots = params.latest(), self.engine, decode_state
        full = (slots.prompts > 0) & (slots.prompts + slots.lengths >= engine.plan.length)
        if full.any():
            engine.free(np.flatnonzero(full))
            slots.prompts[full] = 0
        valid = slots.prompts > 0
        slots.lengths += valid
        packed = engine.generate(weights).packed
        versions = np.full_like(slots.lengths, weights.version)
        with engine.launching:
            data = self._results(packed, np.stack([valid, slots.lengths, versions]))
        return slots, engine_api.ResultTokens(data, (0, 1), (1, 2), (2, 3), self._samples_per_slot)

    def get_prefix_destination_sharding(self) -> Prefix:
        """Where a `Prefix` must live."""
        return Prefix(self.engine.prompt_shardings, sharding.replicated(self.mesh))  # type: ignore[bad-argument-type]

    def get_tokenizer(self) -> Any:
        """The tokenizer's name; `build_tokenizer` needs no file."""
        return tokenizer_pb2.TokenizerParameters(path=self._name)

    def build_tokenizer(self, metadata: Any) -> JetStreamTokenizer:  # noqa: ARG002
        """The model's tokenizer."""
        return JetStreamTokenizer(self.tokenizer)

    # ---- what it is

    @property
    def max_concurrent_decodes(self) -> int:
        """JetStream's slots."""
        return self.engine.plan.num_slots // self._samples_per_slot

    @property
    def samples_per_slot(self) -> int:
        """G, completions of a prompt."""
        return self._samples_per_slot

    @property
    def max_prefill_length(self) -> int:
        """The largest of JetStream's buckets that a slot holds."""
        return _SMALLEST_BUCKET << (self.engine.plan.length // _SMALLEST_BUCKET).bit_length() - 1

    @property
    def max_prompt(self) -> int:
        """Tokens of the longest prompt: it fits the largest bucket, and leaves room for a token."""
        return min(self.max_prefill_length, self.engine.plan.length - 1)

    @property
    def mesh(self) -> Mesh:
        """The devices of the engine."""
        return self.engine.mesh

    @property
    def colocated_cpus(self) -> None:
        """None: no others are used."""

    def warm_up(self) -> None:
        """Compiles every program."""
        weights = self.params.latest()
        self.engine.warm_up(weights)
        _, results = self.generate(self.params, self.init_decode_state())
        jax.block_until_ready(results.data)

    def _check(self, decode_state: Slots) -> None:
        if decode_state is not self._slots:
            raise ValueError("this decode state is void: the engine has begun another one since.")

    def _seed(self, slots: Slots, sample: int) -> int:
        """Of a sample of the prompt that is being inserted."""
        mixed = np.random.SeedSequence([self._sampling.sample_seed(0), slots.inserted, sample])
        return int(mixed.generate_state(1)[0])


def _results(packed: Int32[Array, "1 3 S"], columns: Int32[Array, "3 S"]) -> Int32[Array, "S 4"]:
    """Tokens, validity, lengths and versions of all rows in one array."""
    return jnp.concatenate([packed[0, :1], columns]).T

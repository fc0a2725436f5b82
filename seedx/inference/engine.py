"""The decode engine: prefill of prompts, insertion into slots, and generate, which steps all slots at once.

All tokens of a prompt but its last are prefilled; the last one is the first input of `generate`, so that every token of
a completion is made by one program of one shape. The cache of all slots is as long as the longest text in them needs,
one of a few lengths that are all compiled in `warm_up`.

Threading: one thread calls the methods. A computation is launched under `launching` (see `sharding.Meshes`).
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from seedx import sharding
from seedx.inference.decode_programs import IDLE, Order, make_programs, prompt_shardings
from seedx.inference.memory_plan import MemoryPlan, fit
from seedx.inference.prefix_cache import PrefixCache
from seedx.inference.slot_state import SlotState
from seedx.inference.warm_up import Progress, compile_all, run_all
from seedx.networks import int8, transformer
from seedx.networks.transformer import Cache
from seedx.networks.transformer_config import TransformerConfig
from seedx.types import Tree
from seedx.weights import Weights


class Prefix(NamedTuple):
    """A prompt that is ready for any number of slots."""

    version: int  # of the weights that computed it
    prompt: np.ndarray  # int32 [n]
    rows: Cache | None  # keys and values of prompts in a row, one of which is this one's; None if it has one token
    first: int  # where it begins in them


class Placement(NamedTuple):
    """A prompt for a slot, and how its completion is sampled."""

    slot: int
    prefix: Prefix
    temperature: float
    top_k: int
    top_p: float
    seed: int  # uint32


@dataclass
class LongPrompt:
    """A prompt of more than a chunk on its way: `staged` holds the keys and values of its first `done` tokens."""

    version: int
    prompt: np.ndarray
    staged: Cache
    done: int

    @property
    def ready(self) -> bool:
        """Whether only the last token is left."""
        return self.done >= len(self.prompt) - 1

    def prefix(self) -> Prefix:
        """The prompt, once it is ready."""
        return Prefix(self.version, self.prompt, self.staged, 0)


class StepResult(NamedTuple):
    """What one dispatch made, still on the device."""

    version: int
    packed: jax.Array  # int32 [K, 3, S]: tokens, and the bits of both log-probabilities

    def fetch(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Waits; tokens int32, log-probabilities under the sampling and the raw distribution float32, `[K, S]` each."""
        packed = np.asarray(self.packed)
        return packed[:, 0], packed[:, 1].view(np.float32), packed[:, 2].view(np.float32)


class Engine:
    """Slots on the device, and the programs over them.

    Args:
        config: Of the model.
        plan: Shapes and bounds.
        mesh: Of `sharding.serve_mesh`; None: the first device.
        steps_per_dispatch: K, tokens that each slot gets from one `generate`.
        launching: Held while a computation is launched.
        layout: Where each parameter lives; None: spread over the whole mesh.
    """

    def __init__(
        self,
        config: TransformerConfig,
        plan: MemoryPlan,
        *,
        mesh: Mesh | None = None,
        steps_per_dispatch: int = 8,
        launching: contextlib.AbstractContextManager | None = None,
        layout: Tree = None,
    ) -> None:
        self.config, self.plan, self.steps_per_dispatch = config, plan, steps_per_dispatch
        self.launching = launching or contextlib.nullcontext()
        self._mesh = mesh or sharding.serve_mesh()
        self._programs = make_programs(config, plan, steps_per_dispatch, self._mesh)
        self._slots = SlotState(self._programs, plan, self._programs.fresh())
        self._orders = np.zeros((len(Order), plan.num_slots), np.int32)
        self._position = np.full(plan.num_slots, IDLE, np.int64)  # of each slot's last token, after what was launched
        axes, shapes = transformer.logical_axes(config), transformer.abstract_params(config)
        self._layout = layout or sharding.serve_shardings(self._mesh, axes, shapes)
        quantize = partial(int8.quantize, axes=axes)
        int8_shapes, int8_axes = jax.eval_shape(quantize, shapes), int8.quantized_axes(axes)
        self._int8_layout = sharding.serve_shardings(self._mesh, int8_axes, int8_shapes)
        self._quantize = jax.jit(quantize, out_shardings=self._int8_layout)
        block = jax.eval_shape(lambda: transformer.init_cache(config, 1, plan.chunk, plan.cache_dtype))
        block_bytes = sharding.row_groups(self._mesh) * sum(map(sharding.held_bytes, jax.tree.leaves(block)))
        self.prefixes = PrefixCache(plan.chunk, block_bytes, plan.prefix_cache_bytes)
        self._compiled = 0

    @property
    def mesh(self) -> Mesh:
        """The devices that it computes on."""
        return self._mesh

    @property
    def layout(self) -> Tree:
        """Where each parameter lives, before it is quantised."""
        return self._layout

    @property
    def prompt_shardings(self) -> Tree:
        """Where the keys and values of a prompt must live to be inserted."""
        return prompt_shardings(self.config, self.plan.cache_dtype, self._mesh)

    @property
    def compilations(self) -> int:
        """Programs that were compiled after `warm_up`; a running engine compiles none."""
        return self._programs.compiled() - self._compiled

    @property
    def span(self) -> int:
        """Tokens that the cache of all slots holds now."""
        return self._slots.span

    @property
    def busy(self) -> int:
        """Slots with a completion."""
        return int(np.count_nonzero(self._position < IDLE))

    def place(self, params: Tree) -> Tree:
        """Parameters in the layout of this engine; the same tree if they have it already."""
        if sharding.layout_of(params) == self._int8_layout:
            return params
        with self.launching:
            return sharding.reshard(params, self._layout)

    def quantize(self, params: Tree) -> Tree:
        """Placed parameters as it computes with them: int8 if its plan says so; the same tree if they are."""
        if not self.plan.int8 or sharding.layout_of(params) == self._int8_layout:
            return params
        with self.launching:
            return self._quantize(params)

    # ---- prompts

    def is_long(self, prompt: np.ndarray) -> bool:
        """Whether a prompt takes more than one prefill."""
        return len(prompt) - 1 > self.plan.chunk

    def prefill(self, weights: Weights, prompts: Sequence[np.ndarray]) -> list[Prefix]:
        """Computes prompts, int32 `[n]`, none of them long; those of similar length together."""
        prefixes = [Prefix(weights.version, prompt, None, 0) for prompt in prompts]
        by_batch: dict[tuple[int, int], list[int]] = defaultdict(list)
        for i, prompt in enumerate(prompts):
            if len(prompt) > 1:
                by_batch[self.plan.batch(len(prompt) - 1)].append(i)
        for (most, longest), members in by_batch.items():
            while members:
                rows, length = most, longest
                if len(members) == 1 or 4 * len(members) < most:  # few prompts do not pay for a whole batch
                    rows, length = 1, self.plan.bucket(len(prompts[members[0]]) - 1)
                batch, members = members[:rows], members[rows:]
                computed = self._prefill_batch(weights.params, [prompts[i] for i in batch], rows, length)
                for row, i in enumerate(batch):
                    prefixes[i] = prefixes[i]._replace(rows=computed, first=row * length)
        return prefixes

    def _prefill_batch(self, params: Tree, prompts: list[np.ndarray], rows: int, length: int) -> Cache:
        tokens = np.zeros((rows, length), np.int32)
        positions = np.full((rows, length), IDLE, np.int32)
        for row, prompt in enumerate(prompts):
            tokens[row, : len(prompt) - 1] = prompt[:-1]
            positions[row] = np.arange(length)
        with self.launching:
            return self._programs.prefill(params, tokens, positions)

    def begin(self, weights: Weights, prompt: np.ndarray) -> LongPrompt:
        """Starts a long prompt, from as many of its first chunks as are known."""
        chunk = self.plan.chunk
        with self.launching:
            staged = self._programs.fresh_staging(fit(len(prompt), self.plan.spans))
            known = self.prefixes.find(weights.version, prompt[:-1])
            for i, block in enumerate(known):
                staged = self._programs.write_block(staged, block, np.int32(i * chunk))
        return LongPrompt(weights.version, prompt, staged, len(known) * chunk)

    def extend(self, weights: Weights, long: LongPrompt) -> None:
        """Computes the next chunk of a long prompt, with the weights that it was begun with."""
        chunk, first = self.plan.chunk, long.done
        tokens = np.zeros((1, chunk), np.int32)
        part = long.prompt[first : min(first + chunk, len(long.prompt) - 1)]
        tokens[0, : len(part)] = part
        with self.launching:
            long.staged, block = self._programs.extend(weights.params, long.staged, tokens, np.int32(first))
        long.done += len(part)
        if len(part) == chunk:
            self.prefixes.add(weights.version, long.prompt[: long.done], block)

    # ---- slots

    def insert(self, placements: Sequence[Placement]) -> None:
        """Puts prompts into slots; what the slots held is gone."""
        groups: dict[int, list[Placement]] = defaultdict(list)
        for placement in placements:
            self._order(placement)
            if placement.prefix.rows is not None:
                groups[id(placement.prefix.rows)].append(placement)
        for group in groups.values():
            self._copy(group)

    def _order(self, placement: Placement) -> None:
        slot, last = placement.slot, len(placement.prefix.prompt) - 1
        self._position[slot] = last
        column = self._orders[:, slot]
        column[Order.PLACED] = 1
        column[Order.TOKEN] = placement.prefix.prompt[-1]
        column[Order.POSITION] = last
        column[Order.TOP_K] = placement.top_k
        floats = np.array([placement.temperature, placement.top_p], np.float32)
        column[[Order.TEMPERATURE, Order.TOP_P]] = floats.view(np.int32)
        column[Order.SEED] = np.uint32(placement.seed).view(np.int32)

    def _copy(self, group: list[Placement]) -> None:
        places = np.zeros((3, self.plan.num_slots), np.int32)
        for column, (slot, prefix, *_) in zip(places.T, group, strict=False):
            column[:] = prefix.first, len(prefix.prompt) - 1, slot
        with self.launching:
            self._slots.make_room(self._longest)
            self._slots.insert(group[0].prefix.rows, places, len(group))

    def free(self, slots: Sequence[int] | np.ndarray) -> None:
        """Takes the completions out of slots."""
        self._position[slots] = IDLE
        self._orders[Order.PLACED, slots] = 1
        self._orders[Order.POSITION, slots] = IDLE

    def generate(self, weights: Weights, members: np.ndarray | None = None) -> StepResult:
        """K tokens for every slot that takes part; what the other slots give means nothing.

        Args:
            weights: What it is computed with.
            members: bool `[S]`, the slots that take part; None: all.
        """
        taking_part = self._position < IDLE
        if members is not None:
            taking_part &= members
        self._position[taking_part] += self.steps_per_dispatch
        orders = self._orders.copy()
        orders[Order.MEMBER] = taking_part
        with self.launching:
            self._slots.make_room(self._longest)
            packed = self._slots.generate(weights.params, orders)
            packed.copy_to_host_async()
        self._orders[Order.PLACED] = 0
        return StepResult(weights.version, packed)

    @property
    def _longest(self) -> int:
        """Tokens of the longest text in a slot."""
        return int(np.max(self._position, initial=0, where=self._position < IDLE)) + 1

    def warm_up(self, weights: Weights, progress: Progress | None = None) -> None:
        """Compiles and runs every program with every shape that can come; slots must be idle.

        Args:
            weights: Of any version.
            progress: Called whenever a program is ready, with how many are and of how many.
        """
        params = self.quantize(self.place(weights.params))
        with self.launching:
            self._slots.make_room(0)
            compile_all(self._programs, self.plan, params, progress)
            run_all(self._programs, self.plan, params, self._slots)
        self._compiled = self._programs.compiled()

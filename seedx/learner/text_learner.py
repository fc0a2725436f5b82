"""The learner of an LLM run: takes groups of completions, updates, publishes.

Threading: one thread calls `step`; `state` is replaced as a whole, so any thread may read it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from seedx import sharding
from seedx.grpo_config import GrpoConfig, TextLearnerConfig
from seedx.learner.learner import NonFiniteError
from seedx.learner.packing import microbatches
from seedx.learner.text_batch import Sequences, TokenBatch, pack_batch, sequences_of
from seedx.learner.text_gae import with_gae
from seedx.learner.text_update import Sums, make_optimizer, make_update
from seedx.learner.token_logprobs import Model
from seedx.learner.trainable import Trainable
from seedx.learner.value_head import value_figures
from seedx.learner.zero import by_rows
from seedx.metrics import Metrics
from seedx.replay.items import Ragged
from seedx.types import Tree

_ROUND = 16  # rows have a multiple of this length, so that they divide into chunks


class TextState(NamedTuple):
    """What learning has come to."""

    params: Tree  # of the policy, float32: the published version
    trained: Tree  # what updates change: see `Trainable`
    frozen: Tree  # what they only read
    opt_state: Tree
    updates: int
    env_steps: int  # completions that were learned from
    tokens: int  # of these
    position: int  # of the first prompt that was not learned from


class Shapes(NamedTuple):
    """Of the batches.

    Attributes:
        max_tokens: Of a completion.
        row_tokens: L.
        rows: Of a part.
    """

    max_tokens: int
    row_tokens: int
    rows: int


class MemoryNeeds(NamedTuple):
    """Bytes on each device."""

    weights: int
    frozen: int
    optimizer: int
    gradients: int
    temporary: int  # intermediate results of a program

    def describe(self, devices: int, zero: int | None) -> str:
        """For people.

        Args:
            devices: That learn.
            zero: The preset; None: nothing is split.
        """
        parts = ", ".join(f"{name} {num_bytes / 1e6:,.1f} MB" for name, num_bytes in self._asdict().items())
        where = f" on each of {devices} devices" if devices > 1 else ""
        where += "" if zero is None else f" with ZeRO-{zero}"
        return f"learning: {sum(self) / 1e6:,.1f} MB{where} ({parts})"


def shapes_of(
    config: TextLearnerConfig, group_size: int, max_prompt_tokens: int, max_tokens: int, row_groups: int
) -> Shapes:
    """Those with which `config.microbatches` parts hold any batch.

    Args:
        config: Of the learner.
        group_size: G.
        max_prompt_tokens: Of a prompt.
        max_tokens: Of a completion.
        row_groups: What the rows of a part are a multiple of.
    """
    group = max_prompt_tokens + group_size * max_tokens
    # In rows of two prompts attention costs no more than that of each sequence alone, however short completions are.
    wanted = config.row_tokens or min(2 * max_prompt_tokens, group)
    row_tokens = -(-max(wanted, max_prompt_tokens + max_tokens) // _ROUND) * _ROUND
    together = min((row_tokens - max_prompt_tokens) // max_tokens, group_size)  # that fit, however long they are
    families = config.batch_size * -(-group_size // together)
    rows = -(-families // (row_tokens // (max_prompt_tokens + together * max_tokens)))
    return Shapes(max_tokens, row_tokens, -(-rows // (config.microbatches * row_groups)) * row_groups)


class TextLearner:
    """Turns groups into new versions of the weights.

    Args:
        model: How log-probabilities are computed.
        loss: Of parts of a batch: (policy's parameters, frozen ones, part, value head or None) -> loss, sums.
        trainable: What is trained.
        settings: Of the loss.
        config: Of the learner.
        mesh: Of `sharding.serve_mesh`.
        params: Like those of the model, where they live.
        shapes: Of the batches.
        publish: Given every version and its parameters.
        metrics: Where figures go.
        run_dir: Where the batch is saved that made an update non-finite.
        launching: Held while a computation is launched (see `sharding.Meshes`).

    Attributes:
        state: Set before the first step.
        lag_sum: Over the updates of this session, of each batch's mean lag.
    """

    state: TextState

    def __init__(
        self,
        model: Model,
        loss: Callable[[Tree, Tree, TokenBatch, Tree], tuple[jax.Array, dict[str, jax.Array]]],
        trainable: Trainable,
        settings: GrpoConfig,
        config: TextLearnerConfig,
        mesh: Mesh,
        params: Tree,
        shapes: Shapes,
        publish: Callable[[int, Tree], None],
        metrics: Metrics,
        run_dir: Path,
        launching: contextlib.AbstractContextManager[Any] | None = None,
    ) -> None:
        self._settings, self._config, self._shapes = settings, config, shapes
        self._launching = launching or contextlib.nullcontext()
        self.lag_sum = 0.0
        self._publish, self._metrics, self._run_dir = publish, metrics, run_dir
        self.trainable, self._rows = trainable, sharding.split_rows(mesh)

        def loss_of_trained(trained: Tree, frozen: Tree, batch: TokenBatch) -> tuple[jax.Array, dict[str, jax.Array]]:
            return loss(trainable.policy(trained, frozen), frozen, batch, trainable.head(trained))

        self._policy = trainable.policy_program(params)
        begun = trainable.begin(params)
        self._programs = make_update(loss_of_trained, make_optimizer(config), mesh, *begun, zero=config.zero)
        self._before: Any = None  # program
        if trainable.value_head or settings.old == "recomputed":
            inputs = (sharding.layout_of(params), sharding.replicated(mesh), self._rows)
            self._before = jax.jit(by_rows(partial(_before, model, settings), mesh, inputs, self._rows))

    def begin(self, params: Tree) -> TextState:
        """The state of a run that begins with these parameters of the model."""
        trained, frozen = self.trainable.begin(params)
        return TextState(self._policy(trained, frozen), trained, frozen, self._programs.init(trained), 0, 0, 0, 0)

    def compile(self) -> MemoryNeeds:
        """Compiles the programs for these shapes, without running them; what an update takes of memory."""
        state, lowered = self.state, self.lower(self.state)
        sums = lowered["gradient"].out_info
        compiled = {name: program.compile() for name, program in lowered.items()}
        self._before = compiled.pop("before", None)
        self._programs = self._programs._replace(**compiled)
        temporary = max(program.memory_analysis().temp_size_in_bytes for program in compiled.values())
        held = sharding.bytes_per_device
        gradients = held(sums.gradient) * (1 + (self._config.microbatches > 1))
        weights = held((state.params, state.trained))
        return MemoryNeeds(weights, held(state.frozen), held(state.opt_state), gradients, temporary)

    def lower(self, state: TextState) -> dict[str, Any]:
        """The programs of an update by name, as they can be compiled.

        Args:
            state: Of a run; shapes with shardings are enough.
        """
        _, row_tokens, rows = self._shapes
        batch = batch_shapes(rows, row_tokens)
        programs: Any = self._programs
        gradient = programs.gradient.lower(state.trained, state.frozen, batch)
        sums, rate = gradient.out_info, jax.ShapeDtypeStruct((), np.float32)
        step = programs.step.lower(state.trained, state.opt_state, sums.gradient, sums.loss, rate)
        lowered = {"gradient": gradient, "step": step}
        if self._config.microbatches > 1:
            lowered["add"] = programs.add.lower(sums, sums)
        if self._before is not None:
            lowered["before"] = self._before.lower(state.params, self.trainable.head(state.trained), batch)
        return lowered

    def step(self, items: Ragged) -> None:
        """Updates on one batch of groups and publishes the result.

        Raises:
            NonFiniteError: the update would have been; the state is unchanged.
        """
        started = time.monotonic()
        state, shapes = self.state, self._shapes
        sequences = sequences_of(items, self._settings)
        batch, packing = pack_batch(
            sequences,
            self._settings,
            version=state.updates,
            max_tokens=shapes.max_tokens,
            row_tokens=shapes.row_tokens,
            rows_multiple=shapes.rows,
        )
        if self._before is not None:
            batch = self._with_what_was_before(batch)
        if self.trainable.value_head:
            batch = with_gae(batch, packing, sequences, self._settings)
        parts = microbatches(batch, shapes.rows)
        sums = self._gradient(parts[0])
        for part in parts[1:]:
            sums = self._sum(sums, self._gradient(part))
        figures = {"loss": sums.loss, **sums.metrics}
        rate = self._config.learning_rate * min(1.0, (state.updates + 1) / (self._config.warmup_updates + 1))
        with self._launching:
            stepped = self._programs.step(state.trained, state.opt_state, sums.gradient, sums.loss, np.float32(rate))
        finite = bool(stepped.finite)  # waits
        figures = {name: float(value) for name, value in jax.device_get(figures).items()}
        if not finite:  # The same values; the optimizer's that were put in are donated.
            self.state = state._replace(opt_state=stepped.opt_state)
            raise self._non_finite(batch, figures)
        with self._launching:
            policy = self._policy(stepped.params, state.frozen)
        self.state = TextState(
            policy,
            stepped.params,
            state.frozen,
            stepped.opt_state,
            state.updates + 1,
            state.env_steps + len(sequences.lengths),
            state.tokens + int(sequences.sampled.sum()),
            int(items.state["position"].max()) + 1,
        )
        self._publish(self.state.updates, self.state.params)
        figures = means(figures) | {"grad_norm": float(stepped.grad_norm), "learning_rate": rate}
        self._record(sequences, figures, state.updates, time.monotonic() - started)

    def _gradient(self, part: TokenBatch) -> Sums:
        placed = self._placed(part)
        with self._launching:
            return self._programs.gradient(self.state.trained, self.state.frozen, placed)

    def _sum(self, total: Sums, part: Sums) -> Sums:
        with self._launching:
            return self._programs.add(total, part)

    def _with_what_was_before(self, batch: TokenBatch) -> TokenBatch:
        """The batch with what the weights say of it before the update."""
        found = []
        for part in microbatches(batch, self._shapes.rows):
            placed = self._placed(part)
            with self._launching:
                said = self._before(self.state.params, self.trainable.head(self.state.trained), placed)
            found.append(jax.device_get(said))
        return batch._replace(**{name: np.concatenate([said[name] for said in found]) for name in found[0]})

    def _placed(self, part: TokenBatch) -> TokenBatch:
        return jax.device_put(part, self._rows)

    def _record(self, sequences: Sequences, figures: dict[str, float], version: int, seconds: float) -> None:
        for name, value in figures.items():
            self._metrics.average(f"learner/{name}", value)
        lags = version - sequences.versions[sequences.sampled]
        self.lag_sum += float(lags.mean())
        self._metrics.observe("learner/lag_updates", lags)
        self._metrics.time("learner/update", seconds)
        self._metrics.count("updates")
        self._metrics.count("env_steps", len(sequences.lengths))
        self._metrics.count("completion_tokens", int(sequences.sampled.sum()))

    def _non_finite(self, batch: TokenBatch, figures: dict[str, float]) -> NonFiniteError:
        path = self._run_dir / f"non_finite_batch_{self.state.updates}.npz"
        np.savez_compressed(path, **batch._asdict())
        return NonFiniteError(
            f"update {self.state.updates + 1} is not finite: {figures}. The weights were left as before it, and its "
            f"batch is in {path}. Lower --learner.learning-rate or --learner.max-grad-norm."
        )


def batch_shapes(rows: int, row_tokens: int) -> TokenBatch:
    """Shapes and dtypes of a part of a batch."""
    dtypes = (*[np.int32] * 5, bool, bool, *[np.float32] * 6)
    return TokenBatch(*[jax.ShapeDtypeStruct((rows, row_tokens), dtype) for dtype in dtypes])


def _before(model: Model, settings: GrpoConfig, params: Tree, head: Tree, batch: TokenBatch) -> dict[str, jax.Array]:
    """Leaves of the batch that the weights before the update make; one forward pass for all of them."""
    if head is None:
        return {"old": model.logprobs(params, batch)[0]}
    logprobs, _, values = model.logprobs_and_values(params, head, batch)
    return {"value": values} | ({"old": logprobs} if settings.old == "recomputed" else {})


def means(figures: dict[str, float]) -> dict[str, float]:
    """Figures of one update out of its sums over tokens: means, greatest values, what is told of clips and values."""
    tokens = max(figures["tokens"], 1.0)
    whole = ("loss", "tokens", "gap_max", "ratio_max", "engine_gap_max")
    named = {name: value / tokens for name, value in figures.items() if name not in (*whole, "weight_squared")}
    if "value_loss" in named:
        named = value_figures(named)
    clipped = named["clipped_low"] + named["clipped_high"] + named["clipped_dual"]
    return {
        **named,
        **{name: figures[name] for name in whole},
        "clip_fraction": clipped,
        "effective_tokens": figures["weight"] ** 2 / max(figures["weight_squared"], 1e-12),
    }

"""The learner of an LLM run: takes groups of completions, updates, publishes.

Threading: one thread calls `step`; `state` is replaced as a whole, so any thread may read it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
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
from seedx.learner.text_update import Loss, Sums, make_optimizer, make_update
from seedx.learner.token_logprobs import Model
from seedx.metrics import Metrics
from seedx.replay.items import Ragged
from seedx.types import Tree


class TextState(NamedTuple):
    """What learning has come to."""

    params: Tree  # float32
    opt_state: Tree
    reference: Tree  # parameters that the policy is held to; None where nothing holds it
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
    """Bytes on all devices together."""

    weights: int
    optimizer: int
    reference: int
    gradients: int
    temporary: int  # intermediate results of the gradient

    def describe(self) -> str:
        """For people."""
        parts = ", ".join(f"{name} {num_bytes / 1e6:,.1f} MB" for name, num_bytes in self._asdict().items())
        return f"learning: {sum(self) / 1e6:,.1f} MB ({parts})"


def rows_of_a_part(config: TextLearnerConfig, group_size: int, per_row: int, row_groups: int) -> int:
    """Rows of one of the `config.microbatches` parts that hold any batch.

    Args:
        config: Of the learner.
        group_size: G.
        per_row: Sequences that a row holds, however long they are.
        row_groups: What the rows are a multiple of.
    """
    rows = -(-config.batch_size * group_size // per_row)
    return -(-rows // (config.microbatches * row_groups)) * row_groups


class TextLearner:
    """Turns groups into new versions of the weights.

    Args:
        model: How log-probabilities are computed.
        loss: Of parts of a batch.
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
        loss: Loss,
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
        self._programs = make_update(loss, make_optimizer(config), mesh, params)
        self._rows = sharding.split_rows(mesh)
        self._logprobs: Any = jax.jit(
            lambda params, batch: model.logprobs(params, batch)[0],
            in_shardings=(jax.tree.map(lambda leaf: leaf.sharding, params), self._rows),
            out_shardings=self._rows,
        )
        self.init = self._programs.init

    def compile(self) -> MemoryNeeds:
        """Compiles the programs for these shapes, without running them; what an update takes of memory."""
        state, (_, row_tokens, rows) = self.state, self._shapes
        batch = TokenBatch(*[jax.ShapeDtypeStruct((rows, row_tokens), dtype) for dtype in _DTYPES])
        gradient = self._programs.gradient.lower(state.params, state.reference, batch)  # type: ignore[attr-defined]
        sums, rate = gradient.out_info, jax.ShapeDtypeStruct((), np.float32)
        step = self._programs.step.lower(  # type: ignore[attr-defined]
            state.params, state.opt_state, sums.gradient, sums.loss, rate
        )
        compiled = gradient.compile()
        self._programs = self._programs._replace(gradient=compiled, step=step.compile())
        if self._config.microbatches > 1:
            add = self._programs.add.lower(sums, sums).compile()  # type: ignore[attr-defined]
            self._programs = self._programs._replace(add=add)
        if self._settings.old == "recomputed":
            self._logprobs = self._logprobs.lower(state.params, batch).compile()
        temporary = compiled.memory_analysis().temp_size_in_bytes * self._rows.mesh.size
        held = [sum(map(sharding.held_bytes, jax.tree.leaves(tree))) for tree in state[:3]]
        return MemoryNeeds(*held, gradients=held[0] * (1 + (self._config.microbatches > 1)), temporary=temporary)

    def step(self, items: Ragged) -> None:
        """Updates on one batch of groups and publishes the result.

        Raises:
            NonFiniteError: the update would have been; the state is unchanged.
        """
        started = time.monotonic()
        state, shapes = self.state, self._shapes
        sequences = sequences_of(items, self._settings)
        batch, _ = pack_batch(
            sequences,
            self._settings,
            version=state.updates,
            max_tokens=shapes.max_tokens,
            row_tokens=shapes.row_tokens,
            rows_multiple=shapes.rows,
        )
        parts = microbatches(batch, shapes.rows)
        if self._settings.old == "recomputed":
            parts = [part._replace(old=self._recomputed(part)) for part in parts]
        sums = self._gradient(parts[0])
        for part in parts[1:]:
            sums = self._sum(sums, self._gradient(part))
        figures = {"loss": sums.loss, **sums.metrics}
        rate = self._config.learning_rate * min(1.0, (state.updates + 1) / (self._config.warmup_updates + 1))
        with self._launching:
            stepped = self._programs.step(state.params, state.opt_state, sums.gradient, sums.loss, np.float32(rate))
        finite = bool(stepped.finite)  # waits
        figures = {name: float(value) for name, value in jax.device_get(figures).items()}
        if not finite:  # The same values; those that were put in are donated.
            self.state = state._replace(params=stepped.params, opt_state=stepped.opt_state)
            raise self._non_finite(parts, figures)
        self.state = TextState(
            stepped.params,
            stepped.opt_state,
            state.reference,
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
            return self._programs.gradient(self.state.params, self.state.reference, placed)

    def _sum(self, total: Sums, part: Sums) -> Sums:
        with self._launching:
            return self._programs.add(total, part)

    def _recomputed(self, part: TokenBatch) -> np.ndarray:
        placed = self._placed(part)
        with self._launching:
            logprobs = self._logprobs(self.state.params, placed)
        return np.asarray(logprobs)

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

    def _non_finite(self, parts: list[TokenBatch], figures: dict[str, float]) -> NonFiniteError:
        path = self._run_dir / f"non_finite_batch_{self.state.updates}.npz"
        batch = TokenBatch(*map(np.concatenate, zip(*parts, strict=True)))
        np.savez_compressed(path, **batch._asdict())
        return NonFiniteError(
            f"update {self.state.updates + 1} is not finite: {figures}. The weights were left as before it, and its "
            f"batch is in {path}. Lower --learner.learning-rate or --learner.max-grad-norm."
        )


_DTYPES = (np.int32, np.int32, np.int32, bool, bool, np.float32, np.float32, np.float32, np.float32)


def means(figures: dict[str, float]) -> dict[str, float]:
    """Figures of one update out of its sums over tokens: means, greatest values, the clip fraction."""
    tokens = max(figures["tokens"], 1.0)
    whole = ("loss", "tokens", "gap_max", "ratio_max", "engine_gap_max")
    named = {name: value / tokens for name, value in figures.items() if name not in (*whole, "weight_squared")}
    clipped = named["clipped_low"] + named["clipped_high"] + named["clipped_dual"]
    return {
        **named,
        **{name: figures[name] for name in whole},
        "clip_fraction": clipped,
        "effective_tokens": figures["weight"] ** 2 / max(figures["weight_squared"], 1e-12),
    }

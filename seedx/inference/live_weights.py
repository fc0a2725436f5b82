"""The weights that a scheduler decodes with, and those that come next.

As many versions are on the engine's devices as `memory_plan.py` has room for. Decoding holds the current one, and the
one before while requests finish on it. A version that is published waits for its swap, or replaces the one that waits,
which is dropped before anything is made of the new one. At full precision there is room for two, so while requests
finish on the version before, the new one waits as it was published, and is placed at the swap. An int8 engine has room
for a third, so a version is always quantised, and what that changes is measured, by whoever publishes it; a swap then
changes references alone. A step that was launched keeps its weights until it is done.

Threading: `publish` may be called by any thread, and one publishes at a time; all else is the scheduler's.
"""

from __future__ import annotations

import threading

import jax
import jax.numpy as jnp

from seedx.inference.engine import Engine
from seedx.inference.logprob_gap import GapMeter, LogprobGap
from seedx.types import Tree
from seedx.weights import Weights

_VERSIONS = 2**31  # tokens carry theirs as int32
_SHOWN = 8  # mismatches in a message
_CHECKED_BYTES = 64 * 2**20  # that are looked at for what is not finite in one launch


class LiveWeights:
    """Current, finishing and pending weights of an engine.

    Args:
        engine: Whose layout they get; idle.
        weights: The first version, as all are published.

    Attributes:
        current: What new tokens are made with.
        finishing: The version before, from a swap until its release.
        gap: Of the current version, if it is int8.

    Raises:
        ValueError: the weights are not finite, or the version is not from 0 to 2**31 - 1.
    """

    def __init__(self, engine: Engine, weights: Weights) -> None:
        check_version(weights.version)
        self._engine = engine
        self._finite = jax.jit(lambda leaves: jnp.all(jnp.stack([jnp.all(jnp.isfinite(leaf)) for leaf in leaves])))
        self._publishing = threading.Lock()
        self._lock = threading.Lock()  # of which versions are held
        self._newest = weights.version
        self._pending: tuple[Weights, LogprobGap | None] | None = None
        self._shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), weights.params)
        self._meter = GapMeter(engine)
        self.finishing: Weights | None = None
        self._check_finite(weights)
        self.current, self.gap = self._prepared(weights)

    def publish(self, weights: Weights) -> None:
        """Checks a version and has it wait for the next swap; the caller must never donate or change it afterwards.

        Raises:
            ValueError: no newer version or one above 2**31 - 1, other names, shapes or dtypes, or values that are not
                finite; the old ones stay.
        """
        with self._publishing:
            check_version(weights.version)
            if weights.version <= self._newest:
                raise ValueError(f"version ({weights.version}) must be greater than the newest ({self._newest}).")
            check_shapes(self._shapes, weights.params)
            self._check_finite(weights)
            with self._lock:
                self._pending = None  # so no swap comes in between, and what is free now stays so
                has_room = self._engine.plan.int8 or self.finishing is None
            self._pending = self._prepared(weights) if has_room else (weights, None)
            self._newest = weights.version

    @property
    def settled(self) -> bool:
        """Whether there is one version, and none that waits."""
        return self._pending is None and self.finishing is None

    def swap(self) -> bool:
        """Makes the pending version the current one, which is `finishing` from now on; whether that could be done.

        It cannot if nothing waits, or while requests finish on the version before.
        """
        with self._lock:
            if self._pending is None or self.finishing is not None:
                return False
            (pending, gap), self._pending = self._pending, None
            self.finishing, self.current, self.gap = self.current, self._placed(pending), gap
            return True

    def release(self) -> None:
        """Drops the version that requests finished on."""
        self.finishing = None

    def _placed(self, weights: Weights) -> Weights:
        return weights._replace(params=self._engine.place(weights.params))

    def _prepared(self, weights: Weights) -> tuple[Weights, LogprobGap | None]:
        """A version as the engine computes with it, and its gap if it is int8."""
        placed = self._placed(weights)
        if not self._engine.plan.int8:
            return placed, None
        ready = placed._replace(params=self._engine.quantize(placed.params))
        return ready, self._meter.measure(placed.params, ready)

    def _check_finite(self, weights: Weights) -> None:
        for leaves in _parts(jax.tree.leaves(weights.params)):  # between them decoding has its turn
            with self._engine.launching:
                finite = self._finite(leaves)
            if not bool(finite):
                raise ValueError(f"version {weights.version} has weights that are NaN or infinite; it is not used.")


def _parts(leaves: list[Tree]) -> list[list[Tree]]:
    """Leaves that are looked at together: few large ones, or many small ones."""
    parts: list[list[Tree]] = [[]]
    for leaf in leaves:
        if parts[-1] and sum(other.nbytes for other in parts[-1]) + leaf.nbytes > _CHECKED_BYTES:
            parts.append([])
        parts[-1].append(leaf)
    return parts


def check_version(version: int) -> None:
    """Raises ValueError if tokens cannot carry a version."""
    if not 0 <= version < _VERSIONS:
        raise ValueError(
            f"version ({version}) must be from 0 to {_VERSIONS - 1}; number versions from 0 or 1, one after the other."
        )


def check_shapes(reference: Tree, params: Tree) -> None:
    """Raises ValueError with every leaf that is missing, unexpected or of another shape or dtype than its reference."""
    want, have = (
        {
            jax.tree_util.keystr(path): (leaf.shape, str(leaf.dtype))
            for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
        }
        for tree in (reference, params)
    )
    wrong = [f"{name} is missing" for name in want.keys() - have.keys()]
    wrong += [f"{name} is unexpected" for name in have.keys() - want.keys()]
    wrong += [
        f"{name} is {have[name][1]}{list(have[name][0])}, not {want[name][1]}{list(want[name][0])}"
        for name in want.keys() & have.keys()
        if want[name] != have[name]
    ]
    if wrong:
        more = f" and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
        raise ValueError(f"these weights are not the model's: {'; '.join(sorted(wrong)[:_SHOWN])}{more}.")

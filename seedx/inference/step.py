"""The policy server's jitted functions: one forward pass over gathered slots, and attaching slots.

Everything that a slot remembers lives in device tables `[S, ...]` that the functions donate and return: the agent's
state, the slot's PRNG key, its step counter and its settings. Rows of padding point at slot S, which does not exist:
reads of it are clipped, writes dropped.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float32, Int32, UInt32

from seedx import sharding
from seedx.types import Agent, Settings, TimeStep, Tree, UnrollStateAgent


class Tables(NamedTuple):
    """What the server remembers of each slot."""

    state: Tree  # [S, ...] agent state
    key: UInt32[Array, "S 2"]
    step: Int32[Array, " S"]
    rank: Float32[Array, " S"]
    greedy: Bool[Array, " S"]


class StepOutput(NamedTuple):
    """Of one forward pass, `[B, ...]` each."""

    action: Tree
    extras: Tree
    state: Tree  # agent state before the pass, as far as it goes with unrolls


class PolicyStep(NamedTuple):
    """Jitted functions that make `Tables`, and consume them."""

    fresh: Callable[[], Tables]
    act: Callable[[Tree, Tables, Any, TimeStep], tuple[Tables, StepOutput]]
    attach: Callable[[Tables, Any, Any, Any, Any, Any, Any], Tables]


def make_policy_step(agent: Agent, num_slots: int, key: jax.Array, mesh: Mesh) -> PolicyStep:
    """The functions for so many slots.

    A row's action depends on its own key, step, state and timestep alone, never on the batch around it: the key of row
    b is fold_in(slot key, step), the slot key fold_in(fold_in(fold_in(key, actor_id), env), session).
    """
    whole, rows = sharding.replicated(mesh), sharding.split_axis(mesh, 0)
    unroll_state = agent.unroll_state if isinstance(agent, UnrollStateAgent) else lambda state: state

    def act(params: Tree, tables: Tables, slots: Int32[Array, " B"], timestep: TimeStep) -> tuple[Tables, StepOutput]:
        def gather(table: Array) -> Array:
            return table.at[slots].get(mode="clip")

        state = jax.tree.map(gather, tables.state)
        keys = jax.vmap(jax.random.fold_in)(jax.random.wrap_key_data(gather(tables.key)), gather(tables.step))
        settings = Settings(env_id=slots, rank=gather(tables.rank), greedy=gather(tables.greedy))
        action, new_state, extras = agent.act(params, state, timestep, keys, settings)
        new_tables = tables._replace(
            state=jax.tree.map(lambda table, new: table.at[slots].set(new, mode="drop"), tables.state, new_state),
            step=tables.step.at[slots].add(1, mode="drop"),
        )
        return new_tables, StepOutput(action, extras, unroll_state(state))

    def attach(
        tables: Tables,
        slots: Int32[Array, " B"],
        actor_id: Int32[Array, ""],
        envs: Int32[Array, " B"],
        session: Int32[Array, ""],
        ranks: Float32[Array, " B"],
        greedy: Bool[Array, ""],
    ) -> Tables:
        actor_key = jax.random.fold_in(key, actor_id)
        keys = jax.vmap(lambda env: jax.random.fold_in(jax.random.fold_in(actor_key, env), session))(envs)
        return tables._replace(
            key=tables.key.at[slots].set(jax.random.key_data(keys), mode="drop"),
            step=tables.step.at[slots].set(0, mode="drop"),
            rank=tables.rank.at[slots].set(ranks, mode="drop"),
            greedy=tables.greedy.at[slots].set(greedy, mode="drop"),
        )

    def fresh() -> Tables:
        return Tables(
            state=agent.initial_state(num_slots),
            key=jnp.zeros((num_slots, 2), jnp.uint32),
            step=jnp.zeros(num_slots, jnp.int32),
            rank=jnp.zeros(num_slots, jnp.float32),
            greedy=jnp.zeros(num_slots, bool),
        )

    return PolicyStep(
        fresh=jax.jit(fresh, out_shardings=whole),  # jitted: no two leaves may share a buffer that is donated
        act=jax.jit(act, in_shardings=(whole, whole, rows, rows), out_shardings=(whole, rows), donate_argnums=1),
        attach=jax.jit(attach, in_shardings=whole, out_shardings=whole, donate_argnums=0),
    )


def bucket_sizes(max_rows: int, smallest: int, multiple: int) -> list[int]:
    """The batch sizes that are compiled, each a multiple of `multiple`.

    `max_rows`, its half (what alternating groups make), and quarters of that down to `smallest`: many connections of
    one environment each are worth neither a compilation for every power of two nor much padding of large batches.
    """
    sizes, size = {max_rows}, -(-max_rows // 2)
    while size > smallest:
        sizes.add(size)
        size = -(-size // 4)
    sizes.add(min(smallest, max_rows))
    return sorted({-(-size // multiple) * multiple for size in sizes})


def bucket_for(rows: int, sizes: list[int]) -> int:
    """The smallest compiled size that holds so many rows."""
    return next(size for size in sizes if size >= rows)


def padded(values: np.ndarray, size: int, fill: int) -> np.ndarray:
    """`values [n]` followed by `fill` up to `[size]`."""
    out = np.full(size, fill, values.dtype)
    out[: len(values)] = values
    return out

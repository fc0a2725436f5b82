"""What each device keeps of a training state, and what devices send each other in an update (ZeRO, 1910.02054).

Devices that share the rows of a batch along `fsdp` need not keep everything: with ZeRO-1 each keeps a part of the
optimizer's state, with ZeRO-2 of the gradients too, with ZeRO-3 of the parameters too. A gradient is computed by every
device of its own rows, in a `jax.shard_map` that leaves `tensor` to the compiler, and what is sent is written out here:
left to itself the compiler sums whole gradients on every device, and throws most of them away.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from seedx.sharding import DATA, FSDP, ROWS, TENSOR
from seedx.types import Tree


def split_further(layout: Tree, shapes: Tree) -> Tree:
    """The layout with each array spread over fsdp too: along its first axis that is whole and divides, if there is one.

    Args:
        layout: Where arrays live.
        shapes: The arrays, or what has their shapes.
    """

    def split(place: NamedSharding, leaf: Any) -> NamedSharding:
        over = [*place.spec, *[None] * (leaf.ndim - len(place.spec))]
        if FSDP in over:
            return place
        size = place.mesh.shape[FSDP]
        free = (axis for axis, name in enumerate(over) if name is None and leaf.shape[axis] % size == 0)
        if size == 1 or (axis := next(free, None)) is None:
            return place
        over[axis] = FSDP
        return NamedSharding(place.mesh, PartitionSpec(*over))

    return jax.tree.map(split, layout, shapes)


def by_rows(function: Callable[..., Any], mesh: Mesh, inputs: Any, outputs: Any) -> Callable[..., Any]:
    """The function computed by every device of its own part of the inputs.

    Args:
        function: Of this device's parts; those along tensor are not its own concern.
        mesh: Of `sharding.serve_mesh`.
        inputs: Layouts of its arguments; a prefix of them.
        outputs: Layouts of what it returns.
    """
    specs = (jax.tree.map(partial(_only, names=ROWS), layouts) for layouts in (inputs, outputs))
    in_specs, out_specs = specs
    return jax.shard_map(
        function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, axis_names=set(ROWS), check_vma=False
    )


def gathered(parts: Tree, layout: Tree, dtype: DTypeLike) -> Tree:
    """Inside of `by_rows`: parameters whole along fsdp, in a dtype; their gradients come back as sums over fsdp.

    They are sent in that dtype, and summed in the parameters' own.

    Args:
        parts: Of this device.
        layout: Where the parameters live.
        dtype: What is computed in.
    """

    def whole(part: jax.Array, place: NamedSharding) -> jax.Array:
        if (axis := _split_axis(place)) is None:
            return part.astype(dtype)
        return _gather(part, axis, _only(place, (TENSOR,)), jnp.dtype(dtype), part.dtype)

    return jax.tree.map(whole, parts, layout)


def summed(gradient: Tree, layout: Tree, target: Tree) -> Tree:
    """Inside of `by_rows`: the gradient of all rows, out of that of this device's rows.

    Args:
        gradient: As `gathered` parameters have it, summed over fsdp where they are split.
        layout: Where the parameters live.
        target: Where the gradient is to live.
    """

    def total(part: jax.Array, place: NamedSharding, target: NamedSharding) -> jax.Array:
        if _split_axis(place) is not None:
            return jax.lax.psum(part, DATA)
        if (axis := _split_axis(target)) is not None:
            return jax.lax.psum(_scatter(part, axis, _only(place, (TENSOR,))), DATA)
        return jax.lax.psum(part, ROWS)

    return jax.tree.map(total, gradient, layout, target)


def totals(figures: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Inside of `by_rows`: figures of all rows: sums, and greatest values where the name ends in "_max"."""
    return {
        name: (jax.lax.pmax if name.endswith("_max") else jax.lax.psum)(value, ROWS) for name, value in figures.items()
    }


@partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3, 4))
def _gather(part: jax.Array, axis: int, tensor: PartitionSpec, dtype: Any, own: Any) -> jax.Array:
    del own
    send = partial(jax.lax.all_gather, axis_name=FSDP, axis=axis, tiled=True)
    return _along_tensor(send, tensor)(part.astype(dtype))


def _gather_forward(part: jax.Array, *args: Any) -> tuple[jax.Array, None]:
    return _gather(part, *args), None


def _gather_backward(axis: int, tensor: PartitionSpec, dtype: Any, own: Any, _: None, g: jax.Array) -> tuple[jax.Array]:
    del dtype
    return (_scatter(g.astype(own), axis, tensor),)


_gather.defvjp(_gather_forward, _gather_backward)


def _scatter(part: jax.Array, axis: int, tensor: PartitionSpec) -> jax.Array:
    send = partial(jax.lax.psum_scatter, axis_name=FSDP, scatter_dimension=axis, tiled=True)
    return _along_tensor(send, tensor)(part)


def _along_tensor(send: Callable[..., jax.Array], spec: PartitionSpec) -> Callable[..., jax.Array]:
    """Every device sends its own part along tensor as well; left to itself the compiler would join these first."""
    return jax.shard_map(send, in_specs=(spec,), out_specs=spec, axis_names={TENSOR}, check_vma=False)


def _split_axis(place: NamedSharding) -> int | None:
    return next((axis for axis, name in enumerate(place.spec) if name == FSDP), None)


def _only(place: NamedSharding, names: tuple[str, ...]) -> PartitionSpec:
    """What a layout says of some of the mesh's axes."""

    def kept(over: Any) -> Any:
        wanted = tuple(name for name in (over if isinstance(over, tuple) else (over,)) if name in names)
        return wanted or None

    return PartitionSpec(*map(kept, place.spec))

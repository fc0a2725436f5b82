"""The only place that builds a mesh and says where arrays live."""

from __future__ import annotations

import contextlib
import math
import os
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from seedx.checks import ConfigError
from seedx.config import LearnerConfig
from seedx.device_config import MeshConfig
from seedx.types import Tree

_MAX_SIMULATED = 8
DATA = "data"
FSDP = "fsdp"
TENSOR = "tensor"
ROWS = (DATA, FSDP)  # over which the rows of a language model's batch are spread
# Where a transformer's named axes go (seedx/networks/transformer.py); the others are whole on every device.
_RULES = {"batch": ROWS, "embed": (FSDP,), "kv_heads": (TENSOR,), "ffn": (TENSOR,)}


class Meshes(NamedTuple):
    """The learner's devices, on all hosts, and the policy server's; the same mesh on one host without a split.

    `launching` is held while a computation is launched. Launches must reach all shared devices in one order: if two
    threads' collectives were queued in different orders on two devices, each would wait for the other for ever.
    """

    learner: Mesh
    inference: Mesh
    launching: contextlib.AbstractContextManager[Any]


def build_meshes(config: LearnerConfig) -> Meshes:
    """One-axis meshes: the learner's over the devices of all hosts, the policy server's over this host's.

    Raises:
        ConfigError: more devices are asked for than a host has, or the batch does not divide.
    """
    hosts: list[list[jax.Device]] = [[] for _ in range(jax.process_count())]
    for device in jax.devices():
        hosts[device.process_index].append(device)
    devices = hosts[jax.process_index()]
    available = len(devices) - config.inference_devices
    count = config.devices or available
    if count > available or available < 1 or any(len(those) < count for those in hosts):
        raise ConfigError(
            f"learner.devices ({config.devices}) and learner.inference_devices ({config.inference_devices}) ask for "
            f"more than the {min(map(len, hosts))} devices that there are."
        )
    microbatch, size = config.batch_size // config.microbatches, count * len(hosts)
    if microbatch % size:
        raise ConfigError(
            f"learner.batch_size / learner.microbatches ({microbatch}) must be divisible by the data axis ({size})."
        )
    learner = _mesh([device for those in hosts for device in those[:count]])
    if config.inference_devices == 0:
        here = _mesh(devices[:count])
        return Meshes(learner, here, threading.Lock() if count > 1 else contextlib.nullcontext())
    return Meshes(learner, _mesh(devices[len(devices) - config.inference_devices :]), contextlib.nullcontext())


def replicated(mesh: Mesh) -> NamedSharding:
    """Whole on every device."""
    return NamedSharding(mesh, PartitionSpec())


def split_axis(mesh: Mesh, axis: int) -> NamedSharding:
    """Axis number `axis` spread over the data axis."""
    return NamedSharding(mesh, PartitionSpec(*[None] * axis, DATA))


def data_index() -> jax.Array:
    """Which part of the data axis computes this, inside of a `jax.shard_map` over it; int32."""
    return jax.lax.axis_index(DATA)


def sum_over_data(tree: Tree) -> Tree:
    """The sum of all parts of the data axis, inside of a `jax.shard_map` over it."""
    return jax.lax.psum(tree, DATA)


def _mesh(devices: list[jax.Device]) -> Mesh:
    return Mesh(np.array(devices), (DATA,), axis_types=(AxisType.Auto,))


def mover(source: Mesh, target: Mesh) -> Callable[[Tree], Tree] | None:
    """Copies a replicated tree from one mesh to another; None if they are the same devices."""
    if source == target:
        return None
    whole = replicated(target)
    return lambda tree: jax.device_put(local_view(tree, source), whole)  # no copy if it is there already


def local_view(tree: Tree, mesh: Mesh) -> Tree:
    """A tree that is replicated over a mesh of several hosts, as arrays of this host's devices alone; no copy."""
    if not mesh.is_multi_process:
        return tree
    whole = replicated(mesh.local_mesh)

    def view(leaf: jax.Array) -> jax.Array:
        shards = [shard.data for shard in leaf.addressable_shards]
        return jax.make_array_from_single_device_arrays(leaf.shape, whole, shards)

    return jax.tree.map(view, tree)


def put(tree: Tree, shardings: Any) -> Tree:
    """Arrays in host memory on the devices; of several hosts, each gives the rows of its own devices.

    Args:
        tree: NumPy arrays.
        shardings: Where they go, a prefix of the tree.
    """
    if jax.process_count() == 1:
        return jax.device_put(tree, shardings)

    def put_part(sharding: NamedSharding, part: Tree) -> Tree:
        return jax.tree.map(lambda leaf: jax.make_array_from_process_local_data(sharding, leaf), part)

    return jax.tree.map(put_part, shardings, tree)


def from_first_host(tree: Tree, mesh: Mesh) -> Tree:
    """Host 0's tree of arrays on all hosts, replicated over a mesh; all must call this together."""
    from jax.experimental import multihost_utils

    values = multihost_utils.broadcast_one_to_all(jax.tree.map(np.asarray, tree))
    return put(jax.tree.map(np.asarray, values), replicated(mesh))


def serve_mesh(*, data: int = 1, fsdp: int = 1, tensor: int = 1) -> Mesh:
    """A mesh `[data, fsdp, tensor]` to decode on.

    Rows are spread over its first two axes, heads and feed-forward over the last; fsdp also splits each weight.

    Raises:
        ConfigError: there are not so many devices.
    """
    devices, shape = jax.local_devices(), (data, fsdp, tensor)
    count = math.prod(shape)
    if not 0 < count <= len(devices):
        remedy = "give less"
        if devices[0].platform == "cpu":
            remedy += f", or set XLA_FLAGS=--xla_force_host_platform_device_count={count} to have as many on a CPU"
        raise ConfigError(
            f"mesh.data x mesh.fsdp x mesh.tensor ({data} x {fsdp} x {tensor}) asks for {count} devices; there are "
            f"{len(devices)}: {remedy}."
        )
    return Mesh(np.array(devices[:count]).reshape(shape), (DATA, FSDP, TENSOR), axis_types=(AxisType.Auto,) * 3)


def whole_mesh(mesh: MeshConfig, slots: int) -> Mesh:
    """A mesh like `serve_mesh` of what a config asks for; on a CPU so many devices are simulated.

    Args:
        mesh: With `data` 0: all devices, or as many of them as divide the slots; on a CPU one for each core, up to 8.
        slots: Completions at a time.

    Raises:
        ConfigError: there are not so many devices.
    """
    group = mesh.fsdp * mesh.tensor
    cores = len(os.sched_getaffinity(0))
    simulate_cpu_devices((mesh.data or max(min(cores, _MAX_SIMULATED) // group, 1)) * group)
    data = mesh.data or max(len(jax.local_devices()) // group, 1)
    while not mesh.data and slots % (data * mesh.fsdp):
        data -= 1
    return serve_mesh(data=data, fsdp=mesh.fsdp, tensor=mesh.tensor)


def simulate_cpu_devices(count: int) -> None:
    """Has a CPU look like so many devices, if nothing has asked for its devices yet and XLA_FLAGS say nothing."""
    if "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", ""):
        return
    with contextlib.suppress(RuntimeError):  # they are in use already
        jax.config.update("jax_num_cpu_devices", count)


def serve_shardings(mesh: Mesh, axes: Any, shapes: Any, *, split: bool = True) -> Any:
    """Where the arrays of a transformer live: key heads and feed-forward over tensor, width over fsdp, rows over both.

    Args:
        mesh: Of `serve_mesh`.
        axes: The names of each array's axes, a tuple for each (`logical_axes`, `cache_axes`); an axis of another name,
            or "", is whole everywhere.
        shapes: Arrays or their shapes, a tree of the same form.
        split: Whether width is split over fsdp; else it is whole.

    Raises:
        ConfigError: an axis does not divide over the devices.
    """

    rules = _RULES if split else {**_RULES, "embed": ()}

    def place(leaf: Any, names: tuple[str, ...]) -> NamedSharding:
        for name, size in zip(names, leaf.shape, strict=True):
            over = rules.get(name, ())
            count = math.prod(mesh.shape[axis] for axis in over)
            if size % count:
                wanted = " x ".join(f"mesh.{axis}" for axis in over)
                raise ConfigError(f"{name} ({size}) must be divisible by {wanted} ({count}).")
        return NamedSharding(mesh, PartitionSpec(*(rules.get(name) or None for name in names)))

    return jax.tree.map(place, shapes, axes)


def split_rows(mesh: Mesh) -> NamedSharding:
    """The first axis spread over the row groups of a serving mesh."""
    return NamedSharding(mesh, PartitionSpec(ROWS))


def row_groups(mesh: Mesh) -> int:
    """Parts of a serving mesh that have rows of their own."""
    return mesh.shape[DATA] * mesh.shape[FSDP]


def row_group() -> jax.Array:
    """Which of these parts computes this, inside of a `jax.shard_map` over all axes of a serving mesh; int32."""
    return jax.lax.axis_index(ROWS)


def layout_of(tree: Tree) -> Tree:
    """Where the arrays of a tree live."""
    return jax.tree.map(lambda leaf: getattr(leaf, "sharding", None), tree)


def reshard(tree: Tree, layout: Tree) -> Tree:
    """The same arrays in another layout; the same tree, and no copy, if it has that already."""
    return tree if layout_of(tree) == layout else jax.device_put(tree, layout)


def bytes_per_device(tree: Tree) -> int:
    """What each device holds of a tree; an array that is there twice counts once."""
    leaves = {id(leaf): leaf for leaf in jax.tree.leaves(tree)}.values()
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves)


def held_bytes(array: Any) -> int:
    """What an array takes on all its devices together; what has its shape alone, on one."""
    layout = getattr(array, "sharding", None)
    if layout is None:
        return array.size * array.dtype.itemsize
    return math.prod(layout.shard_shape(array.shape)) * array.dtype.itemsize * len(layout.device_set)

"""The only place that builds a mesh and says where arrays live."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from seedx.config import ConfigError, LearnerConfig
from seedx.types import Tree

DATA = "data"


class Meshes(NamedTuple):
    """The learner's and the policy server's devices; the same mesh unless the config splits them.

    `launching` is held while a computation is launched. Launches must reach all shared devices in one order: if two
    threads' collectives were queued in different orders on two devices, each would wait for the other for ever.
    """

    learner: Mesh
    inference: Mesh
    launching: contextlib.AbstractContextManager[Any]


def build_meshes(config: LearnerConfig) -> Meshes:
    """One-axis meshes over this process's devices.

    Raises:
        ConfigError: more devices are asked for than there are, or the batch does not divide.
    """
    devices = jax.local_devices()
    available = len(devices) - config.inference_devices
    count = config.devices or available
    if count > available or available < 1:
        raise ConfigError(
            f"learner.devices ({config.devices}) and learner.inference_devices ({config.inference_devices}) ask for "
            f"more than the {len(devices)} devices that there are."
        )
    microbatch = config.batch_size // config.microbatches
    if microbatch % count:
        raise ConfigError(
            f"learner.batch_size / learner.microbatches ({microbatch}) must be divisible by the data axis ({count})."
        )
    learner = _mesh(devices[:count])
    if config.inference_devices == 0:
        return Meshes(learner, learner, threading.Lock() if count > 1 else contextlib.nullcontext())
    return Meshes(learner, _mesh(devices[len(devices) - config.inference_devices :]), contextlib.nullcontext())


def replicated(mesh: Mesh) -> NamedSharding:
    """Whole on every device."""
    return NamedSharding(mesh, PartitionSpec())


def split_axis(mesh: Mesh, axis: int) -> NamedSharding:
    """Axis number `axis` spread over the data axis."""
    return NamedSharding(mesh, PartitionSpec(*[None] * axis, DATA))


def _mesh(devices: list[jax.Device]) -> Mesh:
    return Mesh(np.array(devices), (DATA,), axis_types=(AxisType.Auto,))


def mover(source: Mesh, target: Mesh) -> Callable[[Tree], Tree] | None:
    """Copies a replicated tree from one mesh to another; None if they are the same devices."""
    if source == target:
        return None
    whole = replicated(target)
    return lambda tree: jax.device_put(tree, whole)

"""TPU slices that are not there: compiling for them needs libtpu alone."""

from __future__ import annotations

import os
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # No chip is looked for.
os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-8")
os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")

from jax.experimental import topologies

HBM_BYTES = 16 * 2**30  # of a v5e chip
HOST = "v5e:2x2"  # of four chips, as in larger slices


def devices_of(topology: str) -> list[Any]:
    """The chips of a slice, for example "v5e:2x4".

    Raises:
        SystemExit: libtpu is not installed.
    """
    try:
        return list(topologies.get_topology_desc(platform="tpu", topology_name=topology).devices)
    except (RuntimeError, ValueError) as error:
        raise SystemExit(f"cannot compile for {topology} ({error}); is libtpu there? pip install -e '.[tpu]'") from None

"""Eight simulated devices, strict dtypes and ranks, and jaxtyping shapes checked at run time."""

import os
import signal
import sys

signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup, all that the tests start would ignore it

# Before anything imports jax.
os.environ["XLA_FLAGS"] = " ".join(
    [
        os.environ.get("XLA_FLAGS", ""),
        "--xla_force_host_platform_device_count=8",
        # Tests compile much and run little.
        "--xla_backend_optimization_level=0",
        "--xla_llvm_disable_expensive_passes=true",
    ]
)
os.environ["JAX_PLATFORMS"] = "cpu"

from jaxtyping import install_import_hook  # noqa: E402

_hook = install_import_hook("seedx", "checked.typechecked")

import jax  # noqa: E402
import pytest  # noqa: E402
from hypothesis import settings  # noqa: E402

settings.register_profile("seedx", deadline=None)  # the first example of many compiles
settings.load_profile("seedx")

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


@pytest.fixture
def key() -> jax.Array:
    return jax.random.key(7)

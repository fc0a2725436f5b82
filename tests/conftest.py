"""Eight simulated devices, strict dtypes and ranks, and jaxtyping shapes checked at run time."""

import contextlib
import os
import signal
import sys

from quick_xla import QUICK_XLA

signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup, all that the tests start would ignore it

# Before anything imports jax.
os.environ["XLA_FLAGS"] = " ".join(
    [os.environ.get("XLA_FLAGS", ""), "--xla_force_host_platform_device_count=8", QUICK_XLA]
)
os.environ["JAX_PLATFORMS"] = "cpu"

# Where these are set, pytest diffs long sequences that differ, item for item and for hours, and so hides the failure.
os.environ.pop("CI", None)
os.environ.pop("BUILD_NUMBER", None)

from jaxtyping import install_import_hook  # noqa: E402

_hook = install_import_hook("seedx", "checked.typechecked")

import jax  # noqa: E402
import pytest  # noqa: E402
from hypothesis import HealthCheck, settings  # noqa: E402

# The first example of many compiles. Whether a commit passes must not depend on the run: examples are always the same,
# and new ones are looked for with `pytest --hypothesis-profile default`.
settings.register_profile("seedx", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("seedx")

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


@pytest.fixture
def opened():
    """Closes what is appended."""
    things = []
    yield things
    for thing in reversed(things):
        thing.close()


@pytest.fixture
def key() -> jax.Array:
    return jax.random.key(7)


@pytest.fixture
def cable():
    """A `Cable`; where there can be none the test is skipped, or fails if SEEDX_REQUIRE names netns."""
    from namespaces import Cable

    with contextlib.ExitStack() as stack:
        try:
            made = stack.enter_context(Cable())
        except OSError as error:  # a tool is missing, or the system forbids it
            if "netns" in os.environ.get("SEEDX_REQUIRE", "").split():
                pytest.fail(f"SEEDX_REQUIRE names netns, and there can be no network namespaces: {error}")
            pytest.skip(f"no network namespaces: {error}")
        yield made

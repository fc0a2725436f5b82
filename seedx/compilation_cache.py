"""Where compiled programs are kept for the next start."""

from __future__ import annotations

import os

import jax


def use() -> None:
    """Keeps them in ~/.cache/seedx/jax, or where JAX_COMPILATION_CACHE_DIR says."""
    cache = os.environ.get("XDG_CACHE_HOME", os.path.expanduser("~/.cache"))
    if not jax.config.jax_compilation_cache_dir:  # type: ignore[missing-attribute]
        jax.config.update("jax_compilation_cache_dir", os.path.join(cache, "seedx", "jax"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)

"""Makes the agent that a config names."""

from __future__ import annotations

import importlib

from seedx.config import Config, ConfigError
from seedx.types import Agent, EnvSpec


def build_agent(config: Config, spec: EnvSpec) -> Agent:
    """The agent of a config: "impala", or a user's own "module:function" called with (config, spec).

    Raises:
        ConfigError: there is no such agent.
    """
    match config.agent:
        case "impala":
            from seedx.agents.impala import Impala

            return Impala(config, spec)
        case own if ":" in own:
            return _load(own)(config, spec)
        case other:
            raise ConfigError(f"agent ({other!r}) must be 'impala' or 'module:function'.")


def _load(path: str):
    module_name, _, name = path.partition(":")
    try:
        return getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"agent {path!r} cannot be imported: {error}. Is its directory on the path?") from error

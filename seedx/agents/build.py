"""Makes the agent that a config names."""

from __future__ import annotations

from seedx.config import Config, ConfigError
from seedx.imports import load
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
            return load(own, "agent")(config, spec)
        case other:
            raise ConfigError(f"agent ({other!r}) must be 'impala' or 'module:function'.")

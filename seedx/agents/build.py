"""Makes the agent that a config names."""

from __future__ import annotations

from seedx.checks import ConfigError
from seedx.config import Config
from seedx.imports import load
from seedx.types import Agent, EnvSpec


def build_agent(config: Config, spec: EnvSpec) -> Agent:
    """The agent of a config: "impala", "r2d2", "apex", or a user's own "module:function" called with (config, spec).

    Raises:
        ConfigError: there is no such agent.
    """
    match config.agent:
        case "impala":
            from seedx.agents.impala import Impala

            return Impala(config, spec)
        case "r2d2":
            from seedx.agents.r2d2 import R2D2

            return R2D2(config, spec)
        case "apex":
            from seedx.agents.apex import Apex

            return Apex(config, spec)
        case own if ":" in own:
            return load(own, "agent")(config, spec)
        case other:
            raise ConfigError(f"agent ({other!r}) must be 'impala', 'r2d2', 'apex' or 'module:function'.")

"""Configs as files: a run's config.json, and recipes."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
from pathlib import Path
from typing import Any

from seedx.checks import ConfigError, require
from seedx.config import Config
from seedx.llm_config import AGENTS, UNUSED, LlmConfig

AnyConfig = Config | LlmConfig  # of an environment run, or of a language model's


def to_json(config: Any) -> str:
    """The config as JSON text, one key a line."""
    return json.dumps(dataclasses.asdict(config), indent=2) + "\n"


def from_json(text: str) -> AnyConfig:
    """The config of `to_json`; of an LLM run if its agent is one of those.

    Settings that do nothing in such a run are passed over: a flag is refused, a run of earlier versions may have them.

    Raises:
        ConfigError: a key is unknown, or a value is not allowed.
    """
    values = json.loads(text)
    of_llm = isinstance(values, dict) and values.get("agent") in AGENTS
    if of_llm:
        used = {
            part: {name: value for name, value in fields.items() if name not in UNUSED.get(part, ())}
            for part, fields in values.items()
            if isinstance(fields, dict)
        }
        return _build(LlmConfig, values | used, "config")
    return _build(Config, values, "config")


def _build(cls: type, values: Any, path: str) -> Any:
    require(isinstance(values, dict), f"{path} is {values!r}; it must be an object with fields.")
    fields = {f.name: f for f in dataclasses.fields(cls)}
    unknown = sorted(set(values) - set(fields))
    require(not unknown, f"{path} has unknown fields {unknown}; allowed are {sorted(fields)}.")
    built = {}
    for name, value in values.items():
        factory = fields[name].default_factory
        if factory is not dataclasses.MISSING and dataclasses.is_dataclass(part := factory()):
            value = _build(type(part), value, f"{path}.{name}")  # type: ignore[arg-type]
        built[name] = tuple(value) if isinstance(value, list) else value
    return cls(**built)


def differing_flags(then: Any, now: Any, path: str = "--") -> list[str]:
    """The flags in which one config is another than an earlier one, each with both values."""
    found = []
    for field in dataclasses.fields(then):
        before, after = getattr(then, field.name), getattr(now, field.name)
        name = path + field.name.rstrip("_").replace("_", "-") + "_" * field.name.endswith("_")
        if dataclasses.is_dataclass(before):
            found += differing_flags(before, after, f"{name}.")
        elif before != after:
            found.append(f"{name} {after} instead of {before}")
    return found


def read_config(run_dir: str | Path) -> AnyConfig:
    """The config.json of a run directory.

    Raises:
        ConfigError: there is none, or it is not a run's config.
    """
    path = Path(run_dir) / "config.json"
    try:
        return from_json(path.read_text())
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}); is {run_dir} a run's directory?") from error
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{path} is not a run's config: {error}") from error


def env_config(config: AnyConfig) -> Config:
    """The same, of an environment run.

    Raises:
        ConfigError: it is a language model's.
    """
    require(isinstance(config, Config), f"agent {config.agent!r} acts in texts; this is for runs in environments.")
    assert isinstance(config, Config)
    return config


def load_recipe(path: str | Path) -> AnyConfig:
    """Runs `config()` of a recipe file.

    Raises:
        ConfigError: there is no such file, or it defines no `config()` that returns a Config or LlmConfig.
    """
    path = Path(path)
    require(path.is_file(), f"config file {str(path)!r} does not exist.")
    require(path.suffix == ".py", f"config file {str(path)!r} must be a Python file that defines config().")
    spec = importlib.util.spec_from_file_location(f"recipe_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    make = getattr(module, "config", None)
    require(callable(make), f"{path} must define config() -> seedx.config.Config, or seedx.llm_config.LlmConfig.")
    made = make()  # type: ignore[misc]
    require(
        isinstance(made, AnyConfig),
        f"config() of {path} returned {type(made).__name__}; it must be a Config or an LlmConfig.",
    )
    return made

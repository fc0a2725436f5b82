"""Makes a group of environments from its id."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Sequence
from typing import Any

import numpy as np

from seedx.checks import ConfigError
from seedx.config import Config
from seedx.imports import load
from seedx.types import Env, EnvSpec

_BUILT_IN = ("catch", "memory")
_KINDS = 'an EnvPool id, "gym:ID" for Gymnasium, "catch", "memory", or "module:function" for your own'


class UnknownEnvError(ConfigError):
    """There is no such environment; the message suggests some that there are."""


def make_env(config: Config, num_envs: int, seeds: Sequence[int] | np.ndarray) -> Env:
    """Makes `config.env`, vectorised; environment i plays the episodes of `seeds[i]`.

    A user's own environment, "module:function", comes from the current directory or any installed package. Which of
    three kinds it is, is read from the function's parameters and from what it returns:

    - `function(num_envs, seeds)` or `function(num_envs, seed)` returns a vectorised `seedx.types.Env`; `seed` is the
      first of the seeds;
    - `function(seed)` or `function()` returns a single `gymnasium.Env`, whose first reset is seeded;
    - the same, but it returns an environment with dm_env's interface, which only `seed` can seed.

    Single environments are called for N times and stepped one after the other.

    Args:
        config: The run's config; `env`, `atari`, and of `actor` the threads and the time limit are used.
        num_envs: N.
        seeds: N distinct integers, 0 .. 2**31-1. No two environments of a run should share one.

    Raises:
        UnknownEnvError: there is no environment of that id.
        ConfigError: the environment cannot be used, or not with this config; or the seeds are not N distinct ones.
    """
    seeds = _checked_seeds(seeds, num_envs)
    match config.env:
        case "catch":
            from seedx.envs.catch import Catch

            _refuse_time_limit(config)
            return Catch(num_envs, seeds)
        case "memory":
            from seedx.envs.memory import Memory

            _refuse_time_limit(config)
            return Memory(num_envs, seeds)
        case env_id if env_id.startswith("gym:"):
            return _make_gymnasium(config, seeds)
        case env_id if ":" in env_id:
            return _make_own(config, num_envs, seeds)
        case _:
            return _make_envpool(config, num_envs, seeds)


def _checked_seeds(seeds: Sequence[int] | np.ndarray, num_envs: int) -> list[int]:
    checked = [int(seed) for seed in seeds]
    if len(checked) != num_envs or len(set(checked)) != num_envs:
        raise ConfigError(f"{num_envs} environments need as many distinct seeds; got {checked}.")
    if min(checked) < 0 or max(checked) >= 2**31:
        raise ConfigError(f"seeds must lie in 0 .. 2**31-1; got {min(checked)} .. {max(checked)}.")
    return checked


def _refuse_time_limit(config: Config) -> None:
    if config.actor.max_episode_steps is not None:
        raise ConfigError(
            f"actor.max_episode_steps ({config.actor.max_episode_steps}) cannot be put on {config.env!r}, which is "
            "vectorised and resets itself; leave it None."
        )


def _make_envpool(config: Config, num_envs: int, seeds: Sequence[int]) -> Env:
    from seedx.envs import envpool_adapter

    if not envpool_adapter.is_known(config.env):
        built_in = difflib.get_close_matches(config.env.lower(), _BUILT_IN)
        raise _unknown(config.env, built_in + envpool_adapter.close_matches(config.env))
    return envpool_adapter.EnvPoolEnv(config, num_envs, seeds)


def _unknown(env_id: str, matches: Sequence[str], cause: str = "") -> UnknownEnvError:
    hint = f" Did you mean {', '.join(map(repr, matches))}?" if matches else ""
    return UnknownEnvError(f"env {env_id!r} is unknown{cause}.{hint} --env takes {_KINDS}.")


def _make_gymnasium(config: Config, seeds: Sequence[int]) -> Env:
    import gymnasium

    from seedx.envs.gymnasium_adapter import GymnasiumEnv
    from seedx.envs.vectorize import SerialEnv

    gym_id = config.env.removeprefix("gym:")
    try:
        gymnasium.spec(gym_id)
    except gymnasium.error.Error as error:
        raise _unknown(config.env, (), f" to Gymnasium ({error})") from error

    def make(seed: int) -> GymnasiumEnv:
        env = gymnasium.make(
            gym_id,
            max_episode_steps=config.actor.max_episode_steps,
            disable_env_checker=True,  # its warnings are for authors; what matters here is checked on every row
        )
        return GymnasiumEnv(env, config.env, seed)

    return SerialEnv([make(seed) for seed in seeds])


def _make_own(config: Config, num_envs: int, seeds: Sequence[int]) -> Env:
    try:
        function = load(config.env, "env")
    except ConfigError as error:
        raise UnknownEnvError(f"{error} --env takes {_KINDS}.") from error
    parameters = inspect.signature(function).parameters
    if "num_envs" in parameters:
        _refuse_time_limit(config)
        given: dict[str, Any] = {"seeds": list(seeds), "seed": seeds[0]}
        made = function(num_envs=num_envs, **{name: given[name] for name in given if name in parameters})
        return _checked_env(made, config.env, num_envs)
    from seedx.envs.vectorize import SerialEnv

    made = [function(seed=seed) if "seed" in parameters else function() for seed in seeds]
    envs = [_adapt(env, config.env, seed) for env, seed in zip(made, seeds, strict=True)]
    if len({id(env) for env in made}) < num_envs:
        raise ConfigError(f"{config.env} returned the same environment twice; it must make a new one each time.")
    return SerialEnv(envs, config.actor.max_episode_steps)


def _checked_env(made: Any, path: str, num_envs: int) -> Env:
    has_methods = all(callable(getattr(made, name, None)) for name in ("reset", "step", "close"))
    if not (has_methods and isinstance(getattr(made, "spec", None), EnvSpec)):
        raise ConfigError(
            f"{path} takes num_envs and returned {type(made).__name__}; it must return a seedx.types.Env: "
            "spec (a seedx.types.EnvSpec), num_envs, reset(), step(action), close()."
        )
    if getattr(made, "num_envs", None) != num_envs:
        raise ConfigError(f"{path} was asked for {num_envs} environments and made {getattr(made, 'num_envs', None)}.")
    return made


def _adapt(env: Any, path: str, seed: int) -> Any:
    import gymnasium

    from seedx.envs.dm_env_adapter import DmEnv, is_dm_env
    from seedx.envs.gymnasium_adapter import GymnasiumEnv

    if isinstance(env, gymnasium.Env):
        return GymnasiumEnv(env, path, seed)
    if is_dm_env(env):
        return DmEnv(env, path)
    raise ConfigError(
        f"{path} returned {type(env).__name__}; without a parameter num_envs it must return a single gymnasium.Env or "
        "an environment with dm_env's interface. A vectorised seedx.types.Env comes from function(num_envs, seeds)."
    )

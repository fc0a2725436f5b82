"""EnvPool environments with dm_env semantics: FIRST, MID and LAST rows, truncation told from termination.

The pools are those of EnvPool's gymnasium API, whose rows hold `done` and `trunc`; they are read from the pool itself,
because the Python wrapper around it costs as much as stepping 50 CartPoles does. EnvPool resets on the step after
`done` and ignores that step's action, which is seedx's own convention. An episode that terminates exactly at its time
limit is reported by EnvPool, and so here, as truncated.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import importlib
import sys
from collections.abc import Generator, Mapping, Sequence
from types import ModuleType
from typing import Any

import numpy as np
import optree

from seedx.checks import ConfigError
from seedx.config import AtariConfig, Config
from seedx.envs.specs import bounded, categorical
from seedx.types import ArraySpec, EnvSpec, StepType, TimeStep, Tree

_MAX_NUM_VALUES = 2**20  # an integer leaf with more values is a number, not a category (EnvPool's own threshold)
_GRID_VALUES = 11  # MiniGrid's and BabyAI's kinds of object; colours and states are fewer
_JUMANJI = "envpool.jumanji.registration"


def load_envpool() -> ModuleType:
    """Imports EnvPool without jax, which actors must not load, and without jumanji's matplotlib viewers.

    Jumanji is 1.8 of the 2.3 seconds that the import takes; `is_known` registers it when an id is not found.
    """
    if "envpool" in sys.modules:
        return sys.modules["envpool"]
    with _without_jax():
        sys.modules[_JUMANJI] = ModuleType(_JUMANJI)
        try:
            return importlib.import_module("envpool")
        finally:
            del sys.modules[_JUMANJI]


@contextlib.contextmanager
def _without_jax() -> Generator[None]:
    """Makes `import jax` fail inside, which EnvPool allows for; unless somebody has imported it already."""
    blocked = "jax" not in sys.modules
    if blocked:
        sys.modules["jax"] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        if blocked:
            del sys.modules["jax"]


def is_known(env_id: str) -> bool:
    """Whether EnvPool has an environment of that id."""
    envpool = load_envpool()
    if env_id in envpool.list_all_envs():
        return True
    with _without_jax(), contextlib.suppress(ModuleNotFoundError):
        importlib.import_module(_JUMANJI)
    return env_id in envpool.list_all_envs()


def close_matches(env_id: str) -> list[str]:
    """EnvPool's ids that look like `env_id`, the likeliest first."""
    names = {name.lower(): name for name in load_envpool().list_all_envs()}
    found = difflib.get_close_matches(env_id.lower(), names, n=5, cutoff=0.5)
    return [names[name] for name in found]


class EnvPoolEnv:
    """N environments of one EnvPool id, stepped by EnvPool's threads; see `seedx.types.Env`.

    Attributes:
        spec: Dtypes are EnvPool's, except 64-bit ones, which become 32-bit. Colour images are `[H, W, C]`.
        num_envs: N.
    """

    def __init__(self, config: Config, num_envs: int, seeds: Sequence[int]) -> None:
        """Makes the pool; environment i is seeded with `seeds[i]` (int32).

        Raises:
            ConfigError: the environment has several players, or actions that cannot be described.
        """
        envpool = load_envpool()
        options = _options(envpool.make_spec(config.env).config._fields, config)
        self._pool = envpool.make(
            config.env,
            env_type="gymnasium",
            num_envs=num_envs,
            num_threads=config.actor.env_threads,
            seed=list(seeds),
            **options,
        )
        pool_spec = self._pool.spec
        self.num_envs = num_envs
        self.spec = _env_spec(config.env, pool_spec)
        state_keys = list(pool_spec.state_array_spec)
        self._step_type, self._reward, self._done, self._trunc = map(
            state_keys.index, ("step_type", "reward", "done", "trunc")
        )
        self._observation = _nest(
            {name.removeprefix("obs:"): i for i, name in enumerate(state_keys) if name.startswith("obs")}
        )
        raw = pool_spec.action_array_spec["action"]
        self._action_dtype = raw.dtype
        self._action_shape = (num_envs, *_row_shape(raw.shape))
        self._env_ids = np.arange(num_envs, dtype=np.int32)

    def reset(self) -> TimeStep:
        """Starts an episode everywhere and returns the FIRST rows, `[N]`."""
        self._pool.async_reset()
        return self._rows()

    def step(self, action: Tree) -> TimeStep:
        """Steps every environment with its row of `action`, `[N, ...]`.

        Raises:
            ValueError: `action` has another shape.
        """
        if isinstance(action, tuple):
            action = np.stack(action, axis=-1)
        action = np.ascontiguousarray(action, self._action_dtype)
        if action.shape != self._action_shape:
            raise ValueError(f"action has shape {action.shape}; {self.spec.env} needs {self._action_shape}.")
        self._pool._send([self._env_ids, self._env_ids, action])
        return self._rows()

    def close(self) -> None:
        """Frees the environments."""
        self._pool.close()

    def _rows(self) -> TimeStep:
        state = self._pool._recv()  # fresh arrays, ours to keep and to write to
        step_type = state[self._step_type].astype(np.uint8)
        reward = state[self._reward]
        np.copyto(reward, 0.0, where=step_type == StepType.FIRST)
        discount = (state[self._done] <= state[self._trunc]).astype(np.float32)

        def leaf(index: int, spec: ArraySpec) -> np.ndarray:
            return _rows_as(spec, state[index])

        return TimeStep(step_type, reward, discount, optree.tree_map(leaf, self._observation, self.spec.observation))


def _rows_as(spec: ArraySpec, rows: np.ndarray) -> np.ndarray:
    """The rows that EnvPool gave, `[N, ...]`, in the spec's dtype and shape: a view where the dtype is the same."""
    if _is_channel_first(rows.shape[1:], rows.dtype):
        return np.moveaxis(rows, 1, -1)
    return rows.astype(spec.dtype, copy=False).reshape(len(rows), *spec.shape)


def _is_channel_first(shape: Sequence[int], dtype: np.dtype) -> bool:
    """Whether rows of that shape are colour images `[C, H, W]`, as VizDoom's; seedx's are `[H, W, C]`."""
    return dtype == np.uint8 and len(shape) == 3 and shape[0] in (3, 4) and shape[-1] not in (3, 4)


def _options(allowed: Sequence[str], config: Config) -> dict[str, Any]:
    """The options of `envpool.make` that the config and seedx's conventions ask for."""
    options: dict[str, Any] = {}
    if "stack_num" in allowed:
        options["stack_num"] = 1  # one frame crosses the wire; stacks are made on the device
    if _is_atari(allowed):
        atari = dataclasses.asdict(config.atari)
        options["max_episode_steps"] = atari.pop("max_episode_frames") // config.atari.frame_skip
        options["img_height"] = options["img_width"] = atari.pop("img_size")
        options |= atari
    if config.actor.max_episode_steps is not None:
        options["max_episode_steps"] = config.actor.max_episode_steps
    return options


def _is_atari(allowed: Sequence[str]) -> bool:
    """Whether an environment with these EnvPool options is an Atari game: it alone has all of the preset's."""
    own_names = {"img_size", "max_episode_frames"}
    return {field.name for field in dataclasses.fields(AtariConfig)} - own_names <= set(allowed)


def _is_grid_world(allowed: Sequence[str]) -> bool:
    """Whether an environment with these EnvPool options is of MiniGrid or BabyAI."""
    return {"agent_view_size", "mission_bytes"} <= set(allowed)


def _env_spec(env_id: str, pool_spec: Any) -> EnvSpec:
    options = pool_spec.config
    if options.max_num_players > 1:
        raise ConfigError(
            f"env {env_id!r} has up to {options.max_num_players} players; seedx steps environments of one player."
        )
    observation = _nest(
        {
            name.removeprefix("obs:"): _observation_leaf(raw)
            for name, raw in pool_spec.state_array_spec.items()
            if name.startswith("obs")
        }
    )
    if getattr(options, "stack_num", None) == 1 and observation.shape[0] == 1:  # [1, H, W]: a grey frame
        observation = dataclasses.replace(observation, shape=observation.shape[1:])
    if _is_grid_world(options._fields):  # EnvPool says 0 .. 255 of the objects, colours and states of the cells
        cells = dataclasses.replace(observation["image"], num_values=_GRID_VALUES, minimum=None, maximum=None)
        observation["image"] = cells
    action = _action_spec(env_id, pool_spec.action_array_spec)
    return EnvSpec(env_id, observation, action, frame_skip=getattr(options, "frame_skip", 1))


def _row_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """The shape of one environment's row: EnvPool writes the players' axis as -1."""
    return tuple(size for size in shape if size != -1)


def _observation_leaf(raw: Any) -> ArraySpec:
    shape = _row_shape(raw.shape)
    is_category = np.issubdtype(raw.dtype, np.integer) and shape == () and np.size(raw.maximum) == 1
    if is_category and raw.minimum == 0 and 0 < raw.maximum < _MAX_NUM_VALUES:
        return categorical(int(raw.maximum) + 1, raw.dtype)
    if _is_channel_first(shape, raw.dtype):
        shape = (*shape[1:], shape[0])
    return bounded(shape, raw.dtype, raw.minimum, raw.maximum)


def _action_spec(env_id: str, raws: Mapping[str, Any]) -> Tree:
    names = [name for name in raws if not name.endswith("env_id")]
    if names != ["action"]:
        raise ConfigError(
            f"env {env_id!r} has the action arrays {names}; seedx can drive those that have one 'action'."
        )
    raw = raws["action"]
    shape = _row_shape(raw.shape)
    if not (np.issubdtype(raw.dtype, np.integer) or raw.is_discrete):
        return bounded(shape, raw.dtype, raw.minimum, raw.maximum)
    if len(shape) > 1 or np.any(np.asarray(raw.minimum) != 0) or np.any(np.asarray(raw.maximum) >= _MAX_NUM_VALUES):
        raise ConfigError(
            f"env {env_id!r} has integer actions of shape {shape} between {raw.minimum} and {raw.maximum}; "
            f"seedx can drive scalars and vectors of 0 .. n-1 with n up to {_MAX_NUM_VALUES}."
        )
    return categorical(np.broadcast_to(np.asarray(raw.maximum) + 1, shape), np.int32)


def _nest(leaves: Mapping[str, Any]) -> Tree:
    """Nested dicts of leaves named "a.b"; a lone leaf stands for itself, as in EnvPool."""
    if len(leaves) == 1:
        return next(iter(leaves.values()))
    tree: dict[str, Any] = {}
    for name, leaf in leaves.items():
        *parents, last = name.split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = leaf
    return tree

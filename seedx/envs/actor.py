"""The actor: steps environments, nothing else. All state of the agent lives in the policy server.

The groups are stepped in turn by one thread: while one group's request is with the server, the other group steps.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np

from seedx.checks import ConfigError
from seedx.config import Config
from seedx.envs.vectorize import ObservationError
from seedx.inference.client import Connection, Finished, GroupStream, ServerLostError
from seedx.inference.wire import WireError
from seedx.types import Env

_ADMISSION_S = 300.0  # a server may compile large networks before it admits anyone
_RETRY_S = 0.2


def env_seeds(config: Config, actor_id: int, restart: int, session: int = 0) -> np.ndarray:
    """A seed for each environment of an actor, `[envs_per_actor]` in 0 .. 2**31-1, no two alike in a run."""
    base = int(np.random.SeedSequence(config.seed, spawn_key=(session, restart)).generate_state(1)[0])
    first = base + actor_id * config.envs_per_actor
    return np.arange(first, first + config.envs_per_actor, dtype=np.int64) % 2**31


def run_actor(
    config: Config,
    address: str,
    actor_id: int,
    make_group: Callable[[np.ndarray], Env],
    restart: int = 0,
    evaluation: bool = False,
    stop: threading.Event | None = None,
    session: int = 0,
) -> None:
    """Steps environments for the server until it ends training; survives the server's restarts.

    Args:
        config: Of the run.
        address: Of the policy server.
        actor_id: Unique in the run.
        make_group: Makes the environments of one group from their seeds.
        restart: How often this actor was restarted; its environments get other seeds each time.
        evaluation: Act greedily and stay out of training.
        stop: Ends the loop at the next step.
        session: Update that the run was resumed at; the environments get other seeds in each session.

    Raises:
        ServerLostError: the server did not answer again within `config.actor.give_up_s`.
        ConfigError: the server refuses this actor, or an observation differs from the environment's spec.
        RejectedError: the server refuses this actor's rows.
        Replaced: a newer run of this actor took its place.
    """
    stop = stop or threading.Event()
    seeds = env_seeds(config, actor_id, restart, session)
    envs = [make_group(part) for part in np.split(seeds, config.actor.groups)]
    try:
        deadline = None  # when to give up; set while the server is lost
        while not stop.is_set():
            try:
                with contextlib.closing(_connect(config, address, actor_id, envs, evaluation)) as connection:
                    streams = _begin(connection, envs)
                    while not stop.is_set():
                        _exchange(envs, streams)
                        deadline = None  # Only a reply says that the server works, a connection does not.
            except ServerLostError as error:
                deadline = _wait(error, deadline, config.actor.give_up_s, stop)
    except Finished:
        return
    except (ObservationError, WireError) as error:
        raise ConfigError(f"env {config.env!r} contradicts its own spec: {error}") from error
    finally:
        for env in envs:
            env.close()


def _wait(error: ServerLostError, deadline: float | None, give_up_s: float, stop: threading.Event) -> float:
    """Pauses before the next attempt; returns when to give up, which the first failure after a reply settles."""
    if deadline is None:
        deadline = time.monotonic() + give_up_s
        print(f"{error}; waiting for it, up to {give_up_s:g} s", file=sys.stderr)
    elif time.monotonic() > deadline:
        raise ServerLostError(f"{error}; gave up after {give_up_s:g} s") from None
    stop.wait(_RETRY_S)
    return deadline


def _connect(config: Config, address: str, actor_id: int, envs: Sequence[Env], evaluation: bool) -> Connection:
    return Connection(
        address,
        config.inference,
        actor_id,
        dataclasses.replace(envs[0].spec, env=config.env),  # a user's own environment may call itself anything
        groups=len(envs),
        envs_per_group=config.envs_per_group,
        evaluation=evaluation,
        timeout_s=_ADMISSION_S,
    )


def _begin(connection: Connection, envs: Sequence[Env]) -> list[GroupStream]:
    """Opens a stream for each group and sends the first rows of fresh episodes."""
    streams = [connection.open_stream(group) for group in range(len(envs))]
    for env, stream in zip(envs, streams, strict=True):
        stream.send(env.reset())
    return streams


def _exchange(envs: Sequence[Env], streams: Sequence[GroupStream]) -> None:
    """One step of every group in turn: while the server chooses one group's actions, another group steps."""
    for env, stream in zip(envs, streams, strict=True):
        stream.send(env.step(stream.receive()))

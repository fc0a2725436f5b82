"""The actor that a learner waits for, since it says what the environments are; it may be in the learner's process."""

from __future__ import annotations

import contextlib
import time
from concurrent.futures import TimeoutError as FutureTimeoutError

from seedx.checks import ConfigError
from seedx.config import Config
from seedx.inference.frontend import FrontEnd
from seedx.threads import Crew
from seedx.types import EnvSpec

_POLL_S = 0.1


def await_spec(config: Config, front_end: FrontEnd, crew: Crew) -> EnvSpec:
    """The environments' spec, which the first actor says.

    Raises:
        ConfigError: there was none in time.
        SystemExit: the crew has stopped meanwhile.
    """
    deadline = time.monotonic() + config.inference.hello_timeout_s
    while time.monotonic() < deadline:
        try:
            return front_end.first_spec.result(timeout=_POLL_S)
        except FutureTimeoutError:
            if crew.stop.is_set():
                raise SystemExit(1) from None
    raise ConfigError(
        f"no actor said hello within {config.inference.hello_timeout_s:.0f} s; are they started with "
        f"--server {front_end.address}? Raise --inference.hello-timeout-s if they start slowly."
    )


def act_here(config: Config, address: str, actor_id: int, session: int, crew: Crew) -> None:
    """Starts an actor in this process, through the same client (`--num-actors 0`).

    Args:
        config: Of the run.
        address: Of the policy server.
        actor_id: Unique in the run.
        session: See `run_actor`.
        crew: Gets the actor's thread.
    """
    from seedx.envs.actor import run_actor
    from seedx.envs.make import make_env
    from seedx.inference.client import Replaced

    def act() -> None:
        with contextlib.suppress(Replaced):  # by a process
            run_actor(
                config,
                address,
                actor_id,
                make_group=lambda seeds: make_env(config, len(seeds), seeds),
                session=session,
                stop=crew.stop,
            )

    crew.spawn(f"actor-{actor_id}", act)

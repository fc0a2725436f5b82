"""A decode host's process: an engine that follows the learner's weights and answers its requests.

Threading: the main thread waits for signals and failures. One thread of the crew makes the engine, then follows the
weights; the scheduler has another.
"""

from __future__ import annotations

import sys
import time

import jax

from seedx.checks import ConfigError
from seedx.inference.decode_host import DecodeHost
from seedx.llm_config import LlmConfig
from seedx.llm_parts import make_engine, schedule
from seedx.llm_serving import Serving
from seedx.llm_setup import caster, set_up
from seedx.security import Access
from seedx.signals import on_stop
from seedx.threads import Crew, spare_the_collector
from seedx.transport.errors import CorruptedError, WeightsLostError
from seedx.transport.open import Reader, open_reader
from seedx.types import Tree
from seedx.weights import Weights

_POLL_S = 0.1
_RECEIVE_S = 5.0
_GIVE_UP_S = 60.0  # without a learner; its supervisor ends us sooner


def run_decode_host(config: LlmConfig, address: str, learner: str, index: int) -> int:
    """Generates until a signal; the exit code.

    Args:
        config: Of the run.
        address: Where to listen.
        learner: Where it publishes its weights.
        index: Which of the run's decode hosts this is; the first also answers at `serve_port`.

    Raises:
        ConfigError: an address, the task or the model cannot be used.
    """
    crew, signals = Crew(), []
    on_stop(signals.append)
    host = DecodeHost(address, crew.fail)
    serving = Serving(config.serve_port, crew) if config.serve_port is not None and index == 0 else None
    crew.spawn("weights", _work, config, learner, crew, host, serving)
    while not signals and not crew.stop.is_set():
        crew.stop.wait(_POLL_S)
    if isinstance(crew.failure, ConfigError):
        raise crew.failure
    if crew.failure is not None:
        print(crew.describe_failure(), file=sys.stderr, flush=True)
        return 1
    return 128 + signals[0]


def _work(config: LlmConfig, learner: str, crew: Crew, host: DecodeHost, serving: Serving | None) -> None:
    started = time.monotonic()
    _say(f"loading {config.model}")
    setup, params = set_up(config, lambda _: None)  # the learner says which prompts are passed over
    params = caster(config.learner.dtype)(params)
    _say("compiling")
    engine = make_engine(config, setup, Weights(0, params), _say)
    follower = Follower(learner, params)
    del params
    _say(f"waiting for weights after {time.monotonic() - started:.1f} s")
    weights = follower.next()
    scheduler = schedule(config, setup, engine, weights, crew)
    spare_the_collector()
    scheduler.start()
    host.begin(scheduler)
    _say(f"ready with version {weights.version} after {time.monotonic() - started:.1f} s")
    if serving is not None:
        _say(f"the engine answers at {serving.begin(scheduler, setup)}")
    del weights
    while not crew.stop.is_set():
        scheduler.publish(*follower.next())


class Follower:
    """The learner's weights, version after version, where the engine wants them.

    Args:
        learner: Where they are published.
        params: Like them, where they are to live.
    """

    def __init__(self, learner: str, params: Tree) -> None:
        expected = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), params)
        self._layout = jax.tree.map(lambda leaf: leaf.sharding, params)
        self._reader: Reader = open_reader(learner, Access(), expected=expected)
        self._version = -1

    def next(self) -> Weights:
        """The newest version, once there is another one.

        Raises:
            WeightsLostError: the learner has been away for too long.
            CorruptedError: nothing whole has come for so long.
            ConfigError: it has another model.
        """
        heard_at = time.monotonic()
        while True:
            try:
                found = self._reader.receive(self._version, _RECEIVE_S)
                heard_at = time.monotonic()
            except (CorruptedError, WeightsLostError) as error:
                if time.monotonic() - heard_at > _GIVE_UP_S:
                    raise
                if isinstance(error, CorruptedError):
                    _say(f"{error}; it is read again")
                continue
            if found is not None:
                self._version = found.version
                return Weights(found.version, jax.device_put(found.params, self._layout))


def _say(text: str) -> None:
    print(text, flush=True)

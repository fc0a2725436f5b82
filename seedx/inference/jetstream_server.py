"""JetStream's own driver and gRPC service over our decode engine, in a process of its own, for this machine alone.

    python -m seedx.inference.jetstream_server --model smollm2 --port 9000

With `--weights-dir`, each directory in it whose name is a number above the version that is served is loaded as a
Hugging Face model and served from the next token on; put it there by renaming, so that it is whole. SIGTERM and
Ctrl-C stop the server. Exit codes: 2 wrong flags or model, 130 after Ctrl-C, 143 after SIGTERM, else a failure, which
is printed.
"""

from __future__ import annotations

import asyncio
import math
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import grpc.aio
import jax.numpy as jnp
import tyro

from seedx import security
from seedx.checks import ConfigError, require
from seedx.inference.engine import Engine
from seedx.inference.engine_config import EngineConfig
from seedx.inference.jetstream_driver import JetStreamDriver, JetStreamService
from seedx.inference.jetstream_engine import JetStreamEngine
from seedx.inference.jetstream_shims import jetstream_pb2_grpc
from seedx.inference.live_weights import check_shapes, check_version
from seedx.inference.load_engine import dtype_of, load_engine
from seedx.inference.requests import Request
from seedx.networks import transformer
from seedx.networks.hf_files import load_hf, read_hf
from seedx.signals import on_stop
from seedx.threads import Crew
from seedx.types import Tree
from seedx.weights import Weights

_POLL_S = 0.1


@dataclass(frozen=True)
class JetStreamConfig(EngineConfig):
    """A JetStream server: its engine, and what JetStream's requests have no fields for.

    Attributes:
        port: On 127.0.0.1; 0 takes a free one.
        samples_per_slot: Completions of each prompt.
        temperature: Of all completions, for JetStream's requests have none; 0: the likeliest token.
        seed: Of their randomness.
        weights_dir: Where new versions of the weights appear; None: there are none.
    """

    _MULTIPLE_OF: ClassVar[str] = (
        f"{EngineConfig._MULTIPLE_OF}, and --samples-per-slot of them are one of JetStream's slots"
    )

    port: int = 9000
    samples_per_slot: int = 1
    temperature: float = 0.0
    seed: int = 0
    weights_dir: Path | None = None
    drain_s: float = 5.0

    def __post_init__(self) -> None:
        require(0 <= self.port < 2**16, f"--port ({self.port}) must be from 0 to 65535.")
        require(self.samples_per_slot >= 1, f"--samples-per-slot ({self.samples_per_slot}) must be at least 1.")
        try:
            self.sampling.check(vocab_size=1, length=2, has_tokenizer=False)
        except ValueError as error:
            raise ConfigError(f"--{error}") from None
        require(
            self.weights_dir is None or self.weights_dir.is_dir(),
            f"--weights-dir ({self.weights_dir}) is no directory; make it, and put new versions there by renaming.",
        )
        super().__post_init__()

    @property
    def sampling(self) -> Request:
        """How all completions are sampled, as a request says it."""
        return Request((0,), 1, temperature=self.temperature, seed=self.seed)

    @property
    def slots_multiple(self) -> int:
        """Slots come in groups of a prompt's samples."""
        return math.lcm(super().slots_multiple, self.samples_per_slot)


class JetStreamServer:
    """Serves until a signal or a failure of the driver.

    Args:
        driver: Its threads run already.
        crew: The driver's.
        port: On 127.0.0.1; 0 takes a free one.
        drain_s: How long open requests may go on after a signal.
    """

    def __init__(self, driver: JetStreamDriver, crew: Crew, port: int, drain_s: float) -> None:
        self._driver, self._crew, self._port, self._drain_s = driver, crew, port, drain_s
        self._signals: list[int] = []
        on_stop(lambda number: os._exit(128 + number) if self._signals else self._signals.append(number))

    def run(self) -> int:
        """The exit code.

        Raises:
            ConfigError: the port is taken.
        """
        asyncio.run(self._serve())
        if self._crew.failure is None:
            return 128 + self._signals[0]
        print(self._crew.describe_failure(), file=sys.stderr, flush=True)
        return 1

    async def _serve(self) -> None:
        server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        jetstream_pb2_grpc.add_OrchestratorServicer_to_server(JetStreamService(self._driver), server)
        port = security.bind(server, f"127.0.0.1:{self._port}", security.Access())
        await server.start()
        print(f"jetstream_server: listening on 127.0.0.1:{port}", flush=True)
        while not self._signals and not self._crew.stop.is_set():
            await asyncio.sleep(_POLL_S)
        await server.stop(0.0 if self._crew.failure else self._drain_s)
        if self._crew.failure is None:
            await asyncio.to_thread(self._driver.stop)  # before the loop ends, to which its threads hand their tokens


def make_engine(config: JetStreamConfig) -> JetStreamEngine:
    """Loads the model and compiles.

    Raises:
        ConfigError: the model cannot be read, or does not fit.
    """
    model, engine = load_engine(config, 1, lambda text: print(f"jetstream_server: {text}", flush=True))
    made = JetStreamEngine(
        engine,
        Weights(0, model.params),
        model.tokenizer,
        name=model.name,
        sampling=config.sampling,
        samples_per_slot=config.samples_per_slot,
    )
    made.warm_up()
    return made


def follow(directory: Path, dtype: str, engine: Engine, driver: JetStreamDriver, crew: Crew) -> None:
    """Publishes the versions that appear in a directory, until the crew stops; what cannot be used is told and left.

    Args:
        directory: Of a Hugging Face model for each version.
        dtype: Of the weights.
        engine: Where they will live.
        driver: Of this engine.
        crew: The driver's.
    """
    served, tried, failing = 0, set(), False
    while not crew.stop.wait(_POLL_S):
        try:
            names = {path.name for path in directory.iterdir() if path.name.isdecimal()}
        except OSError as error:  # it may be on another machine, and come back
            if not failing:
                _complain(f"--weights-dir cannot be read, and is tried again: {error}")
            failing = True
            continue
        failing = False
        name = max(names - tried, key=int, default="0")
        if int(name) <= served:
            continue
        tried.add(name)
        try:
            driver.publish(int(name), _load(directory / name, int(name), dtype, engine))
            served = int(name)
            print(f"jetstream_server: version {name} is served", flush=True)
        except (ValueError, OSError) as error:  # ConfigError among them
            _complain(f"version {name} is not used: {error}")


def _load(path: Path, version: int, dtype: str, engine: Engine) -> Tree:
    """The weights of a directory, where the engine wants them; another model is refused before any is read."""
    check_version(version)
    found, _ = read_hf(path)
    check_shapes(*(transformer.abstract_params(config, jnp.dtype(dtype)) for config in (engine.config, found)))
    return load_hf(path, dtype=dtype, shardings=engine.layout)[1]


def _complain(text: str) -> None:
    print(f"jetstream_server: {text}", file=sys.stderr, flush=True)


def main(argv: Sequence[str]) -> int:
    """Parses the flags, serves, and returns the exit code."""
    try:
        config = tyro.cli(JetStreamConfig, args=argv, description=__doc__)
        crew = Crew()
        made = make_engine(config)
        driver = JetStreamDriver(crew, [made])
        server = JetStreamServer(driver, crew, config.port, config.drain_s)
        if config.weights_dir is not None:
            crew.spawn("weights", follow, config.weights_dir, dtype_of(config), made.engine, driver, crew)
        return server.run()
    except ConfigError as error:
        _complain(str(error))
        return 2
    except KeyboardInterrupt:  # before the server has its own handler
        return 130


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(code)  # threads that wait inside native code must not hold it up

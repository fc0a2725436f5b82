"""The decode server's process: loads a model, compiles, serves until a signal or a failure.

Threading: the main thread waits for signals and failures; the loop of the servers has a thread of its own, the crew
those that load the model and schedule. SIGTERM lets requests finish, Ctrl-C ends them, a second signal ends at once.
"""

from __future__ import annotations

import os
import shlex
import signal
import sys
import time

from seedx.checks import ConfigError
from seedx.inference.decode_metrics import DecodeMetrics
from seedx.inference.decode_server import DecodeServer
from seedx.inference.decode_service import DecodeService
from seedx.serve_config import ServeConfig
from seedx.signals import on_stop
from seedx.threads import Crew, spare_the_collector

_POLL_S = 0.1
_PROGRESS_S = 3.0
_THIS_MACHINE = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}  # of a server that listens on all addresses
_LAST_WORDS_S = 0.5  # in which clients are told of a failure


def run_server(config: ServeConfig) -> int:
    """Serves until a signal; the exit code.

    Raises:
        ConfigError: an address, a credential or the model cannot be used.
    """
    crew, service, signals = Crew(), DecodeService(DecodeMetrics()), []
    server = DecodeServer(service, config.address, config.http_address, config.access, crew.fail)
    on_stop(lambda number: os._exit(128 + number) if signals else signals.append(number))
    server.start()
    crew.spawn("loading", _load, config, crew, service, server)
    while not signals and not crew.stop.is_set():
        crew.stop.wait(_POLL_S)
    if crew.failure is not None:
        service.fail(crew.failure)
        server.stop(_LAST_WORDS_S)
        if isinstance(crew.failure, ConfigError):
            raise crew.failure
        print(crew.describe_failure(), file=sys.stderr, flush=True)
        return 1
    drain_s = config.drain_s if signals[0] == signal.SIGTERM else 0.0
    if service.num_open:
        _say(_farewell(service.num_open, drain_s))
    server.stop(drain_s)
    return 128 + signals[0]


def _farewell(num_open: int, drain_s: float) -> str:
    """What becomes of the requests that are open."""
    one = num_open == 1
    are_open = "1 request is open; it" if one else f"{num_open} requests are open; they"
    if drain_s:
        return f"{are_open} {'has' if one else 'have'} {drain_s:g} s to finish."
    return f"{are_open} {'is' if one else 'are'} ended."


def _load(config: ServeConfig, crew: Crew, service: DecodeService, server: DecodeServer) -> None:
    """Makes a scheduler over the model, and has the service begin."""
    started = time.monotonic()
    _say(f"loading {config.model}")
    from seedx.inference.load_engine import load_engine
    from seedx.inference.scheduler import Scheduler
    from seedx.weights import Weights

    model, engine = load_engine(config, config.steps_per_dispatch, _say, quantize=config.weights == "int8")
    weights = Weights(0, model.params)
    _say("compiling")
    engine.warm_up(weights, _Compiling())
    scheduler = Scheduler(engine, weights, tokenizer=model.tokenizer, crew=crew)
    service.metrics.watch(scheduler.figures)
    if (gap := scheduler.logprob_gap) is not None:
        _say(f"int8 weights change log-probabilities by {gap.mean:.3g} in the mean and {gap.greatest:.3g} at most")
    spare_the_collector()
    scheduler.start()
    service.begin(scheduler, model.name, model.tokenizer, model.chat_template)
    _say(f"ready after {time.monotonic() - started:.1f} s. {example(server.address, server.http_address, config)}")


class _Compiling:
    """Says now and then how many programs are ready: a large model's take minutes without a cache."""

    def __init__(self) -> None:
        self._shown_at = time.monotonic()

    def __call__(self, ready: int, programs: int) -> None:
        if time.monotonic() > self._shown_at + _PROGRESS_S:
            self._shown_at = time.monotonic()
            _say(f"compiling; {ready} of {programs} programs are ready")


def example(address: str, http_address: str | None, config: ServeConfig) -> str:
    """What is listened on, and a command to try on this machine."""
    http = f", OpenAI-style HTTP on {http_address}" if http_address else ""
    host, _, port = address.rpartition(":")
    reachable = f"{_THIS_MACHINE[host]}:{port}" if host in _THIS_MACHINE else address
    command = ["python", "-m", "seedx.inference.client", "decode", "--server", reachable]
    for flag, file in (("--token-file", config.token_file), ("--tls-ca", config.tls_cert)):
        command += [flag, file] if file else []
    return f'gRPC on {address}{http}. Try:\n  {shlex.join(command)} --prompt "Hello" --max-tokens 64'


def _say(text: str) -> None:
    print(f"serve.py: {text}", flush=True)

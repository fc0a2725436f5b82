"""The flags of the decode server. No jax."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import tyro

from seedx.checks import require
from seedx.inference.engine_config import EngineConfig
from seedx.security import Access

_MAX_STEPS = 64  # more cost memory and time to compile, and hold up what is cancelled or new


@dataclass(frozen=True)
class ServeConfig(EngineConfig):
    """A decode server: its engine, and who may connect where.

    Attributes:
        host: Name or address to listen on, or unix:/path, which is for gRPC alone.
        port: Of gRPC: JetStream's service and seedx's own; 0 takes a free one.
        http_port: Of the OpenAI-style API; 0 takes a free one; None: no HTTP.
        weights: full: as --dtype says; int8: matrices are kept in 8 bits, and computed with in --dtype.
        steps_per_dispatch: Tokens that each completion gets from one launch, at most 64.
        tls_cert: PEM file of the server's certificate chain; None: no TLS.
        tls_key: PEM file of the server's private key.
        token_file: File that holds the token which clients send; None: no token.
    """

    host: str = "127.0.0.1"
    port: int = 9000
    http_port: int | None = 9001
    weights: Literal["full", "int8"] = "full"
    steps_per_dispatch: int = 8
    tls_cert: str | None = None
    tls_key: str | None = None
    token_file: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("port", "http_port"):
            value = getattr(self, name)
            require(
                value is None or 0 <= value < 2**16, f"--{name.replace('_', '-')} ({value}) must be from 0 to 65535."
            )
        require(
            self.port == 0 or self.port != self.http_port or self.host.startswith("unix:"),
            f"--port and --http-port are both {self.port}; give two ports that differ, or 0 for a free one.",
        )
        most = min(_MAX_STEPS, self.context or _MAX_STEPS)
        require(
            1 <= self.steps_per_dispatch <= most,
            f"--steps-per-dispatch ({self.steps_per_dispatch}) must be from 1 to {most}"
            + (" (--context)." if most < _MAX_STEPS else "."),
        )
        both = (self.tls_cert is None) == (self.tls_key is None)
        require(both, "--tls-cert and --tls-key go together; give both or neither.")

    @property
    def address(self) -> str:
        """Where gRPC listens."""
        return self.host if self.host.startswith("unix:") else f"{self._host}:{self.port}"

    @property
    def http_address(self) -> str | None:
        """Where HTTP listens."""
        if self.http_port is None or self.host.startswith("unix:"):
            return None
        return f"{self._host}:{self.http_port}"

    @property
    def access(self) -> Access:
        """The credentials."""
        return Access(tls_cert=self.tls_cert, tls_key=self.tls_key, token_file=self.token_file)

    @property
    def _host(self) -> str:
        return f"[{self.host}]" if ":" in self.host and not self.host.startswith("[") else self.host


def parse(argv: Sequence[str], description: str) -> ServeConfig:
    """The config that the flags describe.

    Raises:
        ConfigError: a value is not allowed.
        SystemExit: after `--help` (0), or a flag is unknown or its value cannot be parsed (2).
    """
    try:
        return tyro.cli(ServeConfig, args=argv, description=description)
    except BrokenPipeError:  # `--help | head`; the descriptor is replaced so that the flush at exit does not fail too.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(0) from None

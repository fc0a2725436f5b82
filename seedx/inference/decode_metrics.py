"""What the decode server shows to Prometheus: requests and tokens by protocol, times, the scheduler's own figures."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import UnknownMetricFamily
from prometheus_client.registry import Collector

from seedx.metrics import Number

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class DecodeMetrics:
    """Metrics of one server, in a registry of its own. Thread-safe."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        own = {"registry": self._registry}
        self._requests = Counter(
            "seedx_decode_requests", "Requests that ended, and how.", ("protocol", "outcome"), **own
        )
        self._prompt_tokens = Counter("seedx_decode_prompt_tokens", "Tokens of their prompts.", ("protocol",), **own)
        self._tokens = Counter("seedx_decode_completion_tokens", "Tokens sent.", ("protocol",), **own)
        self._open = Gauge("seedx_decode_open_requests", "Requests being answered.", **own)
        self._first = Histogram(
            "seedx_decode_first_token_seconds", "From a request to its first token.", buckets=_SECONDS, **own
        )
        self._duration = Histogram(
            "seedx_decode_request_seconds", "From a request to its end.", ("protocol",), buckets=_SECONDS, **own
        )

    def watch(self, figures: Callable[[], Mapping[str, Number]]) -> None:
        """Shows these figures too, asked for with each scrape; decode/waiting becomes seedx_decode_waiting."""
        self._registry.register(_Figures(figures))

    def opened(self, prompt_tokens: int, protocol: str) -> None:
        """A request was taken."""
        self._open.inc()
        self._prompt_tokens.labels(protocol).inc(prompt_tokens)

    def closed(self, protocol: str, tokens: int, first_token_s: float | None, seconds: float) -> None:
        """A request that was taken has ended; `first_token_s` is None if no token came."""
        self._open.dec()
        self._tokens.labels(protocol).inc(tokens)
        self._duration.labels(protocol).observe(seconds)
        if first_token_s is not None:
            self._first.observe(first_token_s)

    def ended(self, protocol: str, outcome: str) -> None:
        """A request ended: with its last finish reason, or as one of docs/decode.md's other outcomes."""
        self._requests.labels(protocol, outcome).inc()

    def text(self) -> bytes:
        """All of it in Prometheus' text format."""
        return generate_latest(self._registry)


class _Figures(Collector):
    """Figures whose names are known only when they come."""

    def __init__(self, figures: Callable[[], Mapping[str, Number]]) -> None:
        self._figures = figures

    def describe(self) -> list:
        """Nothing: the names are not known yet."""
        return []

    def collect(self) -> Iterator[UnknownMetricFamily]:
        """The figures as they are now."""
        for name, value in self._figures().items():
            shown = f"seedx_{re.sub(r'[^a-zA-Z0-9_]', '_', name)}"
            yield UnknownMetricFamily(shown, "Of the scheduler.", value=float(value))

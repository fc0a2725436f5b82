"""A decode server in this process, over a small model whose texts are letters and two-byte characters."""

import contextlib
import functools
import json
import math
import threading
from http.client import HTTPConnection

from decode_harness import make_engine, make_params

from seedx.bpe import byte_tokenizer
from seedx.chat import CHATML, ChatTemplate
from seedx.inference.decode_client import generate
from seedx.inference.decode_metrics import DecodeMetrics
from seedx.inference.decode_pb2 import GenerateRequest
from seedx.inference.decode_server import DecodeServer
from seedx.inference.decode_service import DecodeService
from seedx.inference.requests import Request
from seedx.inference.scheduler import Limits, Scheduler
from seedx.networks.transformer_config import TransformerConfig
from seedx.security import Access
from seedx.threads import Crew
from seedx.weights import Weights

CONFIG = TransformerConfig(
    vocab_size=260, width=32, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=8, ffn_width=32, max_length=64
)
LONG = 10_000  # max_tokens of a completion that ends with the context
STEPS = 2
OPEN = Access()
# With these a completion is a mix of all tokens, so that characters and stop texts lie across them.
MIXED = {"temperature": 50.0}


class Letters:
    """The byte tokenizer, but that what comes back is a few letters and the halves of a two-byte character."""

    def __init__(self):
        self._bytes = byte_tokenizer()
        self.vocab_size, self.bos_id = self._bytes.vocab_size, self._bytes.bos_id
        self.eos_ids, self.pad_id = self._bytes.eos_ids, self._bytes.pad_id

    def encode(self, text, add_bos=True, parse_special=False):
        return self._bytes.encode(text, add_bos, parse_special)

    def literal(self, text):
        return self._bytes.literal(text)

    def token_bytes(self, token):
        return (b"a", b"b", b"\xc3", b"\xa9")[token % 4] if token < 256 else b""

    def decode(self, tokens):
        return b"".join(map(self.token_bytes, tokens)).decode("utf-8", "replace")


TOKENIZER = Letters()


class Gate:
    """What the engine holds while it launches: tests hold it to stop the engine, or break it."""

    def __init__(self):
        self._lock = threading.Lock()
        self._left = math.inf
        self.error = None
        self.waiting = 0

    def __enter__(self):
        self.waiting += 1
        self._lock.acquire()
        self.waiting -= 1
        if self.error is not None:
            self._lock.release()
            raise self.error
        self._left -= 1

    def __exit__(self, *_):
        if not self.closed:
            self._lock.release()

    @property
    def closed(self):
        """Whether the launches of `close_after` are over."""
        return self._left <= 0

    def close_after(self, launches):
        """Stops the engine after some more, until `open`."""
        self._left = launches

    def open(self):
        self._left = math.inf
        self._lock.release()


@functools.cache
def engine_and_weights():
    """One engine a process: it takes seconds to compile."""
    params = make_params(0, CONFIG)
    weights = Weights(0, params)
    engine = make_engine(CONFIG, slots=2, steps=STEPS, launching=Gate())
    engine.warm_up(weights)
    return engine, weights


class Serving:
    """A server with gRPC on a Unix socket and HTTP on a free port."""

    def __init__(self, directory, access=OPEN, limits=None, address=None):
        self.engine, weights = engine_and_weights()
        self.gate = self.engine.launching
        self.crew = Crew()
        self.scheduler = Scheduler(self.engine, weights, tokenizer=TOKENIZER, limits=limits or Limits(), crew=self.crew)
        self.service = DecodeService(DecodeMetrics())
        self.access = access
        self.server = DecodeServer(
            self.service, address or f"unix:{directory}/decode.sock", "127.0.0.1:0", access, self.crew.fail
        )
        self.server.start()

    def __enter__(self):
        self.service.metrics.watch(self.scheduler.figures)
        self.scheduler.start()
        self.service.begin(self.scheduler, "tiny", TOKENIZER, ChatTemplate(CHATML, {}))
        return self

    def __exit__(self, *_):
        self.gate.error = None
        self.server.stop(0.0)
        if self.crew.failure is None:
            self.scheduler.close(drain=False, timeout_s=60)
        assert self.crew.join(60.0) == []

    def generate(self, timeout_s=60.0, access=None, **fields):
        """Replies as they come; a context manager."""
        return generate(self.server.address, GenerateRequest(**fields), access or self.access, timeout_s)

    def expected(self, prompt, max_tokens, **options):
        """What the scheduler itself makes of a request."""
        request = Request(tuple(prompt), max_tokens, stop_tokens=TOKENIZER.eos_ids, **options)
        return self.scheduler.submit(request).result(60)

    def http(self, method, path, body=None, **headers):
        """Status, headers and body, which is parsed if it is JSON."""
        with self.open_http(method, path, body, **headers) as response:
            text = response.read().decode()
            is_json = response.headers["Content-Type"].startswith("application/json")
            return response.status, response.headers, json.loads(text) if is_json else text

    @contextlib.contextmanager
    def open_http(self, method, path, body=None, **headers):
        host, _, port = self.server.http_address.rpartition(":")
        connection = HTTPConnection(host, int(port), timeout=60)
        headers = {name.replace("_", "-"): value for name, value in headers.items()}
        if body is not None:
            headers.setdefault("Content-Type", "application/json")
            body = body if isinstance(body, bytes) else json.dumps(body).encode()
        with contextlib.closing(connection):
            connection.request(method, path, body, headers)
            with connection.getresponse() as response:
                yield response

    def events(self, path, body):
        """The payloads of a stream of server-sent events; the last is "[DONE]"."""
        status, headers, text = self.http("POST", path, {**body, "stream": True})
        assert (status, headers["Content-Type"]) == (200, "text/event-stream")
        lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
        return [json.loads(line) for line in lines[:-1]] + lines[-1:]

    def figure(self, name):
        """A figure of /metrics; 0 if it is not there."""
        lines = self.http("GET", "/metrics")[2].splitlines()
        return next((float(line.rpartition(" ")[2]) for line in lines if line.startswith(name)), 0.0)

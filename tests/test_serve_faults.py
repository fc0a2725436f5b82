"""What goes wrong with launch/serve.py and its client, as real processes: credentials, failures, signals, flags."""

import contextlib
import http.client
import json
import re
import signal
import socket
import ssl
from pathlib import Path

import jax
import pytest
from certificates import write_certificate
from hf_directories import write_byte_tokenizer
from processes import Processes, until
from serve_processes import addresses, ask, serve, start

from seedx.networks.hf_files import save_hf
from seedx.networks.transformer import init_params
from seedx.networks.transformer_config import TransformerConfig


@pytest.fixture
def processes(tmp_path):
    with Processes(tmp_path) as processes:
        yield processes


@contextlib.contextmanager
def post(address, body, tls=None, **headers):
    """The answer to a completion over HTTP."""
    host, _, port = address.rpartition(":")
    kind = http.client.HTTPConnection if tls is None else http.client.HTTPSConnection
    options = {} if tls is None else {"context": tls}
    with contextlib.closing(kind(host, int(port), timeout=60, **options)) as connection:
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json", **headers})
        with connection.getresponse() as response:
            yield response


@pytest.mark.slow
def test_tls_and_a_token_over_both_protocols(processes, tmp_path):
    cert, key = write_certificate(tmp_path, "seedx")
    stranger, _ = write_certificate(tmp_path, "stranger")
    token = tmp_path / "token"
    token.write_text("open sesame")
    flags = ("--host", "0.0.0.0", "--tls-cert", cert, "--tls-key", key, "--token-file", str(token))
    server = start(processes, *flags)
    grpc_address, http_address = (f"127.0.0.1:{address.rpartition(':')[2]}" for address in addresses(server))
    asking = ("--server", grpc_address, "--prompt", "a", "--max-tokens", "2", "--timeout-s", "60")
    credentials = ("--tls-ca", cert, "--token-file", str(token))
    cases = [
        (credentials, 0, ""),
        (("--tls-ca", cert), 2, "wants a token"),
        (("--tls-ca", stranger, "--token-file", str(token)), 2, "CERTIFICATE_VERIFY_FAILED"),
        (("--token-file", str(token)), 2, "is not there, or takes no requests"),  # without TLS
    ]
    clients = [ask(processes, *asking, *given) for given, _, _ in cases]
    for client, (given, code, said) in zip(clients, cases, strict=True):
        assert client.wait() == code, (given, client.said)
        assert said in client.err
    body, right = {"prompt": "a", "max_tokens": 2}, {"Authorization": "Bearer open sesame"}
    trusting = ssl.create_default_context(cafile=cert)
    with post(http_address, body, trusting, **right) as response:
        assert (response.status, json.load(response)["usage"]["completion_tokens"]) == (200, 2)
    with post(http_address, body, trusting) as response:
        assert response.status == 401
    with (
        pytest.raises(ssl.SSLCertVerificationError),
        post(http_address, body, ssl.create_default_context(cafile=stranger), **right),
    ):
        pass
    with pytest.raises((ConnectionError, http.client.HTTPException)), post(http_address, body, **right):
        pass
    server.send(signal.SIGTERM)
    assert server.wait() == 128 + signal.SIGTERM, server.said


# Fails once tokens were made, so that streams are under way.
BROKEN = """
import itertools, sys
import launch.serve
from seedx.inference.engine import Engine
dispatches, generate = itertools.count(), Engine.generate
def failing(self, *args):
    if next(dispatches) == 3:
        raise RuntimeError("the device is gone")
    return generate(self, *args)
Engine.generate = failing
launch.serve.end(launch.serve.main(sys.argv[1:]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_a_failing_scheduler_takes_the_process_down_and_clients_are_told(processes, protocol):
    server = start(processes, "--steps-per-dispatch", "1", command=("-c", BROKEN))
    grpc_address, http_address = addresses(server)
    if protocol == "grpc":
        client = ask(processes, "--server", grpc_address, "--prompt", "a", "--max-tokens", "200")
        assert client.wait() == 2
        assert "(UNAVAILABLE): the decode engine has failed" in client.err
    else:
        with post(http_address, {"prompt": "a", "max_tokens": 200, "stream": True}) as response:
            *_, last, done = [line for line in response.read().decode().split("\n\n") if line]
        assert "the decode engine has failed" in json.loads(last.removeprefix("data: "))["error"]["message"]
        assert done == "data: [DONE]"
    assert server.wait() == 1
    assert server.err.count("Traceback") == 1
    assert "RuntimeError: the device is gone" in server.err


NOHUP = """
import signal, sys
import launch.serve
signal.signal(signal.SIGHUP, signal.SIG_IGN)
launch.serve.end(launch.serve.main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_sighup_drains_as_sigterm_does_unless_it_is_ignored(processes):
    server, address = serve(processes)
    greedy = ("--server", address, "--prompt", "a", "--temperature", "0", "--max-tokens")
    client = ask(processes, *greedy, "240")
    until(lambda: client.out, "the first text")
    server.send(signal.SIGHUP)
    assert server.wait() == 128 + signal.SIGTERM, server.said
    assert client.wait() == 0, client.said
    server = start(processes, command=("-c", NOHUP))
    address, _ = addresses(server)
    server.send(signal.SIGHUP)
    assert ask(processes, "--server", address, "--prompt", "a").wait() == 0
    server.send(signal.SIGINT)
    assert server.wait() == 128 + signal.SIGINT, server.said


@pytest.mark.parametrize("flag", ["--port", "--http-port"])
def test_a_port_that_is_taken_is_one_line(processes, flag):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        server = start(processes, flag, port)
        assert server.wait() == 2
    assert re.fullmatch(rf"serve\.py: cannot listen on 127\.0\.0\.1:{port}: it is in use .*\n", server.err), server.err


def test_more_steps_than_the_model_has_context(processes, tmp_path):
    config = TransformerConfig(
        vocab_size=256, width=8, num_layers=1, num_heads=1, num_kv_heads=1, head_dim=8, ffn_width=8, max_length=4
    )
    save_hf(tmp_path / "short", config, init_params(config, jax.random.key(0)))
    write_byte_tokenizer(tmp_path / "short")
    (tmp_path / "short" / "generation_config.json").write_text('{"eos_token_id": 3}')
    model = ("--model", str(tmp_path / "short"), "--context", "None")
    server = start(processes, *model, "--steps-per-dispatch", "5")
    assert server.wait() == 2
    assert server.err == "serve.py: --steps-per-dispatch (5) must be at most the 4 tokens of the context.\n"


@pytest.mark.parametrize("library", ["_multiarray_umath", "cygrpc"])
def test_ctrl_c_while_the_client_loads_shows_no_traceback(processes, tmp_path, library):
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(f"{tmp_path}/s")
        silent.listen()
        client = ask(processes, "--server", f"unix:{tmp_path}/s", "--prompt", "a")
        maps = Path(f"/proc/{client.popen.pid}/maps")
        client.until(lambda: library in maps.read_text(), "the modules")
        client.send(signal.SIGINT)
        assert client.wait() == 128 + signal.SIGINT
    assert client.err == "\n"

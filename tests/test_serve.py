"""launch/serve.py and the command-line client as real processes."""

import io
import json
import re
import signal
import subprocess
import sys
import urllib.request

import pytest
from processes import ROOT, Processes
from serve_processes import FLAGS, ask, serve

from seedx import serve_config
from seedx.checks import ConfigError
from seedx.device_config import MeshConfig
from seedx.inference import decode_client
from seedx.serve_role import example


@pytest.fixture
def processes(tmp_path):
    with Processes(tmp_path) as processes:
        yield processes


@pytest.mark.slow
def test_a_server_and_its_client(processes):
    server, address = serve(processes)
    said = server.out
    assert "2 slots of 256 tokens" in said
    assert "OpenAI-style HTTP on 127.0.0.1:" in said
    assert f'decode --server {address} --prompt "Hello"' in said
    greedy = ("--server", address, "--prompt", "Hello", "--max-tokens", "12", "--temperature", "0")
    plain, shown, three = (ask(processes, *greedy, *more) for more in ((), ("--json",), ("--json", "--n", "3")))
    assert [client.wait() for client in (plain, shown, three)] == [0, 0, 0], plain.err + shown.err + three.err
    (completion,) = map(json.loads, shown.out.splitlines())
    assert len(completion["tokens"]) == len(completion["raw_logprobs"]) == len(completion["versions"]) == 12
    assert plain.out == completion["text"] + "\n"
    assert [json.loads(line) for line in three.out.splitlines()] == [completion] * 3
    wrong = ask(processes, *greedy[:-1], "-1")
    assert wrong.wait() == 2
    assert "temperature" in wrong.err
    assert "Traceback" not in wrong.err
    server.send(signal.SIGINT)
    assert server.wait() == 128 + signal.SIGINT, server.said


@pytest.mark.slow
def test_sigterm_drains_and_a_second_signal_ends_at_once(processes):
    server, address = serve(processes, "--steps-per-dispatch", "1")
    client = ask(processes, "--server", address, "--prompt", "a", "--max-tokens", "200", "--json", "--temperature", "0")
    server.send(signal.SIGTERM)
    assert server.wait() == 128 + signal.SIGTERM, server.said
    assert client.wait() in (0, 2), client.said  # it finished, or came too late
    server, address = serve(processes)
    endless = ask(processes, "--server", address, "--prompt", "a", "--max-tokens", "1")
    assert endless.wait() == 0
    server.send(signal.SIGTERM)
    server.send(signal.SIGTERM)
    assert server.wait() == 128 + signal.SIGTERM


@pytest.mark.slow
def test_wrong_starts_end_with_2_and_a_message(processes, tmp_path):
    held, address = serve(processes)
    cases = [
        (("--port", address.rpartition(":")[2]), "in use"),
        (("--host", "0.0.0.0"), "--token-file"),
        (("--token-file", str(tmp_path / "missing")), "cannot be read"),
        (("--model", "nonsense"), "nonsense"),
        (("--memory-budget", "1KB"), "--memory-budget"),
        (("--memory-budget", "100TB"), "--memory-budget (100TB)"),
        (("--context", "1000000"), "--context"),
        (("--weights", "int4"), "int4"),
        (("--mesh.tensor", "2"), "(1 x 1 x 2) asks for 2 devices; there are 1"),
    ]
    for flags, message in cases:
        server = processes.launch("serve.py", *FLAGS, "--port", "0", "--http-port", "0", *flags)
        assert server.wait() == 2, server.said
        assert message in server.err
        assert "Traceback" not in server.err
    held.send(signal.SIGTERM)
    held.wait()


@pytest.mark.slow
def test_int8_weights_are_served_and_what_they_change_is_shown(processes):
    server, address = serve(processes, "--weights", "int8")
    assert "three versions of int8 weights" in server.out
    mean, greatest = map(float, re.search(r"probabilities by (\S+) in the mean and (\S+) at most", server.out).groups())
    assert 0 < mean < greatest
    client = ask(processes, "--server", address, "--prompt", "Hello", "--max-tokens", "4", "--temperature", "0")
    assert client.wait() == 0, client.said
    http = re.search(r"HTTP on (\S+?)\.? ", server.out)[1]
    with urllib.request.urlopen(f"http://{http}/metrics") as answer:
        (shown,) = re.findall(r"^seedx_decode_int8_logprob_gap_mean (\S+)", answer.read().decode(), re.MULTILINE)
    assert float(shown) == pytest.approx(mean, rel=0.01)
    server.send(signal.SIGINT)
    assert server.wait() == 128 + signal.SIGINT, server.said


@pytest.mark.slow
def test_eight_devices_serve_the_tokens_of_one(processes):
    eight = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    mesh = ("--mesh.data", "2", "--mesh.fsdp", "2", "--mesh.tensor", "2", "--max-concurrent", "4")
    answers = []
    for flags, env in (((), {}), (mesh, eight)):
        server, address = serve(processes, *flags, env=env)
        asking = ("--server", address, "--max-tokens", "40", "--temperature", "0", "--json", "--n", "2")
        clients = [ask(processes, *asking, "--prompt", text) for text in ("Hello", "one, two, " * 6, "a")]
        assert [client.wait() for client in clients] == [0, 0, 0], server.said
        lines = [[json.loads(line) for line in client.out.splitlines()] for client in clients]
        answers.append([[completion["tokens"] for completion in completions] for completions in lines])
        server.send(signal.SIGINT)
        assert server.wait() == 128 + signal.SIGINT, server.said
    assert "float32 on 8 x cpu: 4 slots" in server.out
    assert answers[0] == answers[1]


@pytest.mark.slow
def test_a_token_over_a_unix_socket(processes, tmp_path):
    (tmp_path / "token").write_text("open sesame\n")
    server, address = serve(processes, "--host", f"unix:{tmp_path}/s", "--token-file", str(tmp_path / "token"))
    assert address == f"unix:{tmp_path}/s"
    flags = ("--server", address, "--prompt", "a", "--max-tokens", "2")
    without, right = ask(processes, *flags), ask(processes, *flags, "--token-file", str(tmp_path / "token"))
    assert (without.wait(), right.wait()) == (2, 0)
    assert "wants a token" in without.err
    server.send(signal.SIGTERM)
    assert server.wait() == 128 + signal.SIGTERM


def test_without_a_server_the_client_says_what_to_do():
    command = [sys.executable, "-m", "seedx.inference.client", "decode", "--prompt", "a", "--server", "unix:/nowhere"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "unix:/nowhere" in done.stderr
    assert "launch/serve.py" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        *(("--seed", value) for value in ("-1", str(2**64))),
        *(("--max-tokens", value) for value in ("0", str(2**31))),
        *(("--top-k", value) for value in ("-1", str(2**31))),
        *(("--n", value) for value in ("0", str(2**31))),
        *(("--timeout-s", value) for value in ("0", "-1", "nan", "1e300")),
        *((flag, "a\udcff") for flag in ("--prompt", "--stop")),
    ],
)
def test_what_no_message_can_hold_is_refused_in_one_line(capsys, flag, value):
    flags = ["decode", "--server", "unix:/nowhere", "--prompt", "a", flag, value]
    assert decode_client.main(flags) == 2
    said = capsys.readouterr().err
    assert flag in said
    assert said.count("\n") == 1
    assert "nowhere" not in said


def test_standard_input_that_is_not_utf8_is_refused(capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"a\xff")))
    assert decode_client.main(["decode", "--server", "unix:/nowhere", "--prompt", "-"]) == 2
    assert "--prompt is not UTF-8" in capsys.readouterr().err


def test_the_command_to_try_reaches_the_server_from_its_machine():
    config = serve_config.ServeConfig(
        model="tiny", host="0.0.0.0", token_file="my token", tls_cert="c.pem", tls_key="k"
    )
    said = example(config.address, config.http_address, config)
    assert "gRPC on 0.0.0.0:9000, OpenAI-style HTTP on 0.0.0.0:9001" in said
    assert "--server 127.0.0.1:9000 --token-file 'my token' --tls-ca c.pem --prompt" in said
    config = serve_config.ServeConfig(model="tiny", host="unix:/tmp/s")
    assert "--server unix:/tmp/s --prompt" in example(config.address, None, config)


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("4GB", 4 * 10**9), ("1.5GiB", 3 * 2**29), ("512 mib", 2**29), ("1000", 1000), ("7B", 7)],
)
def test_memory_budgets(text, num_bytes):
    assert serve_config.ServeConfig(model="tiny", memory_budget=text).budget_bytes == num_bytes


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("memory_budget", text) for text in ("", "much", "4 elephants", "-1GB")),
        *(("port", number) for number in (-1, 65536)),
        ("http_port", 70000),
        ("http_port", 9000),
        ("model", ""),
        ("max_concurrent", 0),
        *(("context", number) for number in (0, 1)),
        *(("steps_per_dispatch", number) for number in (0, 65)),
        ("drain_s", -1.0),
        ("drain_s", float("nan")),
        ("tls_cert", "cert.pem"),
    ],
)
def test_wrong_flags_are_named(field, value):
    with pytest.raises(ConfigError, match=f"--{field.replace('_', '-')}"):
        serve_config.ServeConfig(**{"model": "tiny", field: value})


@pytest.mark.parametrize(
    ("mesh", "said"),
    [
        ({"data": 0}, r"--mesh\.data \(0\) must be at least 1"),
        ({"data": 3, "fsdp": 2}, r"--max-concurrent \(64\) must be a multiple of 6: .* --mesh\.data x --mesh\.fsdp"),
    ],
)
def test_wrong_meshes_are_named(mesh, said):
    with pytest.raises(ConfigError, match=said):
        serve_config.ServeConfig(model="tiny", mesh=MeshConfig(**mesh))


def test_no_more_steps_than_tokens_of_the_context():
    with pytest.raises(ConfigError, match=r"--steps-per-dispatch \(9\) must be from 1 to 8"):
        serve_config.ServeConfig(model="tiny", context=8, steps_per_dispatch=9)


def test_addresses():
    config = serve_config.ServeConfig(model="tiny", host="::1")
    assert (config.address, config.http_address) == ("[::1]:9000", "[::1]:9001")
    config = serve_config.ServeConfig(model="tiny", host="unix:/tmp/s")
    assert (config.address, config.http_address) == ("unix:/tmp/s", None)

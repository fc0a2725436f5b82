"""google-jetstream's own client at its server over our engine, a process of its own, and at our servers."""

import dataclasses
import sys

import decode_serving
import grpc
import numpy as np
import pytest
from decode_harness import CONFIG, make_params, near_misses, random_prompts
from jetstream_harness import DecodeRequest, TextContent, TokenContent, make_jetstream
from processes import Processes
from server_harness import wait_until
from serving_run import MAX_TOKENS, ServingRun

from seedx.inference import jetstream_server
from seedx.inference.jetstream_driver import JetStreamDriver
from seedx.inference.jetstream_shims import jetstream_pb2, jetstream_pb2_grpc
from seedx.networks.hf_files import save_hf
from seedx.networks.model_source import open_model
from seedx.threads import Crew

pytestmark = pytest.mark.external

FAST = {
    "XLA_FLAGS": "--xla_force_host_platform_device_count=2 --xla_backend_optimization_level=0 "
    "--xla_llvm_disable_expensive_passes=true"
}


def serve(processes, *flags, command=("-m", "seedx.inference.jetstream_server")):
    """The server's process and a stub of JetStream's own client."""
    small = ("--model", "tiny", "--port", "0", "--max-concurrent", "2", "--context", "64")
    server = processes.start(sys.executable, *command, *small, *flags, env=FAST)
    server.until(lambda: "listening on" in server.out, "its address")
    address = server.out.split("listening on ")[1].split()[0]
    return server, jetstream_pb2_grpc.OrchestratorStub(grpc.insecure_channel(address))


def ask(stub, max_tokens=8, **content):
    replies = stub.Decode(DecodeRequest(max_tokens=max_tokens, **content), timeout=60)
    return [token for reply in replies for token in reply.stream_content.samples[0].token_ids]


@pytest.mark.parametrize("mesh", [(), ("--mesh.tensor", "2")])
def test_jetstreams_client_and_server_give_our_tokens_across_a_swap(tmp_path, mesh):
    models = [open_model("tiny", seed=seed) for seed in (0, 1)]
    prompts = random_prompts(6, 1, 50, seed=9, vocab=256)
    versions = tmp_path / "versions"
    versions.mkdir()
    with Processes(tmp_path) as processes:
        server, stub = serve(processes, "--weights-dir", str(versions), *mesh)
        assert stub.HealthCheck(jetstream_pb2.HealthCheckRequest()).is_live
        for version, model in enumerate(models):
            if version:
                save_hf(tmp_path / "unfinished", model.config, model.params)
                (tmp_path / "unfinished").rename(versions / str(version))
                server.until(lambda: "version 1 is served" in server.out, "the new version")
            for prompt in prompts:
                tokens = np.array(ask(stub, token_content=TokenContent(token_ids=prompt)))
                assert near_misses(model.params, prompt, tokens, model.config) == 0
        for fields, named in (({}, "content"), ({"token_content": TokenContent(token_ids=range(70))}, "prompt has 70")):
            with pytest.raises(grpc.RpcError, match=named) as refused:
                ask(stub, **fields)
            assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        ask(stub, text_content=TextContent(text="still there"))
        server.send(15)
        assert server.wait() == 143
        assert server.err == ""


def test_jetstreams_client_at_our_own_server(tmp_path):
    with decode_serving.Serving(tmp_path) as serving:
        stub = jetstream_pb2_grpc.OrchestratorStub(grpc.insecure_channel(serving.server.address))
        assert stub.HealthCheck(jetstream_pb2.HealthCheckRequest()).is_live
        for prompt in random_prompts(6, 1, 50, seed=10, vocab=256):
            expected = serving.expected(prompt, 8, temperature=0.0)[0]
            tokens = ask(stub, token_content=TokenContent(token_ids=prompt))
            assert tokens == expected.tokens[: len(expected.tokens) - (expected.finish_reason == "stop")].tolist()


def test_jetstreams_client_at_a_run_that_learns(tmp_path):
    prompt, told = tuple(b"tr7="), {}
    with Processes(tmp_path) as processes:
        run = ServingRun(processes)
        with grpc.insecure_channel(run.address) as channel:
            stub = jetstream_pb2_grpc.OrchestratorStub(channel)
            assert stub.HealthCheck(jetstream_pb2.HealthCheckRequest()).is_live
            for updates in (0, 20):
                run.learn(updates)
                run.process.until(lambda updates=updates: run.generate(prompt).versions[0] == updates, "the updates")
                told[updates] = ask(stub, MAX_TOKENS, token_content=TokenContent(token_ids=prompt))
                assert set(run.generate(prompt).versions) == {updates}  # before and after: of that version
        run.process.send(15)
        assert run.process.wait() == 143, run.process.said
    for version, tokens in told.items():
        run.check(version, prompt, tokens)
    assert told[0] != told[20]


def test_versions_that_cannot_be_used_are_told_once_and_left(tmp_path, capfd):
    """A number that tokens cannot carry, another model, a file; the directory may be gone for a while."""
    config, crew, versions = CONFIG, Crew(), tmp_path / "versions"
    engine = make_jetstream()
    driver = JetStreamDriver(crew, [engine])
    versions.mkdir()
    follower = crew.spawn("weights", jetstream_server.follow, versions, "float32", engine.engine, driver, crew)
    told = []

    def tells(text):
        told.append("".join(capfd.readouterr()))
        return text in "".join(told)

    try:
        save_hf(versions / str(2**31), config, make_params(1))
        wait_until(lambda: tells("version 2147483648 is not used: version (2147483648) must be from 0 to 2147483647"))
        deeper = dataclasses.replace(config, num_layers=3)
        save_hf(tmp_path / "deeper", deeper, make_params(1, deeper))
        (tmp_path / "deeper").rename(versions / "9")
        wait_until(lambda: tells("version 9 is not used: these weights are not the model's"))
        (versions / "8").touch()
        wait_until(lambda: tells("version 8 is not used"))
        versions.rename(tmp_path / "away")
        wait_until(lambda: tells("cannot be read, and is tried again"))
        assert engine.params.latest().version == 0
        save_hf(tmp_path / "away" / "3", config, make_params(1))
        (tmp_path / "away").rename(versions)
        wait_until(lambda: tells("version 3 is served"))
        assert engine.params.latest().version == 3
        assert "".join(told).count("2147483648 is not used") == 1
    finally:
        crew.stop.set()
        follower.join(60)
        driver.stop()
    assert crew.failure is None


BROKEN = """
import os, sys
from seedx.inference import jetstream_server
from seedx.inference.jetstream_engine import JetStreamEngine
def broken(*_):
    raise RuntimeError("the device is gone")
JetStreamEngine.warm_up, JetStreamEngine.generate = lambda self: None, broken
code = jetstream_server.main(sys.argv[1:])
sys.stderr.flush()
os._exit(code)
"""


def test_a_server_that_fails_says_why(tmp_path):
    with Processes(tmp_path) as processes:
        server, stub = serve(processes, command=("-c", BROKEN))
        with pytest.raises(grpc.RpcError):
            ask(stub, token_content=TokenContent(token_ids=[5, 6]))
        assert server.wait() == 1
        assert "RuntimeError: the device is gone" in server.err


def test_wrong_flags(capsys):
    assert jetstream_server.main(["--model", "no-such"]) == 2
    assert "no-such" in capsys.readouterr().err
    for flags, said in (
        (("--port", "70000"), "--port (70000)"),
        (("--samples-per-slot", "0"), "--samples-per-slot (0)"),
        (("--max-concurrent", "0"), "--max-concurrent (0)"),
        (("--max-concurrent", "8", "--samples-per-slot", "3"), "--max-concurrent (8) must be a multiple of 3"),
        (("--memory-budget", "much"), "--memory-budget ('much')"),
        (("--temperature", "nan"), "--temperature (nan)"),
        (("--temperature", "-1"), "--temperature (-1.0)"),
        (("--seed", "-5"), "--seed (-5)"),
        (("--drain-s", "nan"), "--drain-s (nan)"),
        (("--drain-s", "-1"), "--drain-s (-1.0)"),
        (("--weights-dir", "no-such"), "--weights-dir (no-such) is no directory"),
    ):
        with pytest.raises(SystemExit, match="2"):
            jetstream_server.main(["--model", "tiny", *flags])
        assert said in capsys.readouterr().err

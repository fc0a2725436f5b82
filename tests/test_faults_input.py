"""Bad input to the command line and the sockets of real processes."""

import signal
import socket

import grpc
import pytest
from processes import Processes, free_port, is_served, make_run

from seedx.checks import ConfigError
from seedx.config import Config, InferenceConfig, LearnerConfig, TableConfig
from seedx.inference import policy_pb2 as pb
from seedx.inference import wire


@pytest.fixture
def processes(tmp_path):
    with Processes(tmp_path) as processes:
        yield processes


@pytest.mark.parametrize(
    ("env", "messages"),
    [
        ("CartPol-v1", ("'CartPol-v1' is unknown", "'CartPole-v1'")),
        ("gym:CartPol-v1", ("unknown to Gymnasium", "`CartPole`")),
        ("faulty_envs:make_countin", ("'faulty_envs:make_counting'",)),
        ("nowhere:make", ("no module 'nowhere'",)),
    ],
)
def test_an_unknown_environment(tmp_path, processes, env, messages):
    make_run(tmp_path / "run", "--env", env)
    actor = processes.role("actor", tmp_path / "run", f"unix:{tmp_path}/socket", "--actor-id", "0")
    assert actor.wait() == 2, actor.said
    for message in messages:
        assert message in actor.err
    assert "Traceback" not in actor.err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--env", "CartPol-v1"), "'CartPole-v1'"),
        pytest.param(("--agent", "impla"), "agent ('impla') must be 'impala', 'r2d2'", marks=pytest.mark.slow),
        pytest.param(("--agent", "faulty_agents:no"), "agent 'faulty_agents:no' is unknown", marks=pytest.mark.slow),
    ],
)
def test_an_unknown_name_ends_the_run(tmp_path, processes, flags, message):
    run = processes.local(tmp_path / "run", *flags)
    assert run.wait() == 2, run.said
    assert message in run.err
    assert "a restart cannot help" in run.err
    assert "Traceback" not in run.err
    assert not processes.alive()


def test_an_address_is_not_taken_from_who_holds_it(tmp_path, processes):
    for run in ("first", "second"):
        make_run(tmp_path / run)
    for address in (f"unix:{tmp_path}/socket", f"127.0.0.1:{free_port()}"):
        holder = processes.role("learner", tmp_path / "first", address)
        holder.until(lambda address=address: is_served(address), "a server")
        late = processes.role("learner", tmp_path / "second", address)
        assert late.wait() == 2
        assert f"cannot listen on {address}" in late.err
        assert "Traceback" not in late.err
        assert is_served(address)
        holder.send(signal.SIGTERM)
        assert holder.wait() == 143


def test_a_run_directory_is_not_shared(tmp_path, processes):
    make_run(tmp_path / "run")
    addresses = [f"unix:{tmp_path}/{name}" for name in ("first", "second")]
    first = processes.role("learner", tmp_path / "run", addresses[0])
    first.until(lambda: is_served(addresses[0]), "a server")
    second = processes.role("learner", tmp_path / "run", addresses[1])
    assert second.wait() == 2
    assert f"another learner is at work in {tmp_path / 'run'}" in second.err
    assert is_served(addresses[0])
    first.popen.kill()
    first.wait()
    third = processes.role("learner", tmp_path / "run", addresses[1])
    third.until(lambda: is_served(addresses[1]), "a server")


def test_the_socket_of_a_killed_learner_is_taken_over(tmp_path, processes):
    make_run(tmp_path / "run")
    address = f"unix:{tmp_path}/socket"
    for _ in range(2):
        learner = processes.role("learner", tmp_path / "run", address)
        learner.until(lambda: is_served(address), "a server")
        learner.popen.kill()
        learner.wait()
        assert (tmp_path / "socket").exists()


@pytest.mark.parametrize("address", ["127.9.9.9.9:1", "unix:/nowhere/socket", "unix:" + "x" * 200, "127.0.0.1", "x"])
def test_an_address_that_cannot_be_listened_on(tmp_path, processes, address):
    make_run(tmp_path / "run")
    learner = processes.role("learner", tmp_path / "run", address)
    assert learner.wait() == 2, learner.said
    assert address in learner.err
    assert "Traceback" not in learner.err


@pytest.mark.parametrize("address", ["127.0.0.1", "localhost", "unix-abstract:x"])
def test_a_server_that_is_no_address(tmp_path, processes, address):
    make_run(tmp_path / "run")
    actor = processes.role("actor", tmp_path / "run", address, "--actor-id", "0")
    assert actor.wait() == 2, actor.said
    assert f"address {address!r} is neither unix:/path nor host:port" in actor.err


def test_other_machines_are_kept_out_unless_there_are_credentials(tmp_path, processes):
    make_run(tmp_path / "run")
    learner = processes.role("learner", tmp_path / "run", f"0.0.0.0:{free_port()}")
    assert learner.wait() == 2
    for remedy in ("refusing to listen on 0.0.0.0", "--inference.tls-cert", "--inference.token-file", "127.0.0.1"):
        assert remedy in learner.err


def test_garbage_does_not_disturb_a_server(tmp_path, processes):
    make_run(tmp_path / "run")
    address = f"127.0.0.1:{free_port()}"
    learner = processes.role("learner", tmp_path / "run", address)
    learner.until(lambda: is_served(address), "a server")
    host, _, port = address.rpartition(":")
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    for garbage in (b"", b"\0" * 1000, b"GET / HTTP/1.1\r\n\r\n", preface + b"\xff" * 5000, preface + b"\0\0\x04\x04"):
        with socket.create_connection((host, int(port)), timeout=60) as connection:
            connection.sendall(garbage)
    with grpc.insecure_channel(address) as channel:
        hello = channel.unary_unary(wire.HELLO)
        spec = pb.HelloRequest(protocol=wire.PROTOCOL, groups=1, envs_per_group=1, spec_json="{")
        for message, code, words in (
            (b"\xff\xff\xff", grpc.StatusCode.INVALID_ARGUMENT, "no HelloRequest"),
            (spec.SerializeToString()[:-1], grpc.StatusCode.INVALID_ARGUMENT, "no HelloRequest"),
            (pb.HelloRequest(protocol=99).SerializeToString(), grpc.StatusCode.FAILED_PRECONDITION, "protocol is 99"),
            (pb.HelloRequest(protocol=1).SerializeToString(), grpc.StatusCode.INVALID_ARGUMENT, "groups (0)"),
            (spec.SerializeToString(), grpc.StatusCode.INVALID_ARGUMENT, "spec_json"),
        ):
            with pytest.raises(grpc.RpcError) as refusal:
                hello(message, timeout=60)
            assert refusal.value.code() is code
            assert words in refusal.value.details()
        with pytest.raises(grpc.RpcError) as refusal:
            list(channel.stream_stream(wire.ACT)(iter([b"\xff\xff"]), timeout=60))
        assert refusal.value.code() in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION)
    assert is_served(address)
    assert "Traceback" not in learner.err


def test_a_learner_that_nobody_calls_and_an_actor_that_nobody_answers_give_up(tmp_path, processes):
    make_run(tmp_path / "run", "--inference.hello-timeout-s", "0.5", "--actor.give-up-s", "0.5")
    learner = processes.role("learner", tmp_path / "run", f"unix:{tmp_path}/socket")
    actor = processes.role("actor", tmp_path / "run", f"unix:{tmp_path}/nobody", "--actor-id", "0")
    assert learner.wait() == 2, learner.said
    assert "no actor said hello within 0" in learner.err
    assert actor.wait() == 1, actor.said
    assert "gave up after 0.5 s" in actor.err
    assert "Traceback" not in learner.err + actor.err


def test_an_actor_waits_for_a_learner_of_another_service_no_longer_than_needed(tmp_path, processes):
    """A gRPC server that is no policy server."""
    from concurrent.futures import ThreadPoolExecutor

    make_run(tmp_path / "run")
    server = grpc.server(ThreadPoolExecutor(1))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        actor = processes.role("actor", tmp_path / "run", f"127.0.0.1:{port}", "--actor-id", "0")
        assert actor.wait() == 2, actor.said
        assert f"127.0.0.1:{port}" in actor.err
        assert "Traceback" not in actor.err
    finally:
        server.stop(None)


def test_a_run_directory_that_is_no_directory(tmp_path, processes):
    (tmp_path / "file").write_text("")
    for run_dir in (tmp_path / "file", tmp_path / "file" / "below"):
        run = processes.local(run_dir)
        assert run.wait() == 2, run.said
        assert "cannot be used" in run.err
    for run_dir in (tmp_path / "file", tmp_path / "nowhere"):
        learner = processes.role("learner", run_dir, f"unix:{tmp_path}/socket")
        assert learner.wait() == 2, learner.said
        assert "config.json cannot be read" in learner.err


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Config(seed=-1), r"seed \(-1\)"),
        (lambda: Config(inference=InferenceConfig(max_batch_size=1)), r"max_batch_size \(1\) must hold a group of 16"),
        (
            lambda: Config(
                table=TableConfig("uniform", max_size=15, max_times_sampled=0), learner=LearnerConfig(batch_size=8)
            ),
            r"table.max_size \(15\) must be at least 16",
        ),
        (lambda: TableConfig(max_size=-1), r"max_size \(-1\)"),
        (lambda: LearnerConfig(learning_rate=float("nan")), r"learning_rate \(nan\)"),
        (lambda: LearnerConfig(devices=-1), r"devices \(-1\)"),
        (lambda: LearnerConfig(max_grad_norm=-1.0), r"max_grad_norm \(-1"),
        (lambda: LearnerConfig(rmsprop_decay=2.0), r"rmsprop_decay \(2"),
    ],
)
def test_values_that_would_hang_or_fail_later(make, message):
    with pytest.raises(ConfigError, match=message):
        make()

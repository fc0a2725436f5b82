"""Faults of actors, and of environments, against a real learner."""

import dataclasses
import datetime
import ipaddress
import secrets
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from processes import Processes, Started, free_port, last, make_run, until

from seedx import security, specs
from seedx.checkpoint import load_params
from seedx.config import InferenceConfig
from seedx.inference import policy_pb2 as pb
from seedx.inference import wire
from seedx.runlog import read_rows
from seedx.supervisor import REPLACED

COUNTING = ("--env", "faulty_envs:make_counting", "--agent", "faulty_agents:checking")


@pytest.fixture
def processes(tmp_path):
    with Processes(tmp_path) as processes:
        yield processes


def broken(run_dir: Path) -> set[float]:
    """How many rows of the unrolls that were trained on did not follow from the row before."""
    return {row["learner/broken"] for row in read_rows(run_dir / "metrics.jsonl") if "learner/broken" in row}


def self_signed(directory: Path) -> tuple[Path, Path]:
    """A certificate for 127.0.0.1 and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "seedx")])
    today = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(today - datetime.timedelta(days=1))
        .not_valid_after(today + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    (directory / "cert.pem").write_bytes(certificate.public_bytes(pem))
    private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    (directory / "key.pem").write_bytes(private)
    return directory / "cert.pem", directory / "key.pem"


@dataclass
class Server:
    """A learner that listens to all machines, with TLS and a token, and one good actor."""

    directory: Path
    run_dir: Path
    address: str
    flags: tuple[str, ...]
    learner: Started
    processes: Processes

    def actor(self, actor_id: int, *flags: str, env: dict[str, str] | None = None) -> Started:
        """A further actor; `flags` change its configuration."""
        run_dir = self.directory / f"actor-{secrets.token_hex(4)}"
        make_run(run_dir, *self.flags, *flags)
        return self.processes.role("actor", run_dir, self.address, "--actor-id", str(actor_id), env=env)

    def assert_going_on(self) -> None:
        updates = last(self.run_dir, "updates")
        self.learner.until(lambda: last(self.run_dir, "updates") > updates + 5, "further updates")
        assert broken(self.run_dir) == {0.0}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    directory = tmp_path_factory.mktemp("server")
    cert, key = self_signed(directory)
    (directory / "token").write_text("s3cret\n")
    flags = (
        *(*COUNTING, "--num-actors", "3"),
        *("--inference.tls-cert", str(cert), "--inference.tls-key", str(key)),
        *("--inference.token-file", str(directory / "token")),
    )
    make_run(directory / "run", *flags)
    port = free_port()
    with Processes(directory) as processes:
        learner = processes.role("learner", directory / "run", f"0.0.0.0:{port}")
        server = Server(directory, directory / "run", f"127.0.0.1:{port}", flags, learner, processes)
        server.actor(0)
        learner.until(lambda: last(server.run_dir, "updates"), "an update")
        yield server


def test_without_the_token_or_with_a_wrong_one_an_actor_is_refused(server, tmp_path):
    (tmp_path / "token").write_text("s3cre\n")
    wrong = server.actor(1, "--inference.token-file", str(tmp_path / "token"))
    missing = server.actor(2, "--inference.token-file", "None")
    for actor in (wrong, missing):
        assert actor.wait() == 2, actor.said
        assert "UNAUTHENTICATED" in actor.err
        assert "--inference.token-file" in actor.err
    server.assert_going_on()


def test_without_tls_or_with_another_certificate_no_actor_gets_through(server, tmp_path):
    cert, _ = self_signed(tmp_path)
    hasty = ("--actor.give-up-s", "2")
    other = server.actor(1, *hasty, "--inference.tls-ca", str(cert))
    plain = server.actor(2, *hasty, "--inference.tls-cert", "None", "--inference.tls-key", "None")
    for actor in (other, plain):
        assert actor.wait() == 1, actor.said
        assert "gave up after 2 s" in actor.err
        assert "Traceback" not in actor.err
    server.assert_going_on()


def test_an_actor_with_another_environment_is_refused_with_the_leaf_named(server):
    actor = server.actor(1, "--env", "faulty_envs:make_other")
    assert actor.wait() == 2, actor.said
    assert "observation is float32[5], the server expects float32[3]" in actor.err
    server.assert_going_on()


@pytest.mark.parametrize(
    ("fault", "code", "message"),
    [
        ("shape@9", 2, "observation is float32[2, 2]; the spec says float32[2, 3]"),
        pytest.param(
            *("dtype@9", 2, "observation is float64[2, 3]; the spec says float32[2, 3]"), marks=pytest.mark.slow
        ),
        ("nan-reward@9", 1, "reward of environment 1 is nan; it must be finite"),
        ("raise@9", 1, "RuntimeError: the simulator exploded"),
    ],
)
def test_a_faulty_environment_ends_its_actor_alone(server, fault, code, message):
    actor = server.actor(1, env={"FAULT": fault})
    assert actor.wait() == code, actor.said
    assert message in actor.err
    server.assert_going_on()


def test_of_two_actors_with_one_id_the_newer_wins(server):
    older = server.actor(1)
    until(lambda: last(server.run_dir, "server/streams") == 4, "the older actor's streams")
    newer = server.actor(1)
    assert older.wait() == REPLACED, older.said
    assert "actor 1 ends: replaced by a newer run of actor 1" in older.err
    rows = len(read_rows(server.run_dir / "metrics.jsonl"))  # those of before count the older one's streams
    newer.until(
        lambda: 4 in [row.get("server/streams") for row in read_rows(server.run_dir / "metrics.jsonl")[rows + 1 :]],
        "the newer actor's streams",
    )

    config = InferenceConfig(
        tls_cert=str(server.directory / "cert.pem"), tls_key="", token_file=str(server.directory / "token")
    )
    with security.open_channel(server.address, config, []) as channel:
        hello = channel.unary_unary(wire.HELLO, pb.HelloRequest.SerializeToString, pb.HelloReply.FromString)
        run_id = pb.RunId(start_time_ns=1)
        spec_json = specs.to_json(spec_of_counting())
        message = pb.HelloRequest(
            protocol=wire.PROTOCOL, actor_id=1, run_id=run_id, groups=2, envs_per_group=2, spec_json=spec_json
        )
        with pytest.raises(grpc.RpcError) as refusal:
            hello(message, metadata=security.call_metadata(config), timeout=60)
    assert refusal.value.code() is grpc.StatusCode.ALREADY_EXISTS
    assert "actor 1 is connected already" in refusal.value.details()
    server.assert_going_on()
    newer.send(signal.SIGTERM)
    assert newer.wait() == 143


@pytest.mark.slow
def test_a_way_out_that_waits_for_ever_is_cut_short(server):
    until(lambda: last(server.run_dir, "server/streams") == 2, "the end of other actors")
    actor = server.actor(1, env={"FAULT": "locked-close"})
    until(lambda: last(server.run_dir, "server/streams") == 4, "the actor's streams")
    actor.send(signal.SIGTERM)
    assert actor.wait() == 143, actor.said
    server.assert_going_on()


def spec_of_counting():
    from faulty_envs import make_counting

    return dataclasses.replace(make_counting(1, [0]).spec, env="faulty_envs:make_counting")


def test_actors_that_hang_are_not_waited_for(server):
    hanging = server.actor(1)
    until(lambda: last(server.run_dir, "server/streams") == 4, "the second actor's streams")
    hanging.send(signal.SIGSTOP)
    try:
        until(lambda: last(server.run_dir, "batcher/live_slots") <= 4, "the end of waiting")
        timeouts, ready = last(server.run_dir, "batcher/timeout"), last(server.run_dir, "batcher/ready")
        until(lambda: last(server.run_dir, "batcher/ready") > ready + 500, "batches")
        # Not one batch in twenty waits for its deadline; before, every one did.
        assert last(server.run_dir, "batcher/timeout") - timeouts < 25
        server.assert_going_on()
    finally:
        hanging.send(signal.SIGCONT)
    until(lambda: last(server.run_dir, "batcher/live_slots") == 8, "the actor's return")
    server.assert_going_on()
    hanging.send(signal.SIGTERM)
    assert hanging.wait() == 143


def messages_per_s(run_dir: Path, start: float, stop: float) -> float:
    """Rate of messages between two times on the learner's clock, `seconds` in metrics.jsonl."""
    rows = [row for row in read_rows(run_dir / "metrics.jsonl") if start <= row["seconds"] <= stop]
    first, last = rows[0], rows[-1]
    return (last["server/messages"] - first["server/messages"]) / (last["seconds"] - first["seconds"])


@pytest.mark.slow
def test_when_half_of_the_actors_hang_the_others_keep_their_rate(tmp_path, processes):
    """The two seconds after they hang, in which the server has to notice. A step takes 5 ms but no CPU, so CPUs are not
    the limit. With one group an actor does nothing while it waits: it feels every wait.
    """
    run_dir = tmp_path / "run"
    flags = ("--num-actors", "4", "--actor.groups", "1", "--learner.batch-size", "16", "--learner.unroll-length", "20")
    run = processes.local(run_dir, *flags, "--env", "faulty_envs:make_slow", "--metrics.interval-s", "0.05")
    run.until(lambda: last(run_dir, "batcher/live_slots") == 16 and last(run_dir, "updates") > 5, "all actors")
    kept = []
    while not kept or max(kept) < 0.9:  # other work on this machine may slow one try down
        assert len(kept) < 5, f"of their rate they kept {kept}; 0.5 if each step waited for those that hang"
        time.sleep(1.0)
        begin = last(run_dir, "seconds")
        time.sleep(4.0)
        hang = last(run_dir, "seconds")
        for actor in processes.alive("actor")[:2]:
            actor.suspend()
        run.until(lambda hang=hang: last(run_dir, "seconds") > hang + 2.2, "two seconds")
        kept.append(messages_per_s(run_dir, hang, hang + 2.0) / (messages_per_s(run_dir, begin, hang) / 2))
        run.until(lambda: last(run_dir, "batcher/live_slots") == 8, "the end of waiting")
        for actor in processes.alive("actor"):
            actor.resume()
        run.until(lambda: last(run_dir, "batcher/live_slots") == 16, "all actors")


@pytest.mark.slow
def test_a_learner_without_any_actor_ends_with_a_checkpoint(tmp_path, processes):
    """A duplicate that somebody started took the place of the only actor, and then died."""
    run_dir = tmp_path / "run"
    run = processes.local(run_dir, *COUNTING, "--inference.hello-timeout-s", "20")
    run.until(lambda: last(run_dir, "updates"), "an update")
    [actor] = processes.alive("actor")
    command = actor.cmdline()
    duplicate = processes.start(*command)
    run.until(lambda: "actor-0 was replaced by another actor" in run.err, "the actor's end")
    updates = last(run_dir, "updates")
    run.until(lambda: last(run_dir, "updates") > updates + 5, "further updates")
    duplicate.popen.kill()
    assert run.wait() == 2, run.said
    assert "no training actor has asked for an action for 20 s: all are gone or hang" in run.err
    assert f"--resume --run-dir {run_dir}" in run.err
    assert "Traceback" not in run.err
    assert load_params(run_dir).update >= updates
    assert not processes.alive()


@pytest.mark.slow
def test_a_run_whose_only_environment_hangs_ends_with_a_checkpoint(tmp_path, processes):
    run_dir = tmp_path / "run"
    run = processes.local(run_dir, *COUNTING, "--inference.hello-timeout-s", "20", env={"FAULT": "hang@200"})
    assert run.wait() == 2, run.said
    assert "no training actor has asked for an action for 20 s" in run.err
    assert load_params(run_dir).update > 0
    assert not processes.alive()


@pytest.mark.slow
def test_actors_that_come_back_in_time_are_waited_for(tmp_path, processes):
    run_dir, address = tmp_path / "run", f"unix:{tmp_path}/socket"
    make_run(run_dir, *COUNTING, "--inference.hello-timeout-s", "25")
    learner = processes.role("learner", run_dir, address)
    for i in range(2):  # Away for longer than the timeout in all, never at once.
        actor = processes.role("actor", run_dir, address, "--actor-id", "0", "--restart", str(i))
        updates = last(run_dir, "updates")
        learner.until(lambda updates=updates: last(run_dir, "updates") > updates + 5, "updates")
        actor.popen.kill()
        time.sleep(13.0)
    assert learner.popen.poll() is None, learner.said


def test_a_run_outlives_an_actor_that_is_killed_and_an_environment_that_raises_now_and_then(tmp_path, processes):
    run_dir = tmp_path / "run"
    run = processes.local(run_dir, *COUNTING, env={"FAULT": "once-raise@50"})

    def train(after):
        steps = last(run_dir, "env_steps")
        run.until(lambda: last(run_dir, "env_steps") > steps + 500, f"training after {after}")

    run.until(lambda: "restart 1 of 5" in run.err, "the environment's fault")
    train("the environment's fault")
    [actor] = processes.alive("actor")
    actor.kill()
    run.until(lambda: "actor-0 died with signal 9 (SIGKILL); restart 2 of 5" in run.err, "the actor's death")
    train("the actor's death")
    run.send(signal.SIGTERM)
    assert run.wait() == 143, run.said
    assert "RuntimeError: the simulator exploded" in (run_dir / "logs/actor-0.log").read_text()
    assert broken(run_dir) == {0.0}
    assert not processes.alive()


@pytest.mark.slow
def test_an_environment_that_always_raises_ends_the_run_with_its_traceback(tmp_path, processes):
    run = processes.local(tmp_path / "run", *COUNTING, env={"FAULT": "raise@9"})
    run.until(lambda: "restart 1 of 5 in 0.1 s" in run.err, "the first restart")
    assert run.wait() == 1, run.said  # 3.1 s of pauses and five starts
    assert "RuntimeError: the simulator exploded" in run.err
    assert "actor-0 ended with code 1, after 5 restarts; the run stops" in run.err
    assert not processes.alive()

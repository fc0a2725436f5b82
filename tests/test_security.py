"""Who may listen where: loopback by default, TLS or a token for anything else."""

import contextlib
import socket
from http.client import HTTPConnection

import grpc
import numpy as np
import pytest
from certificates import write_certificate
from fakes import VECTOR
from grpc_health.v1 import health_pb2, health_pb2_grpc
from hypothesis import given
from hypothesis import strategies as st
from server_harness import EchoPolicy, wait_until
from spec_strategies import timestep

from seedx import security, specs
from seedx.checks import ConfigError
from seedx.config import InferenceConfig
from seedx.inference import policy_pb2 as pb
from seedx.inference import wire
from seedx.inference.client import Connection, RejectedError, ServerLostError
from seedx.inference.decode_metrics import DecodeMetrics
from seedx.inference.decode_server import DecodeServer
from seedx.inference.decode_service import DecodeService
from seedx.inference.frontend import FrontEnd
from seedx.inference.streams import Refused, Status, Streams

OPEN = InferenceConfig()
TLS = InferenceConfig(tls_cert="cert.pem", tls_key="key.pem")
TOKEN = InferenceConfig(token_file="token")
REMOTE = [
    "0.0.0.0:80",
    "[::]:80",
    ":::80",
    "10.0.0.1:8080",
    "[::ffff:10.0.0.1]:80",
    "[::ffff:0.0.0.0]:80",
    "example.org:443",
    "localhost.example.org:80",
    "127.0.0.1.example.org:80",
    "127.0.0.1@example.org:80",
    "0:80",
    "2130706433:80",
    "dns:///0.0.0.0:80",
    "ipv4:0.0.0.0:80",
    "ipv6:[::]:80",
]
LOCAL = ["127.0.0.1:0", "127.3.2.1:65535", "localhost:80", "[::1]:80", "unix:/tmp/socket", "unix:relative"]


@pytest.mark.parametrize("address", REMOTE)
def test_others_are_refused_without_credentials(address):
    with pytest.raises(ConfigError, match="refusing to listen") as refusal:
        security.check_listen_address(address, OPEN)
    for remedy in (address, "tls-cert", "token-file", "127.0.0.1"):
        assert remedy in str(refusal.value)
    security.check_listen_address(address, TLS)
    security.check_listen_address(address, TOKEN)


@pytest.mark.parametrize("address", LOCAL)
def test_this_machine_needs_none(address):
    security.check_listen_address(address, OPEN)  # raises where it is refused
    assert security.is_local(address)


@pytest.mark.parametrize(
    "address", ["", "127.0.0.1", ":80", "127.0.0.1:", "127.0.0.1:x", "127.0.0.1:65536", "unix-abstract:x", "h:\u00b2"]
)
@pytest.mark.parametrize("config", [OPEN, TLS, TOKEN])
def test_no_address(address, config):
    with pytest.raises(ConfigError, match="neither unix:/path nor host:port"):
        security.check_listen_address(address, config)


def test_an_address_is_no_url():
    with pytest.raises(ConfigError, match=r"leave http:// out"):
        security.check_address("http://127.0.0.1:9000")


@given(st.text(max_size=20) | st.from_regex(r"[\[\]:.0-9a-f]{0,12}:[0-9]{1,6}", fullmatch=True))
def test_any_text_is_accepted_or_refused(address):
    try:
        security.check_listen_address(address, OPEN)
    except ConfigError:
        return
    host = address.rpartition(":")[0].strip("[]")
    if not address.startswith("unix:") and host != "localhost":
        # What the system makes of it.
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
        assert all(ip[0].startswith("127.") or ip[0] == "::1" for *_, ip in found)


def test_tokens(tmp_path):
    path = tmp_path / "token"
    path.write_text("s3cret\n")
    config = InferenceConfig(token_file=str(path))
    token = security.read_token(config)
    assert token == "s3cret"
    assert security.authorized(tuple(security.call_metadata(config)), token)
    for wrong in ("", "s3cret", "Bearer ", "Bearer s3cre", "Bearer s3crett", "bearer s3cret", "Bearer s\u00e9cret"):
        assert not security.authorized((("authorization", wrong),), token)
    assert not security.authorized((), token)
    assert not security.authorized((("authorization", b"Bearer s3cret"),), token)
    assert security.authorized((), None)
    assert not security.call_metadata(OPEN)


@pytest.mark.parametrize("content", [b"", b"\n", b" \n\t", "\u00e9".encode(), b"\xff", b"a\nb\n"])
def test_a_token_file_without_a_token(tmp_path, content):
    path = tmp_path / "token"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"token-file.*ASCII"):
        security.read_token(InferenceConfig(token_file=str(path)))


def test_files_that_cannot_be_read_are_named(tmp_path):
    missing = str(tmp_path / "missing")
    with pytest.raises(ConfigError, match=r"--inference\.token-file .*missing.* cannot be read"):
        security.read_token(InferenceConfig(token_file=missing))
    with pytest.raises(ConfigError, match=r"--inference\.tls-key .*missing.* cannot be read"):
        security.server_credentials(InferenceConfig(tls_cert=missing, tls_key=missing))
    with pytest.raises(ConfigError, match=r"--inference\.tls-ca .*missing.* cannot be read"):
        security.open_channel("localhost:1", InferenceConfig(tls_ca=missing), [])


# ---- over real sockets


@contextlib.contextmanager
def serving(address, config):
    failures = []
    front_end = FrontEnd(address, config, Streams(8, 100), failures.append)
    front_end.start()
    front_end.serve(EchoPolicy(front_end))
    try:
        yield front_end
    finally:
        front_end.stop(finished=True)
        assert failures == []


def exchange(address, config):
    """One exchange of a group of 2; the version in the reply."""
    connection = Connection(
        address, config, actor_id=0, spec=VECTOR, groups=1, envs_per_group=2, evaluation=False, timeout_s=60.0
    )
    with contextlib.closing(connection):
        stream = connection.open_stream(0)
        stream.send(timestep(VECTOR, 2, np.random.default_rng(0)))
        stream.receive()
        return stream.version


def token_file(path, token):
    path.write_text(token)
    return InferenceConfig(token_file=str(path))


@pytest.mark.parametrize("listen", ["127.0.0.1:0", "unix"])
def test_a_token_is_asked_of_every_call(tmp_path, listen):
    right = token_file(tmp_path / "right", "open sesame")
    address = f"unix:{tmp_path}/s" if listen == "unix" else listen
    with serving(address, right) as front_end:
        if listen != "unix":
            address = f"127.0.0.1:{front_end.port}"
        for wrong in (OPEN, token_file(tmp_path / "wrong", "open sesam")):
            with pytest.raises(ConfigError, match=r"UNAUTHENTICATED.*token-file"):
                exchange(address, wrong)
        with grpc.insecure_channel(address) as channel:  # nor does a stream open without it
            replies = channel.stream_stream(wire.ACT)(iter([b""]), timeout=60)
            with pytest.raises(grpc.RpcError) as refusal:
                next(replies)
            assert refusal.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert exchange(address, right) == 3


def certificate(directory, name):
    cert, key = write_certificate(directory, name)
    return InferenceConfig(tls_cert=cert, tls_key=key)


def test_tls_from_end_to_end(tmp_path):
    config, stranger = certificate(tmp_path, "seedx"), certificate(tmp_path, "stranger")
    with serving("0.0.0.0:0", config) as front_end:
        address = f"127.0.0.1:{front_end.port}"
        assert exchange(address, config) == 3
        assert exchange(address, InferenceConfig(tls_ca=config.tls_cert)) == 3
        for other in (OPEN, stranger):  # no TLS; a certificate that the client does not trust
            with pytest.raises(ServerLostError):
                exchange(address, other)
        assert exchange(address, config) == 3


def test_a_unix_socket_needs_no_tls(tmp_path):
    with serving(f"unix:{tmp_path}/s", certificate(tmp_path, "seedx")):
        assert exchange(f"unix:{tmp_path}/s", certificate(tmp_path, "another")) == 3


def test_a_key_that_is_none_is_refused_at_the_start(tmp_path):
    (tmp_path / "x.pem").write_text("nonsense")
    config = InferenceConfig(tls_cert=str(tmp_path / "x.pem"), tls_key=str(tmp_path / "x.pem"))
    with pytest.raises(ConfigError):
        FrontEnd("127.0.0.1:0", config, Streams(8, 100), lambda error: None).start()


def test_the_health_service_answers(tmp_path):
    address = f"unix:{tmp_path}/s"
    front_end = FrontEnd(address, OPEN, Streams(8, 100), lambda error: None)
    front_end.start()
    with grpc.insecure_channel(address) as channel:
        check = health_pb2_grpc.HealthStub(channel).Check
        assert check(health_pb2.HealthCheckRequest(), timeout=60).status == health_pb2.HealthCheckResponse.NOT_SERVING
        front_end.serve(EchoPolicy(front_end))
        assert check(health_pb2.HealthCheckRequest(), timeout=60).status == health_pb2.HealthCheckResponse.SERVING
    front_end.stop(finished=True)


@pytest.mark.parametrize("kind", ["unix", "tcp"])
def test_an_address_in_use_is_refused(tmp_path, kind):
    with serving(f"unix:{tmp_path}/s" if kind == "unix" else "127.0.0.1:0", OPEN) as front_end:
        address = front_end.address if kind == "unix" else f"127.0.0.1:{front_end.port}"
        with pytest.raises(ConfigError, match=r"cannot listen on .*in use"):
            FrontEnd(address, OPEN, Streams(8, 100), lambda error: None).start()
        assert exchange(address, OPEN) == 3


OFF = [  # what localhost may also be: an address that this machine lacks, and a family that its kernel does not know
    (socket.AF_INET, socket.SOCK_STREAM, 0, "", ("192.0.2.1", 0)),
    (255, socket.SOCK_STREAM, 0, "", ("::1", 0)),
]


@pytest.mark.parametrize("off", OFF)
def test_a_name_needs_only_one_address_that_can_be_bound(tmp_path, monkeypatch, off):
    resolve = socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **options: [off, *resolve(*args, **options)])
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as server:
        address = f"localhost:{server.getsockname()[1]}"
        with pytest.raises(ConfigError, match="cannot listen on localhost"):
            FrontEnd(address, OPEN, Streams(8, 100), lambda error: None).start()
    with serving(address, OPEN) as front_end:
        assert exchange(f"127.0.0.1:{front_end.port}", OPEN) == 3
    failures = []
    server = DecodeServer(DecodeService(DecodeMetrics()), f"unix:{tmp_path}/s", "localhost:0", OPEN, failures.append)
    server.start()
    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    with contextlib.closing(HTTPConnection(server.http_address, timeout=60)) as connection:
        connection.request("GET", "/healthz")
        assert connection.getresponse().status == 503  # no model is loaded
    server.stop(0.0)
    assert failures == []
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [off])
    with pytest.raises(ConfigError, match="cannot be bound"):
        FrontEnd(address, OPEN, Streams(8, 100), lambda error: None).start()


HELLO = {"protocol": wire.PROTOCOL, "groups": 1, "envs_per_group": 2, "spec_json": specs.to_json(VECTOR)}


@pytest.mark.parametrize(
    ("change", "code", "message"),
    [
        ({"protocol": 99}, "FAILED_PRECONDITION", r"protocol is 99, this server speaks 1"),
        ({"groups": 0}, "INVALID_ARGUMENT", r"groups \(0\) must be 1 to 1024"),
        ({"envs_per_group": 2**31}, "INVALID_ARGUMENT", r"envs_per_group \(2147483648\)"),
        ({"envs_per_group": 2**20, "groups": 1024}, "RESOURCE_EXHAUSTED", r"asks for 1073741824 slots; \d of 8"),
        ({"spec_json": "{"}, "INVALID_ARGUMENT", r"spec_json: "),
        ({"spec_json": "[" * 10_000}, "INVALID_ARGUMENT", r"spec_json: "),
        ({"spec_json": HELLO["spec_json"].replace("vector", "\\ud800")}, "FAILED_PRECONDITION", r"env is .*ud800"),
        ({"spec_json": specs.to_json(VECTOR).replace("float32", "float16")}, "FAILED_PRECONDITION", r"float16\[3\]"),
        (None, "INVALID_ARGUMENT", r"3 bytes are no HelloRequest"),
    ],
)
def test_hellos_that_cannot_be_used_are_answered_with_the_reason(tmp_path, change, code, message):
    address = f"unix:{tmp_path}/s"
    with serving(address, OPEN):
        assert exchange(address, OPEN) == 3  # the first one tells the server what its environments are
        with grpc.insecure_channel(address) as channel:
            raw = b"\xff\xff\xff" if change is None else pb.HelloRequest(**{**HELLO, **change}).SerializeToString()
            with pytest.raises(grpc.RpcError, match=message) as refusal:
                channel.unary_unary(wire.HELLO)(raw, timeout=60)
        assert refusal.value.code().name == code
        assert exchange(address, OPEN) == 3


def test_garbage_on_the_socket_does_not_disturb_others(tmp_path):
    address, rng = f"unix:{tmp_path}/s", np.random.default_rng(0)
    http2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    with serving(address, OPEN):
        for prefix in (b"", b"GET / HTTP/1.1\r\n\r\n", http2, http2 + b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"):
            with socket.socket(socket.AF_UNIX) as raw:
                raw.connect(f"{tmp_path}/s")
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    raw.sendall(prefix + rng.bytes(1000))
            assert exchange(address, OPEN) == 3


@pytest.mark.parametrize(
    ("messages", "code", "message"),
    [
        ([b"\xff\xff"], "INVALID_ARGUMENT", "2 bytes is not an ActRequest"),
        ([b""], "INVALID_ARGUMENT", "must be `attach`"),
        ([pb.ActRequest(attach=pb.Attach(actor_id=1)).SerializeToString()], "FAILED_PRECONDITION", "must say Hello"),
        (["attach", "attach"], "INVALID_ARGUMENT", "not a timestep"),
        (["attach", b"\xff\xff"], "INVALID_ARGUMENT", "not an ActRequest"),
        (["attach", pb.ActRequest(timestep=b"abc").SerializeToString()], "INVALID_ARGUMENT", "timestep has 3 bytes"),
        (["attach of group 1"], "INVALID_ARGUMENT", r"attach\.group \(1\) must be one of 0 to 0"),
    ],
)
def test_streams_that_cannot_be_used_end_with_the_reason(tmp_path, messages, code, message):
    address = f"unix:{tmp_path}/s"
    with serving(address, OPEN) as front_end, grpc.insecure_channel(address) as channel:
        channel.unary_unary(wire.HELLO)(pb.HelloRequest(**HELLO).SerializeToString(), timeout=60)
        attach = {f"attach{' of group 1' * g}": pb.ActRequest(attach=pb.Attach(group=g)) for g in (0, 1)}
        raw = [m if isinstance(m, bytes) else attach[m].SerializeToString() for m in messages]
        with pytest.raises(grpc.RpcError, match=message) as refusal:
            next(channel.stream_stream(wire.ACT)(iter(raw), timeout=60))
        assert refusal.value.code().name == code
        wait_until(lambda: front_end._streams.num_streams == 0)


def test_a_stream_that_the_policy_refuses_leaves_nothing_behind(tmp_path):
    class Refuses(EchoPolicy):
        def attach(self, stream):
            raise Refused(Status.INVALID_ARGUMENT, "too large")

    address = f"unix:{tmp_path}/s"
    front_end = FrontEnd(address, OPEN, Streams(2, 100), lambda error: None)
    front_end.start()
    front_end.serve(Refuses(front_end))
    for _ in range(2):  # the slots are free again
        with pytest.raises(RejectedError, match="too large"):
            exchange(address, OPEN)
    assert front_end._streams.num_streams == 0
    front_end.stop(finished=True)

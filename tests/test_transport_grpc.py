"""Weights over gRPC: between real processes, and with everything going wrong that can."""

import socket
import sys
import threading

import grpc
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bits import assert_bit_equal
from certificates import write_certificate
from jax.sharding import NamedSharding, PartitionSpec
from processes import DEADLINE_S, ROOT, Processes, free_port
from weights_process import check_whole, fail, tree_of

from seedx.checks import ConfigError
from seedx.metrics import Metrics
from seedx.security import Access
from seedx.transport import assembly, grpc_sink
from seedx.transport import transport_pb2 as pb
from seedx.transport.errors import CorruptedError, TreeMismatchError, WeightsLostError
from seedx.transport.open import open_publisher, open_reader

OPEN = Access()
LARGE = 2**26  # far more than gRPC holds under way


@pytest.fixture
def address(tmp_path):
    return f"unix:{tmp_path}/weights"


@pytest.fixture
def processes(tmp_path):
    with Processes(tmp_path) as started:
        yield started


def make_publisher(opened, address, access=OPEN, **kwargs):
    opened.append(open_publisher(address, access, fail, **kwargs))
    return opened[-1]


def make_reader(opened, address, access=OPEN, **kwargs):
    opened.append(open_reader(address, access, **kwargs))
    return opened[-1]


def start(processes, command, address, *flags):
    script = str(ROOT / "tests" / "weights_process.py")
    return processes.start(sys.executable, script, command, address, *map(str, flags))


def test_what_is_received_is_what_was_published(opened, address):
    mesh = jax.make_mesh((4, 2), ("a", "b"), devices=jax.devices())
    sharded = jax.device_put(
        np.arange(64, dtype=np.float32).reshape(8, 8), NamedSharding(mesh, PartitionSpec("a", "b"))
    )
    tree = {
        "sharded": sharded,
        "bf16": jnp.arange(10, dtype=jnp.bfloat16),
        "deep": {"int8": np.arange(-3, 3, dtype=np.int8), "empty": np.zeros((0, 2)), "scalar": jnp.float32(-0.0)},
        "transposed": np.arange(6).reshape(2, 3).T,
    }
    publisher, reader = make_publisher(opened, address), make_reader(opened, address)
    publisher.publish(3, tree)
    weights = reader.receive(-1, DEADLINE_S)
    assert weights.version == 3
    assert_bit_equal(weights.params, tree)
    assert reader.receive(3, 0.05) is None


def test_a_reader_may_come_first(opened, address):
    reader, got = make_reader(opened, address), []
    waiting = threading.Thread(target=lambda: got.append(reader.receive(-1, DEADLINE_S)), daemon=True)
    waiting.start()
    make_publisher(opened, address).publish(0, tree_of(0, 100))
    waiting.join(DEADLINE_S)
    assert [weights.version for weights in got] == [0]
    check_whole(got[0], 100)


def test_versions_grow(opened, address):
    publisher = make_publisher(opened, address)
    publisher.publish(3, tree_of(3, 100))
    for version in (3, 2):
        with pytest.raises(ValueError, match=rf"version \({version}\) must be greater than the latest \(3\)"):
            publisher.publish(version, tree_of(version, 100))
    with pytest.raises(ValueError, match="layer is a list"):
        publisher.publish(4, {"layer": []})
    publisher.publish(4, tree_of(4, 100))


def test_deltas_follow_one_another(opened, address):
    metrics = Metrics(), Metrics()
    publisher = make_publisher(opened, address, delta=True, metrics=metrics[0])
    reader = make_reader(opened, address, delta=True, metrics=metrics[1])
    params = np.zeros(100_000, np.float32)
    for version in range(5):
        params = params.copy()
        params[version] = 1 + version
        publisher.publish(version, {"x": params, "same": np.ones(7)})
        weights = reader.receive(version - 1, DEADLINE_S)
        assert_bit_equal(weights.params, {"x": params, "same": np.ones(7)})
    row, received = metrics[0].snapshot(), metrics[1].snapshot()
    assert (row["weights/full_bytes"], row["weights/delta_bytes"]) == (4 * 400_056, 4 * 8)
    assert received["weights/received_bytes"] == 400_056 + 4 * 8
    assert (received["weights/received"], "weights/corrupted" in received) == (5, False)


def test_who_missed_a_version_gets_all_of_the_next(opened, address):
    metrics = Metrics()
    publisher = make_publisher(opened, address, delta=True)
    late = make_reader(opened, address, delta=True, metrics=metrics)
    other = make_reader(opened, address)
    for version in (0, 1, 2):
        publisher.publish(version, tree_of(version, 4000))
        check_whole(other.receive(version - 1, DEADLINE_S), 4000)
        if version != 1:
            check_whole(late.receive(version - 1, DEADLINE_S), 4000)
    row = metrics.snapshot()
    assert row["weights/received_bytes"] == 2 * 4030
    assert "weights/corrupted" not in row


def test_a_delta_to_another_base_is_fetched_in_full(opened, address, monkeypatch):
    """A publisher that takes a reader's version for its own."""
    encoded = grpc_sink._encoded
    monkeypatch.setattr(grpc_sink, "_encoded", lambda version, held: version.delta if held else encoded(version, held))
    metrics = Metrics()
    publisher, reader = make_publisher(opened, address, delta=True), None
    reader = make_reader(opened, address, delta=True, metrics=metrics)
    other = make_reader(opened, address)
    for version in (0, 1, 2):
        publisher.publish(version, tree_of(version, 4000))
        other.receive(version - 1, DEADLINE_S)
        if version == 0:
            reader.receive(-1, DEADLINE_S)
    check_whole(reader.receive(0, DEADLINE_S), 4000)
    assert metrics.snapshot()["weights/corrupted"] == 1


def test_another_publisher_with_the_same_numbers(opened, address):
    first = open_publisher(address, Access(), fail, delta=True)
    reader = make_reader(opened, address, delta=True)
    first.publish(0, tree_of(5, 4000))
    reader.receive(-1, DEADLINE_S)
    first.close()
    second = make_publisher(opened, address, delta=True)
    second.publish(0, tree_of(0, 4000))
    make_reader(opened, address).receive(-1, DEADLINE_S)
    second.publish(1, tree_of(1, 4000))
    weights = reader.receive(0, DEADLINE_S)
    assert weights.version == 1
    check_whole(weights, 4000)


def test_another_process_reads_all_along(opened, address, processes):
    publisher = make_publisher(opened, address, delta=True)
    publisher.publish(0, tree_of(0, 2**20))
    readers = [start(processes, "read", address, "--versions", 200, *flags) for flags in ((), ("--delta",))]
    for reader in readers:
        reader.until(lambda reader=reader: "read 0" in reader.out, "the first version")
    for version in range(1, 201):
        publisher.publish(version, tree_of(version, 2**20))
    for reader in readers:
        assert reader.wait() == 0, reader.said
        assert "read 200" in reader.out


def test_a_reader_killed_during_a_push(opened, address, processes):
    """The learner goes on, and a new reader gets the newest version."""
    metrics = Metrics()
    publisher = make_publisher(opened, address, metrics=metrics)
    publisher.publish(0, tree_of(0, LARGE))
    holding = start(processes, "hold", address)
    holding.until(lambda: "holding" in holding.out, "the first chunk")
    for version in range(1, 6):
        publisher.publish(version, tree_of(version, LARGE))
    reader = make_reader(opened, address)
    check_whole(reader.receive(0, DEADLINE_S), LARGE)  # version 1, made while 0 was sent; there is no room for others
    assert metrics.snapshot()["weights/published"] <= 2
    holding.popen.kill()
    weights = reader.receive(1, DEADLINE_S)
    assert weights.version == 5
    check_whole(weights, LARGE)


def test_a_reader_that_stops_taking_chunks_is_dropped(opened, address, processes, monkeypatch):
    monkeypatch.setattr(grpc_sink, "STALL_S", 0.5)
    metrics = Metrics()
    publisher = make_publisher(opened, address, metrics=metrics)
    publisher.publish(0, tree_of(0, LARGE))
    holding = start(processes, "hold", address)
    holding.until(lambda: "holding" in holding.out, "the first chunk")
    publisher.publish(1, tree_of(1, LARGE))
    reader = make_reader(opened, address)
    reader.receive(0, DEADLINE_S)
    publisher.publish(2, tree_of(2, LARGE))
    assert reader.receive(1, DEADLINE_S).version == 2
    assert metrics.snapshot()["weights/dropped_readers"] == 1
    assert holding.popen.poll() is None


def test_a_publisher_killed_during_a_push(opened, address, processes, monkeypatch):
    """The reader keeps the last whole version, and gets the next one of a publisher that takes over."""
    killed = start(processes, "publish", address, "--versions", 1, "--size", LARGE)
    metrics = Metrics()
    reader = make_reader(opened, address, delta=True, metrics=metrics)
    kept = reader.receive(-1, DEADLINE_S)
    killed.popen.kill()
    killed.wait()
    killed = start(processes, "publish", address, "--versions", 2, "--size", LARGE)
    killed.until(lambda: "published" in killed.out, "the second version")
    feed = assembly.Assembly.feed

    def kill_first(self, chunk):
        killed.popen.kill()
        killed.wait()
        feed(self, chunk)

    monkeypatch.setattr(assembly.Assembly, "feed", kill_first)
    with pytest.raises(WeightsLostError, match=r"the publisher at unix:.* is lost: UNAVAILABLE"):
        reader.receive(1, 1.0)
    assert killed.popen.poll() is not None
    monkeypatch.setattr(assembly.Assembly, "feed", feed)
    check_whole(kept, LARGE)
    start(processes, "publish", address, "--versions", 3, "--size", LARGE)
    weights = reader.receive(1, DEADLINE_S)
    assert weights.version == 3
    check_whole(weights, LARGE)
    check_whole(kept, LARGE)


class Meddler:
    """Hands connections on to an address and changes bytes: the first `times` times that `old` passes, it is `new`."""

    def __init__(self, port, old, new, times):
        self._port, self._old, self._new, self.left = port, old, new, times
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listening.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        while True:
            try:
                near = self._listening.accept()[0]
            except OSError:
                return
            far = socket.create_connection(("127.0.0.1", self._port))
            for source, sink in ((near, far), (far, near)):
                threading.Thread(target=self._copy, args=(source, sink), daemon=True).start()

    def _copy(self, source, sink):
        try:
            while data := source.recv(2**16):
                if self.left and self._old in data:
                    self.left -= 1
                    data = data.replace(self._old, self._new, 1)
                sink.sendall(data)
        except OSError:
            pass
        for end in (source, sink):
            end.close()

    def close(self):
        self._listening.close()


def test_a_changed_byte_is_noticed_and_fetched_again(opened):
    port = free_port()
    tree = {"a": np.zeros(1000), "marked": np.frombuffer(b"0123456789abcdef" * 4, np.uint8)}
    make_publisher(opened, f"127.0.0.1:{port}").publish(0, tree)
    meddler, metrics = Meddler(port, b"0123456789abcdef", b"0123456789abcdeg", times=1), Metrics()
    opened.append(meddler)
    weights = make_reader(opened, meddler.address, metrics=metrics).receive(-1, DEADLINE_S)
    assert_bit_equal(weights.params, tree)
    assert (meddler.left, metrics.snapshot()["weights/corrupted"]) == (0, 1)
    meddler.left = 10**9
    with pytest.raises(CorruptedError, match="tensor marked of version 0 has checksum"):
        make_reader(opened, meddler.address).receive(-1, 0.3)


def test_a_reader_with_another_tree(opened, address):
    make_publisher(opened, address).publish(0, tree_of(0, 4000))
    expected = tree_of(0, 4000) | {"head": np.zeros((3, 6), jnp.bfloat16)}
    reader = make_reader(opened, address, expected=expected)
    with pytest.raises(TreeMismatchError, match=r"head is bfloat16\[3, 5\], not bfloat16\[3, 6\]"):
        reader.receive(-1, DEADLINE_S)


def test_tokens(opened, address, tmp_path):
    for name, token in (("right", "secret"), ("wrong", "guess")):
        (tmp_path / name).write_text(token)
    right, wrong = (Access(token_file=str(tmp_path / name)) for name in ("right", "wrong"))
    make_publisher(opened, address, right).publish(0, tree_of(0, 100))
    check_whole(make_reader(opened, address, right).receive(-1, DEADLINE_S), 100)
    for access in (wrong, Access()):
        with pytest.raises(ConfigError, match=r"refuses this reader \(UNAUTHENTICATED\): missing or wrong token"):
            make_reader(opened, address, access).receive(-1, DEADLINE_S)


def test_tls(opened, tmp_path):
    cert, key = write_certificate(tmp_path, "server")
    address = f"127.0.0.1:{free_port()}"
    make_publisher(opened, address, Access(tls_cert=cert, tls_key=key)).publish(0, tree_of(0, 2**22))
    check_whole(make_reader(opened, address, Access(tls_ca=cert)).receive(-1, DEADLINE_S), 2**22)
    with pytest.raises(WeightsLostError):
        make_reader(opened, address).receive(-1, 0.3)


def test_others_cannot_be_served_without_credentials(address, opened):
    with pytest.raises(ConfigError, match=r"refusing to listen on 0\.0\.0\.0:0"):
        open_publisher("0.0.0.0:0", Access(), fail)
    make_publisher(opened, address)
    with pytest.raises(ConfigError, match="it is in use"):
        open_publisher(address, Access(), fail)


def test_nobody_there(opened, address):
    with pytest.raises(WeightsLostError, match=r"the publisher at unix:.* is lost"):
        make_reader(opened, address).receive(-1, 0.2)


@pytest.mark.parametrize(
    ("message", "code", "details"),
    [
        (b"\xff", "INVALID_ARGUMENT", "the message is no ReceiveRequest"),
        (pb.ReceiveRequest(), "FAILED_PRECONDITION", "protocol is 0, the publisher's is 1"),
        (pb.ReceiveRequest(protocol=1, wait_s=-1), "INVALID_ARGUMENT", "wait_s (-1.0) must be from 0 to 60"),
        (pb.ReceiveRequest(protocol=1, wait_s=float("nan")), "INVALID_ARGUMENT", "wait_s (nan)"),
        (
            pb.ReceiveRequest(protocol=1, held=pb.ReceiveRequest.Held(writer=b"x")),
            "INVALID_ARGUMENT",
            "held.writer has 1 bytes; it must have 16",
        ),
        (pb.ReceiveRequest(protocol=1, writer=b"x"), "INVALID_ARGUMENT", "writer has 1 bytes; it must have 16"),
    ],
)
def test_malformed_requests(opened, address, message, code, details):
    make_publisher(opened, address)
    message = message if isinstance(message, bytes) else message.SerializeToString()
    with grpc.insecure_channel(address) as channel, pytest.raises(grpc.RpcError) as caught:
        next(channel.unary_stream(f"/{grpc_sink.SERVICE}/{grpc_sink.METHOD}")(message, timeout=DEADLINE_S))
    assert caught.value.code().name == code
    assert details in caught.value.details()


def test_a_closed_publisher_turns_waiting_readers_away(opened, address):
    publisher, reader, caught = open_publisher(address, Access(), fail), make_reader(opened, address), []
    publisher.publish(0, tree_of(0, 100))
    reader.receive(-1, DEADLINE_S)

    def receive():
        try:
            reader.receive(0, 1.0)
        except WeightsLostError as error:
            caught.append(error)

    waiting = threading.Thread(target=receive, daemon=True)
    waiting.start()
    publisher.close()
    waiting.join(DEADLINE_S)
    assert len(caught) == 1
    assert "is lost: UNAVAILABLE" in str(caught[0])


def test_a_reader_may_be_closed_while_it_waits(opened, address):
    make_publisher(opened, address)
    reader, caught = open_reader(address, OPEN), []
    begun, call = threading.Event(), reader._call

    def begin(*args, **kwargs):
        stream = call(*args, **kwargs)
        begun.set()
        return stream

    reader._call = begin

    def receive():
        try:
            reader.receive(0, DEADLINE_S)
        except WeightsLostError as error:
            caught.append(error)

    waiting = threading.Thread(target=receive, daemon=True)
    waiting.start()
    assert begun.wait(DEADLINE_S)
    reader.close()
    waiting.join(DEADLINE_S)
    assert caught

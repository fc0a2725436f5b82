"""Weights in shared memory: between real processes, one of which may die at any time."""

import fcntl
import secrets
import sys
import threading
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from bits import assert_bit_equal
from processes import DEADLINE_S, ROOT, Processes
from weights_process import check_whole, fail, tree_of

from seedx.checks import ConfigError
from seedx.metrics import Metrics
from seedx.security import Access
from seedx.transport import slot
from seedx.transport.errors import CorruptedError, TreeMismatchError, WeightsLostError
from seedx.transport.open import open_publisher, open_reader
from seedx.transport.shm_sink import DIRECTORY


@pytest.fixture
def name():
    name = f"seedx-test-{secrets.token_hex(8)}"
    yield name
    for path in DIRECTORY.glob(f"{name}*"):
        path.unlink()


@pytest.fixture
def processes(tmp_path):
    with Processes(tmp_path) as started:
        yield started


def make_publisher(opened, name, **kwargs):
    opened.append(open_publisher(f"shm:{name}", Access(), fail, **kwargs))
    return opened[-1]


def make_reader(opened, name, **kwargs):
    opened.append(open_reader(f"shm:{name}", Access(), **kwargs))
    return opened[-1]


def start(processes, command, name, *flags):
    script = str(ROOT / "tests" / "weights_process.py")
    return processes.start(sys.executable, script, command, f"shm:{name}", *map(str, flags))


@pytest.mark.parametrize("checksums", [True, False])
def test_what_is_received_is_what_was_published(opened, name, checksums):
    tree = {
        "bf16": jnp.arange(10, dtype=jnp.bfloat16),
        "deep": {"int8": np.arange(-3, 3, dtype=np.int8), "empty": np.zeros((0, 2)), "scalar": jnp.float32(-0.0)},
        "large": np.random.default_rng(0).normal(size=400_000),
    }
    publisher, reader = make_publisher(opened, name, checksums=checksums), make_reader(opened, name)
    for version in range(4):
        tree["deep"]["int8"] = tree["deep"]["int8"] + np.int8(1)
        publisher.publish(version, tree)
        weights = reader.receive(version - 1, DEADLINE_S)
        assert weights.version == version
        assert_bit_equal(weights.params, tree)
    assert reader.receive(3, 0.05) is None


def test_only_its_owner_can_read_it_and_nothing_is_left(name):
    publisher = open_publisher(f"shm:{name}", Access(), fail)
    paths = sorted(DIRECTORY.glob(f"{name}*"))
    assert [path.name for path in paths] == [name, f"{name}.0", f"{name}.1"]
    assert {path.stat().st_mode & 0o777 for path in paths} == {0o600}
    publisher.close()
    assert not [*DIRECTORY.glob(f"{name}*")]


def test_names(name):
    for wrong in ("", "../etc", "a/b", ".hidden"):
        with pytest.raises(ConfigError, match="must be shm: and a name"):
            open_reader(f"shm:{wrong}", Access())
    target = DIRECTORY / f"{name}.target"
    target.touch()
    (DIRECTORY / name).symlink_to(target)
    with pytest.raises(ConfigError, match="cannot be made"):
        open_publisher(f"shm:{name}", Access(), fail)


def test_other_processors_need_checksums(name, monkeypatch):
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    with pytest.raises(ConfigError, match="on aarch64 needs checksums"):
        open_publisher(f"shm:{name}", Access(), fail, checksums=False)
    open_publisher(f"shm:{name}", Access(), fail).close()


def test_one_publishes_at_a_time(opened, name):
    make_publisher(opened, name).publish(0, tree_of(0, 100))
    with pytest.raises(ConfigError, match=r"somebody publishes under shm:.* already"):
        open_publisher(f"shm:{name}", Access(), fail)


def test_who_takes_over_from_one_that_ends_is_found(opened, name, monkeypatch):
    """The file that it waits for loses its name before its lock."""
    former, unlink = open_publisher(f"shm:{name}", Access(), fail), Path.unlink
    waiting = threading.Thread(target=make_publisher, args=(opened, name), daemon=True)
    flock, tried = fcntl.flock, threading.Event()

    def try_lock(fd, operation):
        if threading.current_thread() is waiting:
            tried.set()
        flock(fd, operation)

    def unlink_when_awaited(path, **kwargs):
        if path == DIRECTORY / name and not waiting.ident:
            waiting.start()
            assert tried.wait(DEADLINE_S)  # it has opened the file that goes now
        unlink(path, **kwargs)

    monkeypatch.setattr(fcntl, "flock", try_lock)
    monkeypatch.setattr(Path, "unlink", unlink_when_awaited)
    former.close()
    waiting.join(DEADLINE_S)
    opened[0].publish(7, tree_of(7, 4000))
    weights = make_reader(opened, name).receive(-1, DEADLINE_S)
    assert weights.version == 7
    with pytest.raises(ConfigError, match="somebody publishes under"):
        open_publisher(f"shm:{name}", Access(), fail)


def test_nobody_there(opened, name):
    reader = make_reader(opened, name)
    with pytest.raises(WeightsLostError, match="nobody publishes under shm:"):
        reader.receive(-1, 0.1)
    publisher = open_publisher(f"shm:{name}", Access(), fail)
    assert reader.receive(-1, 0.1) is None
    publisher.publish(0, tree_of(0, 100))
    reader.receive(-1, DEADLINE_S)
    publisher.close()
    with pytest.raises(WeightsLostError, match="nobody publishes under shm:"):
        reader.receive(0, 0.1)


def test_a_reader_with_another_tree(opened, name):
    make_publisher(opened, name).publish(0, tree_of(0, 4000))
    reader = make_reader(opened, name, expected=tree_of(0, 4000) | {"head": np.zeros((3, 6), jnp.bfloat16)})
    with pytest.raises(TreeMismatchError, match=r"head is bfloat16\[3, 5\], not bfloat16\[3, 6\]"):
        reader.receive(-1, DEADLINE_S)


def test_changed_bytes_are_noticed(opened, name):
    metrics = Metrics()
    publisher, reader = make_publisher(opened, name), make_reader(opened, name, metrics=metrics)
    publisher.publish(0, tree_of(0, 4000))
    reader.receive(-1, DEADLINE_S)
    path = DIRECTORY / f"{name}.0"
    good = path.read_bytes()
    changed = bytearray(good)
    changed[-100] ^= 1
    with path.open("r+b") as file:
        file.write(changed)
    with pytest.raises(CorruptedError, match="tensor layer/w of version 0 has checksum"):
        reader.receive(-1, 0.1)
    assert metrics.snapshot()["weights/corrupted"] > 0
    with path.open("r+b") as file:
        file.write(good)
    check_whole(reader.receive(-1, DEADLINE_S), 4000)
    with path.open("r+b") as file:
        file.truncate(slot._PAGE + 1000)
    with pytest.raises(CorruptedError, match="has only"):
        make_reader(opened, name).receive(-1, 0.1)


@pytest.mark.parametrize("checksums", [True, False])
def test_readers_never_see_a_mixed_version(opened, name, processes, checksums):
    """Readers of another process, and one that is slow, while versions follow one another as fast as they can."""
    size = 2**22
    publisher = make_publisher(opened, name, checksums=checksums)
    publisher.publish(0, tree_of(0, size))
    readers = [start(processes, "read", name, "--versions", 300, "--size", size) for _ in range(2)]
    for reader in readers:
        reader.until(lambda reader=reader: "read 0" in reader.out, "the first version")
    for version in range(1, 301):
        publisher.publish(version, tree_of(version, size))
    for reader in readers:
        assert reader.wait() == 0, reader.said
        assert "read 300" in reader.out


def test_a_reader_that_stops_is_not_waited_for_for_long(opened, name, monkeypatch):
    """It finds out, and reads the version that is there then."""
    monkeypatch.setattr(slot, "STALL_S", 0.2)
    metrics = Metrics()
    publisher = make_publisher(opened, name, metrics=metrics)
    publisher.publish(0, tree_of(0, 2**22))
    reader, copy, stopped, go, got = (
        make_reader(opened, name),
        slot.SlotReader._copy,
        threading.Event(),
        threading.Event(),
        [],
    )

    def slow(self, into, at):
        if threading.current_thread() is reading and not stopped.is_set() and at > 2**21:
            stopped.set()
            assert go.wait(DEADLINE_S)
        copy(self, into, at)

    monkeypatch.setattr(slot.SlotReader, "_copy", slow)
    reading = threading.Thread(target=lambda: got.append(reader.receive(-1, DEADLINE_S)), daemon=True)
    reading.start()
    assert stopped.wait(DEADLINE_S)
    other = make_reader(opened, name)
    for version in range(1, 4):
        publisher.publish(version, tree_of(version, 2**22))
        check_whole(other.receive(version - 1, DEADLINE_S), 2**22)
    go.set()
    reading.join(DEADLINE_S)
    assert got[0].version == 3
    check_whole(got[0], 2**22)
    assert metrics.snapshot()["weights/dropped_readers"] == 1


def test_a_publisher_killed_while_it_writes(opened, name, processes):
    """Who reads along gives up; new readers get the last whole version; another publisher takes over."""
    size = 2**24
    killed = start(processes, "stall", name, "--versions", 1, 2, "--size", size)
    metrics = Metrics()
    reader = make_reader(opened, name, metrics=metrics)
    killed.until(lambda: "stalled" in killed.out, "half of the second version")
    caught = []

    def read_along():
        try:
            reader.receive(1, 0.5)
        except WeightsLostError as error:
            caught.append(str(error))

    reading = threading.Thread(target=read_along, daemon=True)
    reading.start()
    killed.popen.kill()
    killed.wait()
    reading.join(DEADLINE_S)
    assert caught == [f"nobody publishes under shm:{name}."]
    kept = reader.receive(0, DEADLINE_S)
    assert kept.version == 1
    check_whole(kept, size)
    start(processes, "publish", name, "--versions", 7, "--size", 4000)
    weights = reader.receive(1, DEADLINE_S)
    assert weights.version == 7
    check_whole(weights, 4000)
    check_whole(kept, size)


def test_a_publisher_that_stops_while_it_writes(opened, name, processes, monkeypatch):
    monkeypatch.setattr(slot, "STALL_S", 0.3)
    stopped = start(processes, "stall", name, "--versions", 1, 2, "--size", 2**24)
    stopped.until(lambda: "stalled" in stopped.out, "half of the second version")
    with pytest.raises(WeightsLostError, match="the publisher stopped in the middle of a version"):
        make_reader(opened, name).receive(1, DEADLINE_S)

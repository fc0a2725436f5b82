"""Weights as files of a directory."""

import os
import signal
import sys

import jax.numpy as jnp
import numpy as np
import pytest
from bits import assert_bit_equal
from processes import DEADLINE_S, ROOT, Processes
from weights_process import check_whole, fail, tree_of

from seedx.checks import ConfigError
from seedx.security import Access
from seedx.transport.errors import CorruptedError, TreeMismatchError, WeightsLostError
from seedx.transport.open import open_publisher, open_reader


def test_what_is_received_is_what_was_published(tmp_path):
    address = f"dir:{tmp_path}/weights"
    reader = open_reader(address, Access())
    with pytest.raises(WeightsLostError, match="there is no directory"):
        reader.receive(-1, 0.1)
    publisher = open_publisher(address, Access(), fail)
    assert reader.receive(-1, 0.1) is None
    tree = {"a": {"bf16": jnp.arange(10, dtype=jnp.bfloat16), "scalar": np.float64(2) * np.ones(())}}
    for version in range(9, 13):
        tree["a"]["bf16"] = -tree["a"]["bf16"]
        publisher.publish(version, tree)
        weights = reader.receive(version - 1, DEADLINE_S)
        assert weights.version == version
        assert_bit_equal(weights.params, tree)
    publisher.close()
    assert sorted(os.listdir(tmp_path / "weights")) == ["11.weights", "12.weights"]
    assert reader.receive(12, 0.1) is None
    mismatched = open_reader(address, Access(), expected={"a": np.ones(3)})
    with pytest.raises(TreeMismatchError, match=r"a is absent, not float64\[3\]"):
        mismatched.receive(-1, DEADLINE_S)


def test_another_publisher_begins_anew(tmp_path):
    address = f"dir:{tmp_path}"
    for versions in ((5, 6), (2,)):
        publisher = open_publisher(address, Access(), fail)
        for version in versions:
            publisher.publish(version, tree_of(version, 4000))
            check_whole(open_reader(address, Access()).receive(version - 1, DEADLINE_S), 4000)
        publisher.close()
    assert os.listdir(tmp_path) == ["2.weights"]


def test_one_publishes_at_a_time(tmp_path):
    publisher = open_publisher(f"dir:{tmp_path}", Access(), fail)
    with pytest.raises(ConfigError, match="somebody publishes there already"):
        open_publisher(f"dir:{tmp_path}", Access(), fail)
    publisher.close()
    open_publisher(f"dir:{tmp_path}", Access(), fail).close()


def test_changed_bytes_are_noticed(tmp_path):
    publisher = open_publisher(f"dir:{tmp_path}", Access(), fail)
    publisher.publish(1, tree_of(1, 4000))
    publisher.close()
    with (tmp_path / "1.weights").open("r+b") as file:
        file.seek(-100, os.SEEK_END)
        file.write(b"x")
    with pytest.raises(CorruptedError, match="tensor layer/w of version 1 has checksum"):
        open_reader(f"dir:{tmp_path}", Access()).receive(-1, 0.1)


def test_a_directory_that_cannot_be_made(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be made"):
        open_publisher(f"dir:{tmp_path}/file/weights", Access(), fail)


def test_a_publisher_killed_at_any_time_leaves_whole_versions(tmp_path):
    script = str(ROOT / "tests" / "weights_process.py")
    reader = open_reader(f"dir:{tmp_path}/weights", Access())
    with Processes(tmp_path) as processes:
        flags = ("--size", str(2**22), "--versions", *map(str, range(1000)))
        publisher = processes.start(sys.executable, script, "publish", f"dir:{tmp_path}/weights", *flags)
        publisher.until(lambda: len([*tmp_path.glob("weights/*.weights")]) == 2, "two versions")
        publisher.send(signal.SIGKILL)
        publisher.wait()
    check_whole(reader.receive(-1, DEADLINE_S), 2**22)

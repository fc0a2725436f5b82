"""The connections by which hosts notice that one is gone."""

import contextlib
import queue
import socket
import threading

import pytest

from seedx import lifeline
from seedx.lifeline import Lifeline


class Three:
    """Three hosts, and whom they say is lost."""

    def __init__(self):
        pairs = [socket.socketpair() for _ in range(2)]
        self.connections = [{1: pairs[0][0], 2: pairs[1][0]}, {0: pairs[0][1]}, {0: pairs[1][1]}]
        self.lost = [queue.Queue() for _ in range(3)]
        self.lines = {}

    def start(self, index):
        self.lines[index] = Lifeline(self.connections[index], 3, lambda error: self.lost[index].put(str(error)))

    def heard(self, index):
        return self.lost[index].get(timeout=60)

    def close(self):
        for line in self.lines.values():
            line.end()
        for connections in self.connections:
            for connection in connections.values():
                connection.close()


@pytest.fixture
def three():
    with contextlib.closing(Three()) as made:
        yield made


def test_a_host_that_ends_is_named_by_all_others(three):
    three.start(0), three.start(1)
    three.connections[2][0].close()
    assert three.heard(0).startswith("host 2 of 3 is lost: its connection is closed.")
    assert three.heard(1).startswith("host 2 of 3 is lost: so says host 0.")


def test_so_is_host_0(three):
    three.start(1), three.start(2)
    for connection in three.connections[0].values():
        connection.close()
    assert three.heard(1) == three.heard(2)
    assert three.lost[1].empty()
    assert three.lost[2].empty()


@pytest.fixture
def short_silence(monkeypatch):
    """In which a host that is alive beats sixty times."""
    monkeypatch.setattr(lifeline, "SILENT_S", 6.0)
    monkeypatch.setattr(lifeline, "_BEAT_S", 0.1)


def test_a_silent_host_is_named(three, short_silence):
    three.start(0), three.start(1)  # and 2 says nothing
    assert three.heard(0).startswith("host 2 of 3 is lost: it has been silent for 6 s.")
    assert three.heard(1).startswith("host 2 of 3 is lost: so says host 0.")
    assert three.lost[0].empty()


def test_a_host_that_is_done_may_be_silent_and_go(three, short_silence):
    for index in range(3):
        three.start(index)
    three.lines[1].end()
    threading.Event().wait(7.0)  # longer than the others may be silent
    three.connections[1][0].close()
    three.connections[2][0].shutdown(socket.SHUT_RDWR)  # who is lost later is the only one
    assert three.heard(0).startswith("host 2 of 3 is lost")
    assert three.lost[0].empty()
    assert three.lost[1].empty()

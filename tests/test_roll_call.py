"""How the hosts of one learner find each other."""

import socket
import threading
import time

import pytest
from processes import free_port

from seedx.checks import ConfigError
from seedx.lifeline import HostLostError
from seedx.roll_call import answer_roll, call_roll


def roll(address, count, index, settings="same", timeout_s=20.0):
    """One host's part on a thread; to whom it is connected at the end, or what it raised."""
    results = []

    def run():
        deadline = time.monotonic() + timeout_s
        try:
            if index == 0:
                connections = call_roll(address, count, settings, deadline, lambda: False)
            else:
                connections = answer_roll(address, index, settings, deadline, lambda: False)
            results.append(sorted(connections))
            for connection in connections.values():
                connection.close()
        except Exception as error:
            results.append(f"{error} ({type(error).__name__})" if isinstance(error, ConfigError) else str(error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()

    def wait():
        thread.join(60)
        assert not thread.is_alive()
        return results[0]

    return wait


def test_hosts_find_each_other_in_any_order_and_past_strangers():
    address = f"localhost:{free_port()}"
    later = [roll(address, 3, 2)]
    first = roll(address, 3, 0)
    port = int(address.rpartition(":")[2])
    for garbage in (b"GET / HTTP/1.1\r\n\r\n", b"7 same\n", b"\xff\xfe\n", b""):
        for _ in range(100):
            try:
                stranger = socket.create_connection(("localhost", port), timeout=10)
                break
            except OSError:
                threading.Event().wait(0.1)
        stranger.sendall(garbage)
        stranger.close()
    later.append(roll(address, 3, 1))
    assert [wait() for wait in (first, *later)] == [[1, 2], [0], [0]]


def test_a_host_that_never_comes_is_named_on_all_others():
    address = f"localhost:{free_port()}"
    waits = [roll(address, 4, i, timeout_s=3.0) for i in (0, 2)]
    for wait in waits:
        assert wait() == f"hosts 1, 3 of 4 did not come to {address} in time."


def test_a_missing_coordinator_is_named():
    address = f"localhost:{free_port()}"
    said = roll(address, 2, 1, timeout_s=0.5)()
    assert f"host 0 is not at {address}" in said
    assert "this is host 1." in said


def test_hosts_with_other_settings_are_refused():
    address = f"localhost:{free_port()}"
    waits = [roll(address, 2, 0, "mine"), roll(address, 2, 1, "yours")]
    for wait in waits:
        said = wait()
        assert "host 1 has other settings than host 0" in said
        assert "ConfigError" in said  # which no restart mends


def test_a_coordinator_whose_port_is_taken_is_refused():
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(ConfigError, match="cannot listen"):
        call_roll(f"127.0.0.1:{taken.getsockname()[1]}", 2, "", time.monotonic() + 1, lambda: False)


def test_a_host_that_is_told_to_stop_waits_no_longer():
    with pytest.raises(HostLostError, match="stopped"):
        answer_roll(f"localhost:{free_port()}", 1, "", time.monotonic() + 60, lambda: True)

"""Several hosts as one learner: they find each other, compute the updates of one, and end alike."""

import socket
import sys
import threading

import numpy as np
import pytest
from processes import ROOT, Processes, free_port
from quick_xla import QUICK_XLA

from seedx.checks import ConfigError
from seedx.hosts import HostLostError, Hosts
from seedx.votes import REASONS, Vote, Votes


@pytest.fixture
def processes(tmp_path):
    with Processes(tmp_path) as started:
        yield started


# ---- the same update on any number of hosts


def learn_together(processes, hosts, devices):
    """What each of so many hosts with so many devices has learned."""
    coordinator = f"localhost:{free_port()}"
    env = {"XLA_FLAGS": f"--xla_force_host_platform_device_count={devices} {QUICK_XLA}", "JAX_PLATFORMS": "cpu"}
    outs = [processes.directory / f"{hosts}x{devices}-{i}.npz" for i in range(hosts)]
    script = str(ROOT / "tests" / "learn_together.py")
    started = [
        processes.start(sys.executable, script, str(out), str(i), str(hosts), coordinator, env=env)
        for i, out in enumerate(outs)
    ]
    for process in started:
        assert process.wait() == 0, process.said
    return [dict(np.load(out)) for out in outs]


def check_equal_learning(processes, hosts, devices):
    (alone,) = learn_together(processes, 1, hosts * devices)
    together = learn_together(processes, hosts, devices)
    for learned in together:
        assert learned.keys() == alone.keys()
        assert learned["updates"] == alone["updates"] == 6
        assert learned["env_steps"] == alone["env_steps"]
        for name in alone:
            np.testing.assert_array_equal(learned[name], together[0][name])  # hosts differ in no bit
            np.testing.assert_allclose(learned[name], alone[name], rtol=1e-5, atol=1e-6)
    return max(float(np.abs(together[0][name] - alone[name]).max()) for name in alone)


def test_two_hosts_with_two_devices_learn_what_one_with_four_does(processes):
    print("largest difference", check_equal_learning(processes, 2, 2))


@pytest.mark.slow
def test_four_hosts_with_two_devices_learn_what_one_with_eight_does(processes):
    print("largest difference", check_equal_learning(processes, 4, 2))


# ---- what they say


def test_votes_are_read_alike_by_all():
    rows = [
        Vote(None, True, 30, 2.0, 10),
        Vote("SIGTERM", False, 0, float("nan"), 0),
        Vote("seconds", True, 12, 5.0, 20),
    ]
    votes = Votes(np.stack([vote.row() for vote in rows]))
    assert (votes.learners, votes.env_steps, votes.stop, votes.stopper) == (2, 42, "SIGTERM", 1)
    assert votes.returns == (4.0, 30)


@pytest.mark.parametrize("reason", REASONS)
def test_every_reason_arrives(reason):
    votes = Votes(np.stack([Vote(None, True, 1, 0.0, 0).row(), Vote(reason, True, 1, 0.0, 0).row()]))
    assert (votes.stop, votes.stopper) == (reason, 1)
    assert np.isnan(votes.returns[0])


def test_nobody_wants_to_stop():
    votes = Votes(np.stack([Vote(None, False, 0, 0.0, 0).row()] * 3))
    assert votes.stop is None
    assert votes.learners == 0


# ---- how they find each other


def roll(hosts, settings="same", timeout_s=20.0):
    """Runs the part of `join` that precedes jax on a thread; what it raised, once it has ended."""
    from seedx import hosts as module

    call = module._call_roll if hosts.index == 0 else module._answer_roll
    errors = []

    def run():
        import time

        try:
            call(hosts, settings, time.monotonic() + timeout_s, lambda: False)
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()

    def wait():
        thread.join(60)
        assert not thread.is_alive()
        return str(errors[0]) if errors else None

    return wait


def test_hosts_find_each_other_in_any_order_and_past_strangers():
    address = f"localhost:{free_port()}"
    later = [roll(Hosts(address, 3, 2))]
    first = roll(Hosts(address, 3, 0))
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
    later.append(roll(Hosts(address, 3, 1)))
    assert [wait() for wait in (first, *later)] == [None] * 3


def test_a_host_that_never_comes_is_named_on_all_others():
    address = f"localhost:{free_port()}"
    waits = [roll(Hosts(address, 4, i), timeout_s=3.0) for i in (0, 2)]
    for wait in waits:
        assert wait() == f"hosts 1, 3 of 4 did not come to {address} in time."


def test_a_missing_coordinator_is_named():
    address = f"localhost:{free_port()}"
    said = roll(Hosts(address, 2, 1), timeout_s=0.5)()
    assert f"host 0 is not at {address}" in said
    assert "host 1 of 2" in said


def test_hosts_with_other_settings_are_refused():
    address = f"localhost:{free_port()}"
    waits = [roll(Hosts(address, 2, 0), "mine"), roll(Hosts(address, 2, 1), "yours")]
    for wait in waits:
        assert "host 1 has other settings than host 0" in wait()


def test_a_coordinator_whose_port_is_taken_is_refused():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        hosts = Hosts(f"127.0.0.1:{taken.getsockname()[1]}", 2, 0)
        with pytest.raises(ConfigError, match="cannot listen"):
            hosts.join("", 1.0, lambda: False)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("h:1", 2, 2), "host index"),
        (("h:1", 2, -1), "host index"),
        (("", 2, 0), "host:port"),
        (("h", 2, 1), "host:port"),
    ],
)
def test_wrong_hosts_are_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        Hosts(*arguments)


def test_a_batch_that_does_not_divide_is_refused():
    assert Hosts("h:1", 4, 0).share(32) == 8
    with pytest.raises(ConfigError, match=r"learner.batch_size \(30\) must be divisible by the number of hosts \(4\)"):
        Hosts("h:1", 4, 0).share(30)


def test_one_host_waits_for_nobody():
    hosts = Hosts()
    hosts.join("", 0.0, lambda: True)
    hosts.meet("anywhere", 0.0)
    hosts.leave()
    assert hosts.alone


def test_a_host_that_is_told_to_stop_waits_no_longer():
    with pytest.raises(HostLostError, match="stopped"):
        Hosts(f"localhost:{free_port()}", 2, 1).join("", 60.0, lambda: True)

"""Several hosts as one learner: they compute the updates of one, and say when to end."""

import sys

import numpy as np
import pytest
from processes import ROOT, Processes, free_port
from quick_xla import QUICK_XLA

from seedx.checks import ConfigError
from seedx.hosts import Hosts
from seedx.votes import REASONS, Vote, Votes


@pytest.fixture
def processes(tmp_path):
    with Processes(tmp_path) as started:
        yield started


# ---- the same update on any number of hosts


def learn_together(processes, hosts, devices, script="learn_together.py", options=()):
    """What each of so many hosts with so many devices has learned."""
    coordinator = f"localhost:{free_port()}"
    env = {"XLA_FLAGS": f"--xla_force_host_platform_device_count={devices} {QUICK_XLA}", "JAX_PLATFORMS": "cpu"}
    outs = [processes.directory / f"{hosts}x{devices}-{i}.npz" for i in range(hosts)]
    started = [
        processes.start(
            sys.executable, str(ROOT / "tests" / script), str(out), *options, str(i), str(hosts), coordinator, env=env
        )
        for i, out in enumerate(outs)
    ]
    for process in started:
        assert process.wait() == 0, process.said
    return [dict(np.load(out)) for out in outs]


def assert_alike(together, alone):
    """Hosts differ in no bit, and from one host by rounding alone."""
    for learned in together:
        assert learned.keys() == alone.keys()
        for name in alone:
            np.testing.assert_array_equal(learned[name], together[0][name])
            np.testing.assert_allclose(learned[name], alone[name], rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.parametrize(("hosts", "devices"), [(2, 2), pytest.param(4, 2, marks=pytest.mark.slow)])
def test_hosts_learn_what_one_with_all_their_devices_does(processes, hosts, devices):
    (alone,) = learn_together(processes, 1, hosts * devices)
    together = learn_together(processes, hosts, devices)
    assert [learned["updates"] for learned in (alone, *together)] == [6] * (1 + hosts)
    assert all(learned["env_steps"] == alone["env_steps"] > 0 for learned in together)
    assert_alike(together, alone)


@pytest.mark.slow
@pytest.mark.parametrize(("zero", "fsdp"), [(2, 2), (3, 8)])
def test_four_hosts_train_a_language_model_as_one_does(processes, zero, fsdp):
    """Rows over hosts and devices, and what ZeRO splits too; each host is fed all groups of a recorded batch."""
    options = (str(zero), str(fsdp))
    (alone,) = learn_together(processes, 1, 8, "learn_text_together.py", options)
    together = learn_together(processes, 4, 2, "learn_text_together.py", options)
    assert alone["grad_norm"] > 0.01
    assert_alike(together, alone)


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


# ---- who they are


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
    hosts.join("", 0.0, lambda: True, pytest.fail).end()
    hosts.meet("anywhere", 0.0)
    hosts.leave()
    assert hosts.alone

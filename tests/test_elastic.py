"""Actors on other machines join and leave a run that a launcher has started, with TLS and a token."""

import signal

import pytest
from certificates import write_certificate
from processes import QUICK, TINY, Processes, free_port, last, make_run

pytestmark = pytest.mark.slow


@pytest.fixture
def processes(tmp_path):
    with Processes(tmp_path) as started:
        yield started


@pytest.fixture
def secret(tmp_path):
    """The flags of TLS and token, for launchers and for actors elsewhere, who have no key."""
    cert, key = write_certificate(tmp_path, "learner")
    (tmp_path / "token").write_text("s3cret\n")
    flags = ("--inference.tls-cert", cert, "--inference.token-file", str(tmp_path / "token"))
    return (*flags, "--inference.tls-key", key), (*flags, "--inference.tls-key", "nowhere")


def until_alive(started, run_dir, count):
    """Waits until so many actors are connected, and then for further updates."""
    started.until(lambda: last(run_dir, "actors/alive") == count, f"{count} actors")
    goal = last(run_dir, "updates") + 5
    started.until(lambda: last(run_dir, "updates") >= goal, "further updates")


def test_actors_join_and_leave_one_host_of_two(processes, secret, tmp_path):
    here, elsewhere = secret
    run_dir, names = tmp_path / "run", f"localhost:{free_port()},localhost"
    flags = (*TINY, "--num-actors", "2", *here, "--hosts", names, "--run-dir", str(run_dir))
    ports = [free_port(), free_port()]
    pods = [
        processes.launch(
            *("pod.py", *flags, "--host-index", str(i), "--start-actors", "1", "--address", f"0.0.0.0:{ports[i]}"),
            env=QUICK,
        )
        for i in (0, 1)
    ]
    second = run_dir / "host-1"
    until_alive(pods[1], second, 1)

    make_run(tmp_path / "there", "--num-actors", "2", *elsewhere)
    actor = processes.role("actor", tmp_path / "there", f"localhost:{ports[1]}", "--actor-id", "3")
    until_alive(pods[1], second, 2)
    assert last(run_dir, "actors/alive") == 1
    actor.send(signal.SIGTERM)
    assert actor.wait() == 143
    until_alive(pods[1], second, 1)
    log = (second / "logs" / "learner.log").read_text()
    assert [f"actor {what}" in log for what in ("2 has joined", "3 has joined", "3 is gone", "2 is gone")] == [
        1,
        1,
        1,
        0,
    ]

    (tmp_path / "other").write_text("wrong\n")
    make_run(tmp_path / "stranger", "--num-actors", "2", *elsewhere, "--inference.token-file", str(tmp_path / "other"))
    stranger = processes.role("actor", tmp_path / "stranger", f"localhost:{ports[1]}", "--actor-id", "3")
    assert stranger.wait() == 2
    assert "UNAUTHENTICATED" in stranger.err
    pods[0].send(signal.SIGTERM)
    assert [pod.wait() for pod in pods] == [143, 143], [pod.said for pod in pods]
    processes.wait_until_gone()


@pytest.mark.parametrize("listens", [False, True])
def test_a_launcher_gives_its_roles_certificate_and_token(processes, secret, tmp_path, listens):
    address = ("--address", f"127.0.0.1:{free_port()}") if listens else ()
    run = processes.local(tmp_path / "run", *secret[0], *address, "--steps", "400")
    assert run.wait() == 0, run.said
    processes.wait_until_gone()

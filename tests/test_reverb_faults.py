"""Real Reverb servers that end, hang, or come back: pytest -m external tests/test_reverb_faults.py."""

import contextlib
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from processes import Processes, free_port, until
from reverb_harness import (
    QUEUE,
    REPLAY,
    Launched,
    S,
    insert,
    numbered,
    numbers_of,
    reverb_server,
    table_info,
)

from seedx.config import TableConfig
from seedx.replay import reverb_peek, reverb_tables, reverb_writer
from seedx.replay.description import table_description
from seedx.replay.replay import ReplayGoneError, ReplayTimeoutError
from seedx.replay.reverb_client import ReverbLostError
from seedx.replay.reverb_codec import ReverbDataError
from seedx.replay.reverb_health import main
from seedx.replay.reverb_replay import ReverbReplay

pytestmark = pytest.mark.external


def test_a_server_that_is_not_there_is_named():
    port = free_port()
    with pytest.raises(ReverbLostError, match=f"localhost:{port} has been gone .*launch/reverb_server.py"):
        ReverbReplay(f"reverb://localhost:{port}", "replay", give_up_s=1.0)


@pytest.fixture
def launched(tmp_path):
    with reverb_server(table_description(QUEUE, 1)):  # there is uv, and what it installs
        pass
    with Processes(tmp_path) as processes:
        yield lambda *tables: Launched(processes, *tables)


def test_an_item_that_was_looked_at_and_cannot_be_put_back_is_told_of(launched, monkeypatch):
    server = launched(table_description(QUEUE, 1, "replay"))
    server.serve()
    owner = ReverbReplay(f"reverb://{server.address}", "replay", prefetch=False)
    insert(owner, *range(5))
    owner.close()

    def put_back_once_the_server_is_killed(*args):
        server.kill()
        return reverb_peek.put_back(*args)

    monkeypatch.setattr(reverb_tables, "put_back", put_back_once_the_server_is_killed)
    with pytest.raises(ReverbDataError, match=f"one item, which was looked at, is missing at {server.address}"):
        ReverbReplay(f"reverb://{server.address}", "replay", example=numbered(0, rows=5))


def test_a_server_without_credentials_must_be_asked_for(launched):
    process = launched(table_description(QUEUE, 1, "replay")).start()
    assert process.wait(300.0) == 2
    assert "every interface" in process.err
    assert "--allow-unauthenticated" in process.err


def is_python_with_threads(process):
    return process.name().startswith("python") and process.num_threads() > 1


@pytest.mark.parametrize("word", ["starting", "serving"])
def test_a_server_ends_with_uv_which_started_it(launched, word):
    server = launched(table_description(QUEUE, 1, "replay"))
    process = server.start("--allow-unauthenticated") if word == "starting" else server.serve()
    process.until(lambda: any(is_python_with_threads(each) for each in server.alive()), "the server's watch over uv")
    process.popen.kill()
    assert process.wait() == -signal.SIGKILL
    until(lambda: not server.alive(), "the end of the server")
    server.serve()  # its port is free


def table_without_times(address):
    """A table but for what its thread did, as text: without the fields that we do not know."""
    table = table_info(address)
    table.ClearField("table_worker_time")
    return str(table)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_server_that_is_stopped_keeps_everything(launched, number, code):
    server = launched(table_description(REPLAY, 1, "replay"))
    assert "empty tables" in server.serve().out
    replay = ReverbReplay(f"reverb://{server.address}", "replay", prefetch=False)
    replay.insert(numbered(*range(30)), np.arange(30.0), S)
    replay.sample(100, S)
    assert replay.info()["replay/items"] == 30
    before = table_without_times(server.address)
    server.process.interrupt(number)
    assert server.process.wait() == code
    assert "wrote" in server.process.out
    words = rf"{server.address}, .* answer, since \d+:\d+:\d+; it has \d+ s left"
    with pytest.raises(ReplayGoneError, match=words):
        insert(replay, 30, timeout_s=0.5)
    assert replay.info()["replay/items"] == 30  # the last known
    assert "loading" in server.serve().out
    assert table_without_times(server.address) == before
    insert(replay, 31)
    assert replay.info()["replay/items"] >= 31
    assert replay.info()["replay/lost_upper_bound"] == 30
    replay.close()


def test_closing_while_a_server_is_gone_is_no_failure(launched):
    server = launched(table_description(REPLAY, 1, "replay"))
    server.serve()
    replay = ReverbReplay(f"reverb://{server.address}", "replay")
    insert(replay, 1)
    replay.sample(1, S)
    server.kill()
    calls = (lambda: insert(replay, 2, timeout_s=1.0), lambda: replay.sample(1000, 1.0))
    for call in calls:
        with pytest.raises(ReplayGoneError):
            call()
    replay.close()
    for thread in threading.enumerate():
        if thread.name.endswith(server.address):  # waits for the server, or did until it was closed
            thread.join(S)
            assert not thread.is_alive(), thread.name
    for call in calls:
        with pytest.raises(ReplayTimeoutError, match="closed"):
            call()


def test_a_server_that_is_killed_at_work_costs_no_more_than_is_counted(launched):
    server = launched(table_description(TableConfig(max_size=100_000), 1, "replay"))
    server.serve()
    replay = ReverbReplay(f"reverb://{server.address}", "replay", overlap=2, give_up_s=300.0)
    stop, inserted, taken = threading.Event(), [], []

    def keep_inserting():
        for start in range(0, 10**9, 10):
            if stop.is_set():
                return
            items = numbered(*range(start, start + 10))
            while True:
                try:
                    replay.insert(items, np.ones(10), 1.0)
                    break
                except ReplayTimeoutError:
                    continue
            inserted.extend(range(start, start + 10))

    def keep_sampling():
        while True:
            try:
                taken.extend(numbers_of(replay.sample(7, 1.0)))
            except ReplayTimeoutError:
                if stop.is_set():
                    return
            time.sleep(0.01)  # the queue grows

    with ThreadPoolExecutor() as pool:
        work = [pool.submit(keep_inserting), pool.submit(keep_sampling)]
        try:
            until(lambda: len(taken) > 100, "samples")
            replay.checkpoint()
            after = len(inserted)
            until(lambda: len(inserted) > after + 200, "inserts after the checkpoint")
            server.kill()
            time.sleep(1.0)
            assert "loading" in server.serve().out
            after = len(taken)
            until(lambda: len(taken) > after + 300, "samples after the restart")
        finally:
            stop.set()
        for each in work:
            each.result(120)
    left = replay.info()
    replay.close()
    assert len(taken) == len(set(taken))
    assert set(taken) <= set(inserted)
    lost = set(inserted) - set(taken)
    assert len(lost) - left["replay/items"] - 7 <= left["replay/lost_upper_bound"]
    assert left["replay/lost_upper_bound"] > 0
    assert left["replay/restored"] > 0  # the checkpoint gave back what had been sampled after it
    assert left["replay/duplicates"] <= reverb_writer.MAX_UNACKED


def until_it_is_not_a_timeout(call, timeout_s=60):
    started = time.monotonic()
    while time.monotonic() - started < timeout_s:
        with contextlib.suppress(ReplayTimeoutError):
            call()
            return


def test_a_server_that_stays_away_ends_the_run(launched):
    server = launched(table_description(QUEUE, 1, "replay"))
    server.serve()
    replay = ReverbReplay(f"reverb://{server.address}", "replay", give_up_s=2.0)
    insert(replay, 1)
    server.kill()
    for call in (lambda: replay.sample(8, 1.0), lambda: insert(replay, 1, timeout_s=1.0)):
        with pytest.raises(ReverbLostError, match=f"{server.address} has been gone"):
            until_it_is_not_a_timeout(call)
    with pytest.raises(ReverbLostError):
        replay.update_priorities(np.array([1], np.uint64), np.ones(1))
    replay.close()


def test_what_is_sampled_after_a_checkpoint_is_not_given_twice_however_much_that_is(launched):
    server = launched(table_description(TableConfig(max_size=100_000), 1, "replay"))
    server.serve()
    replay = ReverbReplay(f"reverb://{server.address}", "replay", give_up_s=300.0)
    count = 17_500
    insert(replay, *range(count), timeout_s=60.0)
    replay.checkpoint()
    for start in range(0, count, 500):
        assert numbers_of(replay.sample(500, S)) == list(range(start, start + 500))
    server.kill()
    assert "loading" in server.serve().out
    insert(replay, count, timeout_s=60.0)
    assert numbers_of(replay.sample(1, 60.0)) == [count]
    assert replay.info()["replay/restored"] == count
    assert replay.info()["replay/duplicates"] == 0
    replay.close()


def test_a_checkpoint_that_cannot_be_written_is_counted_and_said_once(launched, capfd):
    server = launched(table_description(QUEUE, 1, "replay"))
    server.serve()
    replay = ReverbReplay(f"reverb://{server.address}", "replay", give_up_s=1.0)
    insert(replay, 1)
    server.checkpoints.rename(server.checkpoints.with_name("elsewhere"))
    server.checkpoints.write_text("in the way")
    for _ in range(2):
        replay.try_checkpoint()
    assert replay.info()["replay/failed_checkpoints"] == 2
    assert capfd.readouterr().out.count("no checkpoint of the Reverb table was written") == 1
    assert numbers_of(replay.sample(1, S)) == [1]
    server.checkpoints.unlink()
    replay.try_checkpoint()
    assert replay.info()["replay/failed_checkpoints"] == 2
    assert list(server.checkpoints.glob("*/DONE"))
    server.kill()
    replay.try_checkpoint()
    assert replay.info()["replay/failed_checkpoints"] == 3
    replay.close()


def test_a_server_that_hangs_is_told_from_one_that_makes_inserts_wait(launched, monkeypatch, capsys):
    monkeypatch.setattr(reverb_writer, "_SILENCE_S", 2.0)
    server = launched(table_description(TableConfig(max_size=8), 1, "replay"))
    server.serve()
    patient, hasty = (ReverbReplay(f"reverb://{server.address}", "replay", give_up_s=s) for s in (300.0, 1.0))
    items = numbered(*range(10))
    with pytest.raises(ReplayTimeoutError, match="holds 8 of 8"):  # answers all the while
        patient.insert(items, np.ones(10), 5.0)
    others = [process for process in server.alive() if process.name().startswith("python")]
    for process in others:
        process.suspend()
    with pytest.raises(ReplayTimeoutError, match="does not answer"):
        patient.insert(items, np.ones(10), 15.0)
    with pytest.raises(ReverbLostError, match=f"{server.address} has been gone"):
        until_it_is_not_a_timeout(lambda: insert(hasty, 10, timeout_s=1.0))
    assert main([server.address]) == 1
    assert f"no Reverb server answered at {server.address} within 5 s" in capsys.readouterr().err
    for process in others:
        process.resume()
    taken = []
    with ThreadPoolExecutor() as pool:
        rest = pool.submit(patient.insert, items, np.ones(10), 60.0)
        until(lambda: taken.extend(numbers_of(patient.sample(1, S))) or set(range(10)) <= set(taken), "all items")
        rest.result(60)
    assert len(taken) == len(set(taken))
    patient.close()
    hasty.close()

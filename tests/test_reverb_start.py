"""What happens before the first insert into a table on a server: pytest -m external tests/test_reverb_start.py."""

import contextlib
import dataclasses
import re
import signal
import socket
import threading
import time

import numpy as np
import pytest
from processes import Processes, free_port
from reverb_harness import (
    QUEUE,
    REPLAY,
    S,
    insert,
    numbered,
    numbers_of,
    reverb_server,
    table_info,
)

from seedx.checks import ConfigError
from seedx.config import Config, TableConfig
from seedx.replay import reverb_client
from seedx.replay.build import make_replay
from seedx.replay.description import TABLE, table_description
from seedx.replay.replay import ReplayTimeoutError
from seedx.replay.reverb_client import ReverbClient, ReverbLostError
from seedx.replay.reverb_codec import ReverbDataError
from seedx.replay.reverb_replay import ReverbReplay

OTHER = numbered(0, rows=5)  # one row axis longer
TWICE = TableConfig(sampler="uniform", max_size=1000, max_times_sampled=2)


@contextlib.contextmanager
def connected(address, **kwargs):
    replay = ReverbReplay(f"reverb://{address}", "replay", **{"prefetch": False, **kwargs})
    try:
        yield replay
    finally:
        replay.close()


@pytest.mark.external
@pytest.mark.parametrize("config", [QUEUE, REPLAY, TWICE], ids=["queue", "replay", "twice"])
def test_a_table_of_other_items_is_refused_before_an_insert_and_keeps_all_of_its_own(config):
    with reverb_server(table_description(config, 1, "replay")) as address, connected(address) as owner:
        insert(owner, *range(5))
        for _ in range(3):
            words = rf"\['frame'\].* table at {address} holds .* nothing was added"
            with pytest.raises(ReverbDataError, match=words) as caught:
                ReverbReplay(f"reverb://{address}", "replay", example=OTHER)
            assert "--checkpoint-dir" in str(caught.value)
            assert "missing" not in str(caught.value)
            assert table_info(address).current_size == 5
        # Of those that may be sampled twice, up to three samples are gone, and no more.
        samples = {1: 5, 2: 7, 0: 100}[config.max_times_sampled]
        taken = numbers_of(owner.sample(samples, S))
        if config is TWICE:
            assert max(map(taken.count, taken)) <= 2
        else:
            assert sorted(set(taken)) == list(range(5))


@pytest.mark.external
@pytest.mark.parametrize("config", [QUEUE, TWICE], ids=["queue", "twice"])
def test_the_item_that_was_looked_at_is_in_the_first_sample(config):
    with reverb_server(table_description(config, 1, "replay")) as address, connected(address) as owner:
        insert(owner, *range(10))
        with connected(address, example=OTHER._replace(timestep={"frame": np.zeros((1, 3, 4), np.int64)})) as replay:
            samples = 10 * config.max_times_sampled
            taken = numbers_of(replay.sample(samples, S))
            assert sorted(taken) == sorted([*range(10)] * config.max_times_sampled)
            assert config is TWICE or taken == list(range(10))
            with pytest.raises(ReplayTimeoutError):
                replay.sample(1, 0.5)


@pytest.mark.external
def test_a_table_that_lets_nothing_out_yet_is_taken_as_it_is():
    table = table_description(dataclasses.replace(REPLAY, min_size=9), 1, "replay")
    with reverb_server(table) as address, connected(address) as owner:
        insert(owner, *range(3))
        with connected(address, example=numbered(0)) as replay:
            assert table_info(address).current_size == 3
            insert(replay, *range(3, 12))
            assert set(numbers_of(replay.sample(16, S))) <= set(range(12))
            assert table_info(address).rate_limiter_info.sample_stats.completed == 16  # none was left asked for


@pytest.mark.external
def test_a_table_that_lets_nothing_out_until_there_are_more_items_loses_those_that_do_not_belong_there():
    table = table_description(dataclasses.replace(REPLAY, min_size=9), 1, "replay")
    with reverb_server(table) as address, connected(address) as owner:
        keys = insert(owner, *range(6))
        with connected(address, example=OTHER) as replay:
            replay.insert(numbered(*range(5), rows=5), np.ones(5), S)
            assert table_info(address).current_size == 11
            with pytest.raises(ReverbDataError, match=r"What this run had added was deleted\."):
                replay.sample(200, S)
            assert table_info(address).current_size == 6
            with pytest.raises(ReplayTimeoutError, match="nothing more is inserted"):
                replay.insert(numbered(9, rows=5), np.ones(1), S)
        insert(owner, *range(6, 9))
        assert set(keys.tolist()) < set(owner.sample(200, S).keys.tolist())


@pytest.mark.external
def test_what_is_added_after_an_item_was_seen_stays():
    table = table_description(dataclasses.replace(REPLAY, min_size=9), 1, "replay")
    with reverb_server(table) as address, connected(address) as owner:
        insert(owner, *range(6))
        with connected(address, example=numbered(0)) as replay:
            insert(replay, *range(6, 9))
            replay.sample(100, S)
            with connected(address) as other:
                other.insert(numbered(*range(9), rows=5), np.full(9, 1e6), S)
            with pytest.raises(ReverbDataError) as caught:
                replay.sample(100, S)
            assert "deleted" not in str(caught.value)
        assert table_info(address).current_size == 18


@pytest.mark.external
def test_every_server_is_looked_at():
    table = table_description(QUEUE, 1, "replay")
    with reverb_server(table) as first, reverb_server(table) as second:
        with connected(first) as owner:
            insert(owner, 1, 2)
        with connected(second) as other:
            other.insert(OTHER, np.ones(1), S)
        with pytest.raises(ReverbDataError, match=f"table at {second} holds"):
            ReverbReplay(f"reverb://{first},{second}", "replay", example=numbered(0))
        assert [table_info(address).current_size for address in (first, second)] == [2, 1]
        with pytest.raises(ValueError, match=f"{first} and 127.0.0.1:\\d+ are the same Reverb server"):
            ReverbReplay(f"reverb://{first},{first.replace('localhost', '127.0.0.1')}", "replay")


@pytest.mark.external
def test_a_run_says_with_how_many_items_it_begins(capsys):
    config = Config(table=REPLAY)
    with reverb_server(table_description(REPLAY, config.learner.batch_size, TABLE)) as address:
        for resume, said in [(False, ""), (False, "1,000 items that others inserted"), (True, "from before it was")]:
            replay = make_replay(Config(table=REPLAY, replay=f"reverb://{address}"), numbered(0), resume)
            out = capsys.readouterr().out
            assert (f"table '{TABLE}' at {address}: this run begins with" in out) is bool(said)
            assert said in out
            insert(replay, *range(1000))
            replay.close()


@contextlib.contextmanager
def silent_server():
    """An address that takes connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        accepted = []

        def accept():
            with contextlib.suppress(OSError):
                while True:
                    accepted.append(listener.accept()[0])

        threading.Thread(target=accept, daemon=True).start()
        try:
            yield f"127.0.0.1:{listener.getsockname()[1]}"
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            for connection in accepted:
                connection.close()


def test_an_absence_is_told_with_the_time_that_is_left():
    with silent_server() as address:
        client = ReverbClient(address, give_up_s=60.0)
        assert client.ask_server_info(0.1) is None
        assert "the server does not answer, since" in client.describe_absence()
        assert client.give_up_in_s <= 59.9
        client.close()


def test_a_server_that_never_answers_is_given_up_in_time_and_counts_for_all_calls(monkeypatch):
    monkeypatch.setattr(reverb_client, "_CALL_S", 3600.0)  # longer than any test
    monkeypatch.setattr(reverb_client, "_LEAST_S", 0.1)
    with silent_server() as address:
        client = ReverbClient(address, give_up_s=0.3)
        for call in (client.server_info, lambda: client.mutate_priorities("replay", {1: 1.0}, []), client.checkpoint):
            with pytest.raises(ReverbLostError, match=f"{address} has been gone for"):
                call()
        with pytest.raises(ReverbLostError, match=f"{address} has been gone for"):
            client.describe_absence()
        client.close()


def test_a_server_that_was_heard_is_not_gone(capsys):
    with silent_server() as address:
        client = ReverbClient(address, give_up_s=60.0)
        client.ask_server_info(0.2)
        assert client.gone_s > 0.1
        client.heard()
        assert client.gone_s == 0.0
        assert not capsys.readouterr().out
        client.ask_server_info(0.2)
        client.describe_absence()
        for _ in range(2):
            client.heard()
        assert re.fullmatch(rf"Reverb at {address} answers again after \d+ s\.\n", capsys.readouterr().out)
        asked = time.monotonic()
        client.ask_server_info(0.2)
        assert client.gone_s <= time.monotonic() - asked
        client.close()


def test_seconds_bound_the_wait_for_a_server(capsys):
    port = free_port()
    config = Config(replay=f"reverb://localhost:{port}")
    started = time.monotonic()
    with pytest.raises(ConfigError, match=f"localhost:{port} has been gone for"):
        make_replay(config, numbered(0), seconds_left=1.0)
    assert time.monotonic() - started < config.table.give_up_s / 4
    assert "for 1 s at most (then --seconds are over)" in capsys.readouterr().out


@pytest.mark.parametrize("ends", [pytest.param("--seconds", marks=pytest.mark.slow), "Ctrl-C"])
def test_a_run_that_waits_for_a_server_can_be_ended(tmp_path, ends):
    where = ("--replay", f"reverb://localhost:{free_port()}")
    with Processes(tmp_path) as processes:
        run = processes.local(tmp_path / "run", *where, *(["--seconds", "1"] if ends == "--seconds" else []))
        run.until(lambda: "waiting for Reverb at localhost" in run.out or run.popen.poll() is not None, "the wait")
        if ends == "Ctrl-C":
            run.interrupt(signal.SIGINT)
        assert run.wait() == (130 if ends == "Ctrl-C" else 2), run.said
        assert ("has been gone for" in run.err) == (ends == "--seconds")
        processes.wait_until_gone()

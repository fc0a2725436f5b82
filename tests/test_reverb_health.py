"""The health check against real servers: pytest -m external tests/test_reverb_health.py."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from processes import free_port
from reverb_harness import QUEUE, REPLAY, S, insert, reverb_server, table_info

from seedx.replay import reverb_pb2 as pb
from seedx.replay.description import table_description
from seedx.replay.reverb_client import ReverbClient
from seedx.replay.reverb_codec import make_chunk
from seedx.replay.reverb_health import dead_tables, main
from seedx.replay.reverb_replay import ReverbReplay

pytestmark = pytest.mark.external
TABLES = (table_description(QUEUE, 1, "replay"), table_description(REPLAY, 1, "other"))


def test_it_prints_the_tables_or_the_reason(capsys):
    with reverb_server(*TABLES) as address:
        assert main([address]) == 0
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines()] == ["'other'", "'replay'"]
    assert main([f"reverb://localhost:{free_port()}"]) == 1
    assert "no Reverb server answered at localhost:" in capsys.readouterr().err
    assert main(["nosuchhost.invalid:8000"]) == 1
    assert "nosuchhost.invalid:8000 has a host that cannot be found: " in capsys.readouterr().err
    assert main(["localhost"]) == 2
    assert "'localhost' has no port; usage: python -m seedx.replay.reverb_health HOST:PORT" in capsys.readouterr().err


def kill_thread(client, table):
    """What a client that checks no priorities does to a table."""
    chunk = make_chunk(11, 9, 0, [np.arange(3)])
    item = pb.PrioritizedItem(key=5, table=table, priority=-1.0)
    item.flat_trajectory.columns.add().chunk_slices.add(chunk_key=11, offset=0, length=3)
    sent = threading.Event()

    def requests():
        yield b"".join([*chunk.pieces, pb.InsertStreamRequest(items=[item]).SerializeToString()])
        sent.wait(1.0)

    assert not [response.keys for response in client.insert_stream(requests(), timeout=S)]


def test_a_table_whose_thread_is_dead_is_found_and_nothing_is_inserted_or_sampled(capsys):
    with reverb_server(*TABLES) as address:
        client = ReverbClient(address, S)
        kill_thread(client, "other")
        before = table_info(address, "replay").rate_limiter_info
        assert main([address]) == 1
        assert table_info(address, "replay").rate_limiter_info == before
        client.close()
    said = capsys.readouterr().err
    assert f"table 'other' at {address} is dead" in said
    assert "'replay'" not in said


def test_a_table_at_work_is_alive():
    with reverb_server(table_description(REPLAY, 1, "replay")) as address:
        replay = ReverbReplay(f"reverb://{address}", "replay")
        stop = threading.Event()

        def work():
            while not stop.is_set():
                insert(replay, *range(100))
                replay.sample(500, S)

        client = ReverbClient(address, S)
        with ThreadPoolExecutor() as pool:
            working = pool.submit(work)
            try:
                for _ in range(3):
                    assert dead_tables(client, client.server_info()) == []
                    time.sleep(0.1)
            finally:
                stop.set()
            working.result(60)
        client.close()
        replay.close()

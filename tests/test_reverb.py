"""Reverb's protocol against its own server and client: pytest -m external tests/test_reverb.py."""

import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import grpc
import jax
import numpy as np
import pytest
from bits import assert_bit_equal
from processes import until
from reverb_harness import (
    HERE,
    QUEUE,
    REPLAY,
    S,
    find_uv,
    insert,
    numbered,
    numbers_of,
    reverb_server,
    reverb_table,
    table_info,
)

from seedx.config import TableConfig
from seedx.replay import reverb_pb2 as pb
from seedx.replay import reverb_sampler
from seedx.replay.description import table_description
from seedx.replay.items import Ragged
from seedx.replay.replay import ReplayTimeoutError
from seedx.replay.reverb_client import ReverbClient, compare_table
from seedx.replay.reverb_codec import ReverbDataError, make_chunk
from seedx.replay.reverb_decoder import complete_samples, decode
from seedx.replay.reverb_layout import layout_of
from seedx.replay.reverb_replay import ReverbReplay
from seedx.types import Unroll

pytestmark = pytest.mark.external

DTYPES = ("uint8", "int32", "int64", "uint32", "uint64", "float32", "float64", "float16", "bool", "int8")


# ---- the wire


class Stream:
    """An insert stream used by hand."""

    def __init__(self, client):
        self.requests = []
        self.more = threading.Condition()
        self.call = client.insert_stream(self._requests(), timeout=S)

    def _requests(self):
        while True:
            with self.more:
                self.more.wait_for(lambda: self.requests, S)
                request = self.requests.pop(0)
            if request is None:
                return
            yield request

    def send(self, request):
        with self.more:
            self.requests.append(request)
            self.more.notify_all()

    def acknowledged(self):
        return list(next(self.call).keys)


def request_of(*chunks, item=None, keep=()):
    message = pb.InsertStreamRequest(keep_chunk_keys=keep, items=[] if item is None else [item])
    return b"".join([*(piece for chunk in chunks for piece in chunk.pieces), message.SerializeToString()])


def item_of(key, priority, *columns, table="replay"):
    item = pb.PrioritizedItem(key=key, table=table, priority=priority)
    for chunk, offset, length, squeeze in columns:
        column = item.flat_trajectory.columns.add(squeeze=squeeze)
        column.chunk_slices.add(chunk_key=chunk.key, offset=offset, length=length)
    return item


def sample_raw(client, count, timeout_ms=2000):
    request = pb.SampleStreamRequest(table="replay", num_samples=count)
    request.rate_limiter_timeout.milliseconds = timeout_ms
    more = threading.Event()

    def requests():
        yield request.SerializeToString()
        more.wait(S)

    samples = complete_samples(client.sample_stream(requests(), timeout=S))
    try:
        return [next(samples) for _ in range(count)]
    finally:
        more.set()


@pytest.fixture
def client():
    with reverb_server(table_description(REPLAY, 1, "replay")) as address:
        client = ReverbClient(address, S)
        yield client
        client.close()


def test_the_sequence_by_which_the_protocol_was_learned(client):
    assert [table.name for table in client.server_info().table_info] == ["replay"]
    observation, action = np.arange(6, dtype=np.float32).reshape(3, 2), np.array([5, 6, 7])
    first, second = make_chunk(11, 9, 0, [observation]), make_chunk(12, 9, 0, [action])
    stream = Stream(client)
    stream.send(request_of(first, second))
    stream.send(request_of(item=item_of(21, 2.5, (first, 0, 3, False), (second, 0, 3, False)), keep=[12]))
    assert stream.acknowledged() == [21]
    stream.send(request_of(item=item_of(22, 1.0, (second, 1, 2, False), (second, 2, 1, True))))
    assert stream.acknowledged() == [22]
    stream.send(request_of(item=item_of(23, 1.0, (second, 0, 3, False))))  # was not kept
    with pytest.raises(grpc.RpcError) as caught:
        stream.acknowledged()
    assert caught.value.code() == grpc.StatusCode.INTERNAL

    layouts = {21: layout_of(Unroll([observation[None], action[None]], None, None, None, None))}
    layouts[22] = layout_of(Unroll([action[None, 1:]], None, None, None, [action[None, 2]]))
    probabilities = np.array([2.5, 1.0]) ** 0.6 / (2.5**0.6 + 1)
    samples = sample_raw(client, 40)
    assert {sample.info.item.key for sample in samples} == {21, 22}
    for sample in samples:
        leaves = jax.tree.leaves(decode([sample], layouts[sample.info.item.key], "replay"))
        expected = {21: [observation, action], 22: [action[1:], action[2]]}[sample.info.item.key]
        for leaf, array in zip(leaves, expected, strict=True):
            np.testing.assert_array_equal(leaf[0], array)
        assert sample.info.probability == pytest.approx(probabilities[sample.info.item.key - 21], rel=1e-9)

    client.mutate_priorities("replay", {21: 9.0, 123: 4.0}, [22])
    (sample,) = sample_raw(client, 1)
    assert (sample.info.item.key, sample.info.item.priority, sample.info.probability) == (21, 9.0, 1.0)
    assert sample.info.table_size == 1


def test_our_own_errors_are_not_taken_for_a_lost_server(client):
    for bad, code in [
        (item_of(1, 1.0, table="other"), grpc.StatusCode.NOT_FOUND),
        (item_of(1, 1.0), grpc.StatusCode.INVALID_ARGUMENT),
    ]:
        stream = Stream(client)
        stream.send(request_of(item=bad))
        with pytest.raises(grpc.RpcError) as caught:
            stream.acknowledged()
        assert caught.value.code() == code
    with pytest.raises(ValueError, match="has no table 'other'; it has replay"):
        ReverbReplay(f"reverb://{client.address}", "other")


RATIO = TableConfig("uniform", "lifo", max_size=99, max_times_sampled=7, samples_per_insert=2.0, error_buffer=9.0)


@pytest.mark.parametrize("config", [QUEUE, REPLAY, RATIO], ids=["queue", "replay", "ratio"])
def test_a_server_says_how_its_table_differs(config):
    wanted = table_description(config, 4, "replay")
    with reverb_server(wanted) as address:
        table = table_info(address)
    assert compare_table(table, wanted) == []
    other = {
        "sampler": "heap",
        "remover": "prioritized",
        "max_size": 5,
        "max_times_sampled": 3,
        "samples_per_insert": 0.5,
        "min_size": 9,
        "min_diff": -3.5,
        "max_diff": 70.5,
    }
    for name, value in other.items():
        (words,) = [words for words in compare_table(table, {**wanted, name: value}) if words.startswith(name)]
        assert words.endswith(f"instead of {value}")
    exponents = compare_table(table, {**wanted, "priority_exponent": 0.1})
    assert exponents == (["priority_exponent 0.6 instead of 0.1"] if config is REPLAY else [])


# ---- both ways with Reverb's own client


def official(mode, address, table, file):
    command = [
        find_uv(),
        "run",
        "--quiet",
        "--script",
        str(HERE / "reverb_official.py"),
        mode,
        address,
        table,
        str(file),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def arrays_of_every_dtype(names):
    rng = np.random.default_rng(5)

    def array(name, *shape):
        raw = rng.integers(0, 2 if name == "bool" else 256, (*shape, np.dtype(name).itemsize), np.uint8)
        return raw.view(name)[..., 0]

    rows = {f"a_{name}": array(name, 3, 7, 4, 2) for name in names}
    return rows, {f"state_{name}": array(name, 3, 5) for name in names}


def test_reverbs_client_reads_ours(tmp_path):
    rows, state = arrays_of_every_dtype(DTYPES)
    items = Unroll(rows, None, None, None, state)
    with reverb_server(table_description(QUEUE, 1, "replay")) as address:
        replay = ReverbReplay(f"reverb://{address}", "replay")
        replay.insert(items, np.ones(3), S)
        replay.close()
        official("read", address, "replay", tmp_path / "read.npz")
    with np.load(tmp_path / "read.npz") as found:
        for leaf, expected in zip(found.values(), jax.tree.leaves(items), strict=True):
            assert_bit_equal(leaf, expected)


def test_reverbs_client_reads_chunks_that_items_share(tmp_path):
    frames = np.random.default_rng(1).integers(0, 256, (30, 8), np.uint8)
    with reverb_server(table_description(QUEUE, 1, "replay")) as address:
        replay = ReverbReplay(f"reverb://{address}", "replay", overlap=5)
        windows = np.stack([frames[3 * n : 3 * n + 8] for n in range(7)])
        for window in windows:
            replay.insert(Unroll(window[None], None, None, None, None), np.ones(1), S, np.array([4]))
        replay.close()
        official("read", address, "replay", tmp_path / "read.npz")
    with np.load(tmp_path / "read.npz") as found:
        assert_bit_equal(found["column00"], windows)


@pytest.mark.parametrize("mode", ["write", "legacy"])
def test_we_read_what_reverbs_client_wrote(tmp_path, mode):
    rows, state = arrays_of_every_dtype(DTYPES)
    np.savez(tmp_path / "written.npz", **rows, **(state if mode == "write" else {}))
    items = Unroll(rows, None, None, None, state if mode == "write" else None)
    with reverb_server(table_description(QUEUE, 1, "replay")) as address:
        official(mode, address, "replay", tmp_path / "written.npz")
        replay = ReverbReplay(f"reverb://{address}", "replay", example=jax.tree.map(lambda leaf: leaf[:1], items))
        sample = replay.sample(3, S)
        replay.close()
    assert_bit_equal(sample.items, items)


def ragged_items():
    """Items of 3, 1 and 7 rows, of every dtype."""
    rows, state = arrays_of_every_dtype(DTYPES)
    lengths = np.array([3, 1, 7])
    joined = {name: np.concatenate([leaf[n, :count] for n, count in enumerate(lengths)]) for name, leaf in rows.items()}
    return Ragged(joined, lengths, state), {**rows, **state, "lengths": lengths}


def test_reverbs_client_reads_our_ragged_items(tmp_path):
    items, _ = ragged_items()
    with reverb_server(table_description(QUEUE, 1, "replay")) as address:
        replay = ReverbReplay(f"reverb://{address}", "replay", overlap=1)
        replay.insert(items, np.ones(3), S, np.array([1, 1, 2]))
        replay.close()
        official("read", address, "replay", tmp_path / "read.npz")
    with np.load(tmp_path / "read.npz") as found:
        expected = [*jax.tree.leaves(items._replace(lengths=None)), items.lengths]
        for leaf, other in zip(found.values(), expected, strict=True):
            assert_bit_equal(leaf, other)


def test_we_read_ragged_items_that_reverbs_client_wrote(tmp_path):
    items, arrays = ragged_items()
    np.savez(tmp_path / "written.npz", **arrays)
    example = Ragged(*jax.tree.map(lambda leaf: leaf[:1], (items.rows, np.array([1]), items.state)))
    with reverb_server(table_description(QUEUE, 1, "replay")) as address:
        official("write", address, "replay", tmp_path / "written.npz")
        replay = ReverbReplay(f"reverb://{address}", "replay", example=example)
        sample = replay.sample(3, S)
        replay.close()
    assert_bit_equal(sample.items, items)


# ---- inserts


def test_an_insert_that_timed_out_goes_on_with_the_same_arrays_and_adds_nothing_twice():
    with reverb_table(TableConfig(max_size=4)) as replay:
        items, priorities = numbered(*range(40)), np.ones(40)
        with pytest.raises(ReplayTimeoutError, match=r"40 items were not all .*'replay' holds 4 of 4 items"):
            replay.insert(items, priorities, 3.0)
        taken = []
        for _ in range(3):
            taken += numbers_of(replay.sample(4, S))
            with pytest.raises(ReplayTimeoutError):
                replay.insert(items, priorities, 0.2)
        with ThreadPoolExecutor() as pool:
            rest = pool.submit(lambda: numbers_of(replay.sample(28, S)))
            keys = replay.insert(items, priorities, S)
            taken += rest.result(S)
        assert taken == list(range(40))
        assert len(set(keys.tolist())) == 40
        with pytest.raises(ReplayTimeoutError):
            replay.sample(1, 0.2)


def test_many_threads_lose_nothing_and_see_nothing_twice():
    with reverb_table(TableConfig(max_size=50), prefetch=True) as replay, ThreadPoolExecutor(6) as pool:
        writers = [
            pool.submit(lambda w=w: [insert(replay, *range(n, n + 10)) for n in range(w * 1000, w * 1000 + 300, 10)])
            for w in range(4)
        ]
        readers = [pool.submit(lambda: [numbers_of(replay.sample(20, S)) for _ in range(30)]) for _ in range(2)]
        taken = sorted(n for reader in readers for batch in reader.result(60) for n in batch)
        assert all(len(writer.result(60)) == 30 for writer in writers)
        assert taken == [n for w in range(4) for n in range(w * 1000, w * 1000 + 300)]
        assert replay.info()["replay/duplicates"] == 0


def test_rows_in_common_are_stored_once():
    frames = np.random.default_rng(1).integers(0, 256, (4, 200, 1000), np.uint8)
    with reverb_table(QUEUE, overlap=40) as replay:
        for n in range(6):
            windows = frames[:, 20 * n : 20 * n + 60]
            replay.insert(Unroll(windows, None, None, None, None), np.ones(4), S, np.arange(4))
        client = ReverbClient(replay._clients[0].address, S)
        samples = sample_raw(client, 24)
        client.close()
    chunks = {key: chunk.data_uncompressed_size for sample in samples for key, chunk in sample.chunks.items()}
    assert sum(chunks.values()) == 4 * 160 * 1000
    leaves = [decode([s], layout_of(Unroll(windows, None, None, None, None)), "").timestep[0] for s in samples]
    for i, leaf in enumerate(leaves):
        np.testing.assert_array_equal(leaf, frames[i % 4, 20 * (i // 4) : 20 * (i // 4) + 60])


@pytest.mark.parametrize(("max_sources", "rows_sent"), [(1500, 10), (1499, 14)])
def test_many_sources_share_rows_if_all_of_them_are_remembered(max_sources, rows_sent):
    frames = np.random.default_rng(1).integers(0, 256, (10, 50), np.uint8)
    with reverb_table(TableConfig(max_size=4000), overlap=4, max_sources=max_sources) as replay:
        for start in (0, 3):
            windows = frames[None, start : start + 7].repeat(1500, 0)
            replay.insert(Unroll(windows, None, None, None, None), np.ones(1500), S, np.arange(1500))
        client = ReverbClient(replay._clients[0].address, S)
        samples = sample_raw(client, 3000)
        client.close()
    chunks = {key: chunk.data_uncompressed_size for sample in samples for key, chunk in sample.chunks.items()}
    assert sum(chunks.values()) == 1500 * rows_sent * 50


def test_other_items_are_refused():
    with reverb_table(QUEUE) as replay:
        insert(replay, 1)
        with pytest.raises(ValueError, match=r"\['frame'\] of the new items is int64\[5, 4\], but the table's"):
            replay.insert(numbered(2, rows=5), np.ones(1), S)
        other = ReverbReplay(f"reverb://{replay._clients[0].address}", "replay")
        other.insert(numbered(2, rows=5), np.ones(1), S)
        other.close()
        with pytest.raises(ReverbDataError, match=r"item \d+ of table 'replay': column .*'frame'.* \[5\] rows"):
            replay.sample(2, S)


def test_sampling_before_inserting_needs_an_example():
    with reverb_table(QUEUE) as replay:
        insert(replay, 1)
        other = ReverbReplay(f"reverb://{replay._clients[0].address}", "replay")
        with pytest.raises(ValueError, match="give an `example`"):
            other.sample(1, S)
        other.close()


# ---- samples


def test_no_more_is_fetched_ahead_than_a_batch():
    with reverb_table(QUEUE, prefetch=True) as replay:
        insert(replay, *range(100))
        assert numbers_of(replay.sample(8, S)) == list(range(8))
        until(lambda: replay.info()["replay/sampled"] == 16, "what is fetched ahead")
        time.sleep(0.5)
        assert replay.info()["replay/sampled"] == 16
        assert numbers_of(replay.sample(8, S)) == list(range(8, 16))


def test_closing_waits_for_its_request_which_would_take_the_next_item():
    with reverb_server(table_description(QUEUE, 1, "replay")) as address:
        first = ReverbReplay(f"reverb://{address}", "replay")
        insert(first, 0)
        assert numbers_of(first.sample(1, S)) == [0]
        first.close()
        second = ReverbReplay(f"reverb://{address}", "replay")
        insert(second, 1)
        assert numbers_of(second.sample(1, S)) == [1]
        second.close()


def test_several_servers_are_one_replay():
    table = table_description(TableConfig(sampler="uniform", max_size=1000, max_times_sampled=0), 1, "replay")
    with reverb_server(table) as first, reverb_server(table) as second:
        replay = ReverbReplay(f"reverb://{first},{second}", "replay", prefetch=False)
        keys = insert(replay, *range(40))
        assert [table_info(address).current_size for address in (first, second)] == [20, 20]
        sampled = np.concatenate([replay.sample(100, S).keys for _ in range(10)])
        assert set(sampled.tolist()) == set(keys.tolist())
        counts = [table_info(address).rate_limiter_info.sample_stats.completed for address in (first, second)]
        assert counts == [500, 500]
        replay.delete(keys[:30])
        assert replay.info()["replay/items"] == 10
        replay.reset()
        assert replay.info()["replay/items"] == 0
        replay.close()


def test_probabilities_are_those_of_the_items_of_all_servers_together():
    table = table_description(TableConfig(sampler="uniform", max_size=1000, max_times_sampled=0), 1, "replay")
    with reverb_server(table) as first, reverb_server(table) as second:
        replay = ReverbReplay(f"reverb://{first},{second}", "replay", prefetch=False)
        insert(replay, *range(40), sources=np.arange(40) % 4 // 3)  # 30 and 10
        sample = replay.sample(2000, S)  # so that each item is among them, but for once in 10**12
        replay.close()
    probabilities = dict(zip(numbers_of(sample), sample.probabilities.tolist(), strict=True))
    assert probabilities == pytest.approx({n: 1 / 20 if n % 4 == 3 else 1 / 60 for n in range(40)})
    assert sample.table_size.tolist() == [40] * 2000


def test_one_servers_samples_do_until_the_other_has_some():
    table = table_description(QUEUE, 1, "replay")
    with reverb_server(table) as first, reverb_server(table) as second:
        one = ReverbReplay(f"reverb://{second}", "replay")
        insert(one, *range(16))
        both = ReverbReplay(f"reverb://{first},{second}", "replay", example=numbered(0))
        assert sorted(numbers_of(both.sample(16, S))) == list(range(16))
        both.close()
        one.close()


def test_a_server_that_has_none_holds_up_no_batch_but_the_first(monkeypatch):
    monkeypatch.setattr(reverb_sampler, "_LIMITER_S", 8.0)
    table = table_description(REPLAY, 1, "replay")
    with reverb_server(table) as first, reverb_server(table) as second:
        replay = ReverbReplay(f"reverb://{first},{second}", "replay")
        insert(replay, *range(16), sources=np.zeros(16, np.int64))  # all in the first
        replay.sample(16, S)
        for _ in range(8):
            assert set(numbers_of(replay.sample(16, 6.0))) <= set(range(16))
        insert(replay, *range(16, 32), sources=np.ones(16, np.int64))
        until(lambda: max(numbers_of(replay.sample(16, S))) >= 16, "samples of the second")
        replay.close()

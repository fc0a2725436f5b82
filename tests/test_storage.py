"""Rows that items share are stored once, ragged items without padding: the table against a model of whole items."""

from collections import OrderedDict

import jax
import numpy as np
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_table import REMOVERS, config, held, make

from seedx.checks import ConfigError
from seedx.replay import pool
from seedx.replay.items import Ragged
from seedx.replay.rate_limiter import limits_for
from seedx.replay.replay import ReplayTimeoutError
from seedx.replay.table import Table
from seedx.types import TimeStep, Unroll

LENGTH = 5
ROW_BYTES = 1 + 4 + 4 + 3 + 8 + 4
STATE_BYTES = 8
NONE = 2**64 - 1  # the key of an item that did not stay


def of_rows(serial):
    """Leaves that carry the serial numbers of rows, any shape."""
    timestep = TimeStep(
        (serial % 251).astype(np.uint8),
        serial.astype(np.float32),
        -serial.astype(np.float32),
        {"x": np.stack([serial % 7, serial % 11, serial % 13], axis=-1).astype(np.uint8)},
    )
    return timestep, serial.astype(np.int64), serial.astype(np.int32)


def unrolls_of(serials):
    """Unrolls `[N, L]` of rows with these serial numbers, time-major in memory."""
    turned = np.moveaxis(np.ascontiguousarray(np.moveaxis(serials, 1, 0)), 1, 0)
    timestep, action, version = of_rows(turned)
    return Unroll(timestep, action, (), version, state={"first": serials[:, 0].astype(np.float64)})


def ragged_of(serials):
    """Ragged items, one for each list of serial numbers."""
    lengths = np.array([len(some) for some in serials], np.int64)
    flat = np.concatenate([np.asarray(some, np.int64) for some in serials])
    return Ragged(of_rows(flat), lengths, {"first": np.array([some[0] for some in serials], np.float64)})


def serials_of(items):
    """The serial numbers of the rows of each item, whose leaves must all be theirs."""
    if isinstance(items, Ragged):
        found = np.split(items.rows[1], np.cumsum(items.lengths)[:-1])
        assert_same(items, ragged_of(found))
    else:
        found = items.action
        assert_same(items, unrolls_of(found))
    return [some.tolist() for some in found]


def assert_same(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        np.testing.assert_array_equal(one, other)


class Streams:
    """Sources of unrolls that overlap; each row has a serial number of its own."""

    def __init__(self, overlap, length=LENGTH):
        self.stride, self.length, self.steps = length - overlap, length, {}

    def next(self, *sources):
        """The next unrolls of some sources, in this order: serial numbers `[N, L]`."""
        rows = []
        for source in sources:
            first = source * 100_000 + self.steps.get(source, 0) * self.stride
            self.steps[source] = self.steps.get(source, 0) + 1
            rows.append(np.arange(first, first + self.length))
        return np.array(rows)

    def insert(self, table, *sources, timeout_s=0.0):
        return table.insert(unrolls_of(self.next(*sources)), np.ones(len(sources)), timeout_s, np.array(sources))


def rows_for(count, max_size, ragged=False):
    """`max_bytes` of a table that has memory for so many rows."""
    needs = make(max_size=max_size).needs(ragged_of([[0]]) if ragged else unrolls_of(np.zeros((1, LENGTH), np.int64)))
    assert needs.row_bytes == ROW_BYTES + pool.BOOKS_BYTES
    return needs.base_bytes + count * needs.row_bytes


def table_of(overlap, max_sources=100, max_rows=10_000, ragged=False, **changes):
    changes = {"max_size": 100, **changes}
    settings_ = config(**changes, max_bytes=rows_for(max_rows, changes["max_size"], ragged))
    return Table(settings_, limits_for(settings_, 1), 0, overlap, max_sources)


# ---- sharing


@pytest.mark.parametrize("stride", [1, 2, 4, 5])
def test_rows_that_unrolls_share_are_there_once(stride):
    overlap, sources = LENGTH - stride, 3
    table, streams = table_of(overlap), Streams(overlap)
    for _ in range(20):
        streams.insert(table, *range(sources))
    rows = 20 * sources * stride + sources * overlap
    assert table._storage.num_rows == rows
    assert table.info()["replay/bytes"] == rows * ROW_BYTES + 60 * STATE_BYTES
    found = serials_of(table.sample(300, 0.0).items)
    assert len({some[0] for some in found}) > 50
    for _ in range(50):  # full, with its oldest items gone
        streams.insert(table, *range(sources))
    assert table.info()["replay/items"] == 100
    assert table._storage.num_rows == pytest.approx(100 * stride + sources * overlap, abs=LENGTH)


def test_a_source_that_was_forgotten_begins_anew():
    table, streams = table_of(4, max_sources=2), Streams(4)
    for source in (0, 1, 2, 2, 1):  # 0 is forgotten, but not 1
        streams.insert(table, source)
    assert table._storage.num_rows == 3 * LENGTH + 2
    streams.insert(table, 0)
    assert table._storage.num_rows == 4 * LENGTH + 2
    table.delete(np.array(list(held(table)), np.uint64))
    assert table._storage.num_rows == 2 * 4  # the last rows of two sources
    table.reset()
    assert table._storage.num_rows == table.info()["replay/bytes"] == 0
    streams.insert(table, 0)
    assert table._storage.num_rows == LENGTH


def test_an_insert_that_timed_out_changes_nothing_and_goes_on_where_it_was():
    settings_ = config(samples_per_insert=1.0, error_buffer=4.0, max_bytes=2**20)
    table, streams = Table(settings_, limits_for(settings_, 1), 0, overlap=3, max_sources=9), Streams(3)
    while True:
        serials = streams.next(7)
        call = (unrolls_of(serials), np.ones(1), 0.0, np.array([7]))
        before = table._storage.num_rows if table._storage else 0
        try:
            table.insert(*call)
        except ReplayTimeoutError:
            break
    assert table._storage.num_rows == before
    table.sample(4, 0.0)
    table.insert(*call)
    assert table._storage.num_rows == before + 2
    assert serials_of(all_items(table)[1])[-1] == serials[0].tolist()


# ---- any sequence of operations


class Model:
    """Whole items, and the rows that they have in common: key -> ids of rows, serial numbers."""

    def __init__(self, overlap, max_sources, max_rows):
        self.overlap, self.max_sources, self.max_rows = overlap, max_sources, max_rows
        self.items, self.tails, self.count = {}, OrderedDict(), 0

    def rows(self):
        ids = [row for ids, _ in self.items.values() for row in ids]
        return set(ids).union(*self.tails.values())

    def add(self, keys, serials, sources):
        for key, rows, source in zip(keys, serials, sources, strict=True):
            tail = self.tails.pop(source, [])
            if key == NONE:
                continue
            ids = [*tail, *range(self.count, self.count + len(rows) - len(tail))]
            self.count += len(rows)
            self.items[key] = ids, list(rows)
            if source is not None and self.overlap:
                self.tails[source] = ids[len(ids) - self.overlap :]

    def needed(self, new, also=None):
        """Rows held while new items come, if another one is there too."""
        after = Model(self.overlap, self.max_sources, self.max_rows)
        after.items, after.tails, after.count = {**self.items, -1: also or ([], [])}, self.tails.copy(), self.count
        before = after.rows()
        after.add(*new)
        return len(before | after.rows())

    def insert(self, keys, serials, sources, keys_held, remover, max_size):
        new = keys, serials, sources
        gone = [key for key in self.items if key not in keys_held]
        oldest, left = list(self.items), [self.items.pop(key) for key in gone]
        assert remover != "fifo" or gone == oldest[: len(gone)]
        assert remover != "lifo" or not gone
        if not self.items and self.needed(new) > self.max_rows:
            self.tails.clear()
        elif remover == "fifo" and gone:  # not one more than had to go
            full = len(self.items) + len(keys) == max_size
            assert full or self.needed(new, left[-1]) > self.max_rows
        self.add(*new)
        while len(self.tails) > self.max_sources:
            self.tails.popitem(last=False)

    def leave(self, keys):
        for key in set(keys) & set(self.items):
            del self.items[key]

    def check(self, table):
        """The table holds these items, bit by bit, and no rows but theirs and those for the next items."""
        assert set(held(table)) == set(self.items)
        if table._storage is None:
            return
        assert table._storage.num_rows == len(self.rows()) <= self.max_rows
        assert table.info()["replay/bytes"] == len(self.rows()) * ROW_BYTES + len(self.items) * STATE_BYTES
        if self.items:
            keys, items = all_items(table)
            assert serials_of(items) == [self.items[key][1] for key in keys]


def all_items(table):
    """Keys of all items, oldest first, and the items."""
    keys = table._roster._slots.in_order()
    return keys.tolist(), table._storage.gather(table._roster.find(keys)[1])


@settings(max_examples=200)
@given(data=st.data(), remover=st.sampled_from(REMOVERS), overlap=st.integers(0, LENGTH - 1), ragged=st.booleans())
def test_any_sequence_of_operations_agrees_with_whole_items(data, remover, overlap, ragged):
    max_size, max_sources = data.draw(st.integers(1, 7)), data.draw(st.integers(1, 4))
    overlap = 0 if ragged else overlap
    least = max_size * (LENGTH - overlap) + max_sources * overlap
    max_rows = max(least, LENGTH) + data.draw(st.integers(0, 12))
    max_times = data.draw(st.sampled_from([0, 3]))
    table = table_of(
        overlap, max_sources, max_rows, ragged, max_size=max_size, remover=remover, max_times_sampled=max_times
    )
    if not ragged:
        max_rows = min(max_rows, max_size * LENGTH + max_sources * overlap)
    model, streams, broken = Model(overlap, max_sources, max_rows), Streams(overlap), 0
    for _ in range(data.draw(st.integers(1, 30))):
        match data.draw(st.sampled_from(["insert", "insert", "insert", "break", "sample", "delete", "reset"])):
            case "insert":
                count = data.draw(st.integers(1, min(max_size, max_rows // LENGTH)))
                sources = data.draw(st.lists(st.integers(0, 5), min_size=count, max_size=count))
                sources = [source + 6 * broken for source in sources]
                serials = streams.next(*sources).tolist()
                known = data.draw(st.sampled_from([True, True, False]))
                if ragged:
                    serials = [some[: data.draw(st.integers(1, LENGTH))] for some in serials]
                items = ragged_of(serials) if ragged else unrolls_of(np.array(serials))
                keys = table.insert(items, np.ones(count), 0.0, np.array(sources) if known else None)
                broken += not known
                names = sources if known and not ragged else [None] * count
                model.insert(keys.tolist(), serials, names, held(table), remover, max_size)
            case "break":
                broken += 1
            case "sample" if model.items and not max_times:
                sample = table.sample(data.draw(st.integers(1, 4)), 0.0)
                assert serials_of(sample.items) == [model.items[key][1] for key in sample.keys.tolist()]
            case "sample" if model.items:  # each item leaves at the third time
                sample = table.sample(1, 0.0)
                assert serials_of(sample.items) == [model.items[int(sample.keys[0])][1]]
                model.leave(sample.keys[sample.times_sampled == 3].tolist())
            case "delete":
                keys = data.draw(st.lists(st.sampled_from([*model.items, 12345]), max_size=3))
                table.delete(np.array(keys, np.uint64))
                model.leave(keys)
            case "reset":
                table.reset()
                model.items.clear()
                model.tails.clear()
        model.check(table)
    table.reset()
    assert table._storage is None or table._storage.num_rows == 0


def test_unrolls_of_a_source_that_come_together_and_do_not_all_stay():
    """Where one in the middle made room as it came, the next one of its source is stored whole."""
    table = table_of(3, max_size=4, remover="uniform")
    model, streams, left_at_once = Model(3, 100, 10_000), Streams(3), 0
    for i in range(300):
        sources = [i // 100, i // 100, 7, i // 100]
        serials = streams.next(*sources)
        keys = table.insert(unrolls_of(serials), np.ones(4), 0.0, np.array(sources))
        model.insert(keys.tolist(), serials.tolist(), sources, held(table), "uniform", 4)
        model.check(table)
        left_at_once += keys[1] not in held(table) and keys[3] in held(table)
    assert left_at_once > 10


# ---- the bound in bytes


def test_a_table_is_refused_only_if_unrolls_that_follow_each_other_do_not_fit(monkeypatch):
    """Of 100 unrolls a row each, and 4 for each of 10 sources."""
    for rows, fits in ((140, True), (139, False)):
        table = table_of(4, max_sources=10, max_rows=rows)
        if fits:
            Streams(4).insert(table, 0)
            assert table._storage.max_rows == rows
        else:
            match = r"100 items of 128 bytes takes ([\d,]+) bytes with 140 rows, more than table\.max_bytes \(.*Lower"
            with pytest.raises(ConfigError, match=match):
                Streams(4).insert(table, 0)


def test_where_rows_run_out_the_remover_makes_room_as_if_the_table_were_smaller(caplog):
    table = table_of(4, max_sources=10, max_rows=140)
    for i in range(60):  # of sources that never come again: 5 rows each, 4 of which are kept for nothing
        Streams(4).insert(table, i)
    keys, items = all_items(table)
    assert [some[0] for some in serials_of(items)] == [100_000 * i for i in range(60 - len(keys), 60)]
    assert len(keys) == 28
    assert table._storage.num_rows == 140
    assert len(caplog.records) == 1
    assert "full before table.max_size: 28 of 100 items are held" in caplog.text
    assert "in 140 of 140 rows" in caplog.text
    lifo = table_of(4, max_sources=10, max_rows=140, remover="lifo")
    for i in range(60):
        Streams(4).insert(lifo, i)
    assert [some[0] for some in serials_of(all_items(lifo)[1])] == [100_000 * i for i in range(len(all_items(lifo)[0]))]


def test_an_insert_that_never_fits_is_refused_in_bytes():
    table = table_of(0, max_rows=12, ragged=True)
    table.insert(ragged_of([[1] * 12]), np.ones(1), 0.0)
    match = r"insert of 2 items with 13 rows \(312 bytes\) does not fit into the 12 rows .*--table\.max-bytes"
    with pytest.raises(ValueError, match=match):
        table.insert(ragged_of([[1] * 12, [2]]), np.ones(2), 0.0)
    assert serials_of(table.sample(1, 0.0).items) == [[1] * 12]


def test_memory_is_claimed_as_rows_are_written_and_used_again():
    process = psutil.Process()
    wide = lambda first: Unroll(  # noqa: E731
        TimeStep(*(np.zeros((8, 3), np.float32) for _ in range(3)), np.full((8, 3, 4096), first, np.float32)),
        (),
        (),
        (),
        None,
    )
    settings_ = config(max_size=100_000, max_bytes=2**33)
    before = process.memory_info().rss
    table = Table(settings_, limits_for(settings_, 1), 0)
    wide_bytes = 8 * 3 * 4096 * 4
    for i in range(100):
        keys = table.insert(wide(i), np.ones(8), 0.0)
        table.delete(keys[:-1] if i == 0 else keys)
    assert process.memory_info().rss - before < 20 * wide_bytes
    assert (table.sample(1, 0.0).items.timestep.observation == 0).all()

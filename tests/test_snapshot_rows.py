"""Snapshots of tables whose items have rows: each row is written once, whoever shares it, and ragged ones come back."""

from pathlib import Path

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_snapshot import PLENTY, bytes_of_chunks, damage, files, with_write
from test_storage import LENGTH, ROW_BYTES, STATE_BYTES, Streams, all_items, ragged_of, serials_of, table_of, unrolls_of
from test_table import REMOVERS

from seedx.replay import snapshot
from seedx.replay.snapshot import Snapshots

OVERLAP = 3
STRIDE = LENGTH - OVERLAP


def example(ragged=False):
    return ragged_of([[0]]) if ragged else unrolls_of(np.arange(LENGTH)[None])


def snapshots(directory, table, max_bytes=PLENTY, ragged=False):
    return Snapshots(Path(directory), max_bytes, table, example(ragged))


def restored(directory, ragged=False, **changes):
    table = table_of(0 if ragged else OVERLAP, ragged=ragged, **changes)
    assert snapshots(directory, table, ragged=ragged).load() == table.info()["replay/items"]
    return table


def contents(table):
    """Keys, rows, priorities and uses of all items, oldest first; the counters and the random state."""
    state = table.state()
    if state is None or not len(state.roster.order):
        return [], None if state is None else state[2:5], None if state is None else state.roster.rng
    keys, items = all_items(table)
    roster = state.roster
    held = zip(keys, serials_of(items), roster.priorities.tolist(), roster.times_sampled.tolist(), strict=True)
    return list(held), state[2:5], roster.rng


def first_rows(table):
    return [rows[0] for _, rows, *_ in contents(table)[0]]


def num_rows_of(table):
    """Rows that the items of a table have, those in common counted once."""
    state = table.state()
    return 0 if state is None else np.count_nonzero(state.chains.last_users() >= 0)


@settings(max_examples=60)
@given(data=st.data(), remover=st.sampled_from(REMOVERS), ragged=st.booleans(), piece=st.sampled_from([1, 100, 2**22]))
def test_what_is_restored_is_what_was_saved(tmp_path_factory, data, remover, ragged, piece):
    directory, max_size = tmp_path_factory.mktemp("replay"), data.draw(st.integers(2, 9))
    changes = {"max_size": max_size, "remover": remover, "ragged": ragged}
    table, streams, session = table_of(0 if ragged else OVERLAP, **changes), Streams(OVERLAP), 0
    saver, saved = snapshots(directory, table, ragged=ragged), None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(snapshot, "_PIECE_BYTES", piece)
        for _ in range(data.draw(st.integers(1, 20))):
            match data.draw(st.sampled_from(["insert", "insert", "sample", "delete", "save", "save", "kill"])):
                case "insert":
                    sources = np.array(data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=max_size)))
                    serials = streams.next(*(sources + 4 * session))
                    if ragged:
                        items = ragged_of([some[: data.draw(st.integers(1, LENGTH))].tolist() for some in serials])
                    else:
                        items = unrolls_of(serials)
                    table.insert(items, data.draw(st.sampled_from([1.0, 2.0])) * np.ones(len(sources)), 0.0, sources)
                case "sample" if table.info()["replay/items"]:
                    table.sample(3, 0.0)
                case "delete" if table.info()["replay/items"]:
                    table.delete(table.sample(1, 0.0).keys)
                case "save" if saver.save():
                    saved = contents(table)
                    twin = restored(directory, **changes)
                    assert contents(twin) == saved
                    assert twin._storage.num_rows == num_rows_of(table)
                case "kill":
                    table, session = table_of(0 if ragged else OVERLAP, **changes), session + 1
                    saver = snapshots(directory, table, ragged=ragged)
                    saver.load()
                    assert saved is None or contents(table) == saved
    table.delete(np.array([key for key, *_ in contents(table)[0]], np.uint64))
    table.reset()
    assert table._storage is None or table._storage.num_rows == 0


def test_each_row_is_written_once_over_many_saves(tmp_path, monkeypatch):
    written, ever, streams = {"rows": [], "items": 0}, set(), Streams(OVERLAP)
    table, inserted, size = table_of(OVERLAP, max_size=40), 0, 0

    def note(records):
        nonlocal size
        size += records.nbytes
        if records.dtype.itemsize == ROW_BYTES:
            written["rows"] += records["5"].tolist()
        else:
            written["items"] += len(records)

    with_write(monkeypatch, note)
    saver, session = snapshots(tmp_path, table), 0
    for number in range(30):
        if number == 15:  # and so it is over a resume, but that sources begin anew
            table, session = table_of(OVERLAP, max_size=40), 3
            saver = snapshots(tmp_path, table)
            saver.load()
        for _ in range(1 + number % 3):
            streams.insert(table, *range(session, session + 3))
            inserted += 3
        assert saver.save()
        ever |= {row for _, rows, *_ in contents(table)[0] for row in rows}
        assert contents(restored(tmp_path, max_size=40)) == contents(table)
    assert sorted(written["rows"]) == sorted(ever)
    assert len(ever) == inserted * STRIDE + 6 * OVERLAP
    assert written["items"] == inserted
    assert size == len(ever) * ROW_BYTES + inserted * STATE_BYTES
    kept = bytes_of_chunks(tmp_path)
    assert kept < 3 * (40 * STRIDE * ROW_BYTES + 40 * STATE_BYTES)  # chunks without what lives went


def saved_in_steps(directory, **changes):
    """20 unrolls of one source, saved after each 5: those with odd numbers are the chunks of rows."""
    table, streams = table_of(OVERLAP, max_size=20, **changes), Streams(OVERLAP)
    saver = snapshots(directory, table)
    for _ in range(4):
        for _ in range(5):
            streams.insert(table, 0)
        assert saver.save()
    return table


@pytest.mark.parametrize("how", ["a flipped bit", "missing"])
@pytest.mark.parametrize(("number", "lost"), [(3, range(5, 12)), (1, range(7)), (4, range(5, 10))])
def test_a_damaged_chunk_costs_the_items_that_need_it(tmp_path, caplog, how, number, lost):
    """Rows of the second chunk of them are those from 13 to 22; so they are in unrolls 5 to 11."""
    table = saved_in_steps(tmp_path)
    damage(tmp_path / f"chunk-{number}", how)
    again = restored(tmp_path, max_size=20)
    expected = [i for i in range(20) if i not in lost]
    assert first_rows(again) == [i * STRIDE for i in expected]
    assert again._storage.num_rows == num_rows_of(again)
    assert len(caplog.records) == 1
    assert f"chunk-{number} " in caplog.text
    assert f"{len(lost)} items of the replay are lost" in caplog.text
    caplog.clear()
    saver = snapshots(tmp_path, again)  # one that knows of no chunk writes all anew
    assert saver.save()
    assert contents(restored(tmp_path, max_size=20)) == contents(again)
    assert not caplog.records
    assert set(first_rows(again)) < set(first_rows(table))


@pytest.mark.parametrize(
    ("changes", "count"), [({"max_size": 7}, 7), ({"max_size": 50}, 20), ({"max_size": 11, "max_rows": 25}, 11)]
)
def test_a_smaller_table_takes_the_newest_items_and_what_they_need(tmp_path, monkeypatch, changes, count):
    """11 unrolls have 10 * 2 + 5 rows."""
    saved_in_steps(tmp_path)
    changes = {"max_sources": 1, **changes}
    table = table_of(OVERLAP, **changes)
    saver = snapshots(tmp_path, table)
    assert saver.load() == count
    assert first_rows(table) == [i * STRIDE for i in range(20 - count, 20)]
    assert table._storage.num_rows == (count - 1) * STRIDE + LENGTH
    with_write(monkeypatch, lambda records: pytest.fail("written again") if len(records) else None)
    assert saver.save()
    assert first_rows(restored(tmp_path, **changes)) == first_rows(table)


def test_a_snapshot_of_another_format_is_left_out_with_a_warning(tmp_path, monkeypatch, caplog):
    with monkeypatch.context() as patch:
        patch.setattr(snapshot, "_FORMAT", 1)
        saved_in_steps(tmp_path)
    table = restored(tmp_path, max_size=20)
    assert first_rows(table) == []
    assert "has format 1, but this program reads 2; the replay starts empty" in caplog.text
    Streams(OVERLAP).insert(table, 0)
    assert snapshots(tmp_path, table).save()
    assert first_rows(restored(tmp_path, max_size=20)) == [0]
    assert files(tmp_path).keys() == {"index", "chunk-9", "chunk-10"}


def test_items_that_are_nothing_but_rows_come_back(tmp_path):
    tables = [table_of(OVERLAP) for _ in range(2)]
    without = lambda serials: unrolls_of(serials)._replace(state=None)  # noqa: E731
    for serials in ([[0, 1, 2, 3, 4]], [[2, 3, 4, 5, 6]]):
        tables[0].insert(without(np.array(serials)), np.ones(1), 0.0, np.array([1]))
    savers = [Snapshots(tmp_path, PLENTY, table, without(np.zeros((1, LENGTH), np.int64))) for table in tables]
    assert savers[0].save()
    assert savers[1].load() == 2
    one, other = (table.sample(9, 0.0).items for table in tables)
    jax.tree.map(np.testing.assert_array_equal, one, other)
    assert bytes_of_chunks(tmp_path) == 7 * ROW_BYTES


# ---- the budget


def test_within_twice_the_bytes_of_the_table_all_is_kept_whoever_leaves(tmp_path, monkeypatch, caplog):
    rng, streams, peak = np.random.default_rng(0), Streams(OVERLAP), 0
    size = 64 * (LENGTH * ROW_BYTES + STATE_BYTES)  # items leave at random: in the end little is shared
    table = table_of(OVERLAP, max_size=64, remover="uniform")
    saver = snapshots(tmp_path, table, 2 * size)

    def measure(piece):
        nonlocal peak
        peak = max(peak, bytes_of_chunks(tmp_path) + piece.nbytes)

    with_write(monkeypatch, measure)
    for number in range(60):
        for _ in range(int(rng.integers(1, 10))):
            streams.insert(table, *(number % 2 + 2 * np.arange(4)))
        assert saver.save()
        assert contents(restored(tmp_path, max_size=64, remover="uniform")) == contents(table)
    assert size < peak <= 2 * size
    assert not caplog.records


def test_a_budget_that_is_too_small_takes_the_newest_items_whole(tmp_path, caplog):
    """One sixteenth is kept free: room for 10 unrolls of one source, which share rows."""
    table, streams = table_of(OVERLAP, max_size=30), Streams(OVERLAP)
    for _ in range(30):
        streams.insert(table, 0)
    wanted = (9 * STRIDE + LENGTH) * ROW_BYTES + 10 * STATE_BYTES
    for max_bytes, count in ((wanted * 16 // 15 + 1, 10), (wanted * 16 // 15 - 2, 9)):
        directory = tmp_path / str(count)
        assert snapshots(directory, table, max_bytes).save()
        assert bytes_of_chunks(directory) <= max_bytes
        assert first_rows(restored(directory, max_size=30)) == [i * STRIDE for i in range(30 - count, 30)]
    assert "checkpoint.replay_max_bytes" in caplog.text

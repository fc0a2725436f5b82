"""Snapshots of the embedded table: what comes back is the table, whatever happened to process, machine and disk."""

import logging
import os
import threading
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from bits import assert_bit_equal
from hypothesis import given, settings
from hypothesis import strategies as st
from test_table import REMOVERS, SAMPLERS, config, insert, items, make, numbers, unrolls

from seedx.checks import ConfigError
from seedx.config import CheckpointConfig
from seedx.replay import chunks, snapshot
from seedx.replay.rate_limiter import limits_for
from seedx.replay.replay import ReplayTimeoutError
from seedx.replay.roster import RosterBooks
from seedx.replay.snapshot import Snapshots
from seedx.replay.table import Table

EXAMPLE = items(0)
ITEM_BYTES = 16
PLENTY = 10**6


def snapshots(directory, table, max_bytes=PLENTY, example=EXAMPLE):
    return Snapshots(Path(directory), max_bytes, table, example)


def restored(directory, like=None, seed=99, **changes):
    """A fresh table that was brought to the snapshot in a directory."""
    table = make(seed=seed, **changes) if like is None else Table(like._config, like._limiter.limits, seed)
    found = snapshots(directory, table).load()
    assert found == table.info()["replay/items"]
    return table


def contents(table):
    """Key, number, priority and uses of each item, oldest first; the counters; the random state."""
    state = table.state()
    if state is None:
        return [], (0, 0, 0), None
    roster = state.roster
    keys = roster.keys[roster.order]
    records = np.zeros(len(keys), table.shelves()["items"].record)
    assert table.read("items", keys, records).all()
    a, b = records["0"], records["1"]
    np.testing.assert_array_equal(b, np.repeat(a[:, None], 2, axis=1))
    assert state.inserted - state.deleted == len(keys)
    held = zip(*(x.tolist() for x in (keys, a, roster.priorities, roster.times_sampled)), strict=True)
    return list(held), state[2:5], roster.rng


def ids(table):
    return [number for _, number, _, _ in contents(table)[0]]


def files(directory):
    return {path.name: path.read_bytes() for path in Path(directory).iterdir()}


def bytes_of_chunks(directory):
    return sum(path.stat().st_size for path in Path(directory).glob("chunk-*"))


# ---- it is the table


def outcome(table, operation):
    """What an operation on a table returns, as something to compare."""
    try:
        return jax.tree.map(np.ndarray.tolist, operation(table))
    except ReplayTimeoutError:
        return "it waits"


@settings(max_examples=50)
@given(data=st.data(), sampler=st.sampled_from(SAMPLERS), remover=st.sampled_from(REMOVERS))
def test_a_restored_table_goes_on_as_the_saved_one_does(tmp_path_factory, data, sampler, remover):
    """Any sequence of operations; from each save on also on a restored table, until the first one is killed."""
    directory = tmp_path_factory.mktemp("replay")
    max_size, max_times = data.draw(st.integers(1, 7)), data.draw(st.integers(0, 3))
    if sampler == "fifo" and max_times == 1:
        max_times = 2  # a queue has no snapshots
    settings_ = config(sampler=sampler, remover=remover, max_size=max_size, max_times_sampled=max_times)
    new = lambda seed: Table(settings_, limits_for(settings_, 1), seed)  # noqa: E731
    table, twin, count, keys = new(1), None, 0, [12345]
    saver, saved = snapshots(directory, table), contents(table)
    for _ in range(data.draw(st.integers(1, 25))):
        operation = None
        match data.draw(st.sampled_from(["insert", "insert", "sample", "change", "reset", "save", "save", "kill"])):
            case "insert":
                priorities = data.draw(st.lists(st.sampled_from([0.0, 0.5, 30.0]), min_size=1, max_size=max_size))
                first, count = count, count + len(priorities)
                operation = lambda t: insert(t, *range(first, count), priorities=priorities)  # noqa: B023, E731
            case "sample":
                size = data.draw(st.integers(1, 6))
                operation = lambda t: t.sample(size, 0.0)  # noqa: B023, E731
            case "change":
                some = np.array(data.draw(st.lists(st.sampled_from(keys), max_size=4)), np.uint64)
                table.update_priorities(some, np.arange(len(some)))
                table.delete(some[:1])
                if twin is not None:
                    twin.update_priorities(some, np.arange(len(some)))
                    twin.delete(some[:1])
            case "reset":
                table.reset()
                twin = None
            case "save" if saver.save():
                twin, saved = new(2), contents(table)
                snapshots(directory, twin).load()
            case "kill":
                table, twin = new(3), None
                saver = snapshots(directory, table)
                assert saver.load() == len(saved[0])
                assert contents(table) == (saved if saved[2] else contents(new(3)))
        if operation is not None:
            result = outcome(table, operation)
            assert twin is None or outcome(twin, operation) == result
        assert twin is None or contents(twin) == contents(table)
        keys += [key for key, *_ in contents(table)[0]]
    named = {name for name in files(directory) if name != "index"}
    assert named == {f"chunk-{number}" for number in saver._chunks}


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("remover", REMOVERS)
def test_a_table_with_gaps_draws_as_before(tmp_path, sampler, remover):
    """Draws depend on the order in which slots are held, free ones too."""
    table = make(sampler=sampler, remover=remover, max_size=60, max_times_sampled=5)
    keys = insert(table, *range(60), priorities=np.arange(60))
    table.delete(np.random.default_rng(0).permutation(keys)[:20])
    table.sample(50, 0.0)
    snapshots(tmp_path, table).save()
    twin = restored(tmp_path, like=table)
    for first in range(100, 400, 30):
        for operation in (lambda t: t.sample(20, 0.0), lambda t: insert(t, *range(first, first + 30))):  # noqa: B023
            assert outcome(twin, operation) == outcome(table, operation)
    assert contents(twin) == contents(table)


def test_unrolls_come_back_to_the_bit(tmp_path):
    made = unrolls(3, 4)
    made = made._replace(extras={"half": made.action.astype(ml_dtypes.bfloat16), "flag": made.version > 4})
    tables = [make(max_size=5), make(seed=1, max_size=5)]
    example = jax.tree.map(lambda leaf: leaf[:1], made)
    tables[0].insert(made, np.ones(4), 0.0)
    assert snapshots(tmp_path, tables[0], example=example).save()
    assert snapshots(tmp_path, tables[1], example=example).load() == 4
    one, other = (table.sample(20, 0.0).items for table in tables)
    assert_bit_equal(one, other)


def test_nothing_is_written_of_a_table_that_never_had_items_or_is_closed(tmp_path):
    table = make()
    saver = snapshots(tmp_path / "replay", table)
    assert saver.load() == 0
    assert not saver.save()
    assert not (tmp_path / "replay").exists()
    insert(table, 1)
    assert saver.save()
    before = files(tmp_path / "replay")
    table.close()
    assert not saver.save()
    assert files(tmp_path / "replay") == before


def test_a_table_that_is_closed_during_a_save_leaves_the_last_snapshot(tmp_path, monkeypatch):
    table = make()
    saver = snapshots(tmp_path, table)
    insert(table, 1)
    saver.save()
    insert(table, *range(2, 9))
    monkeypatch.setattr(snapshot, "_PIECE_BYTES", ITEM_BYTES)
    with_write(monkeypatch, lambda records: table.close())
    assert not saver.save()
    assert ids(restored(tmp_path)) == [1]


def between(monkeypatch, also):
    """Has `also` be called when the books were copied, and the records of new items not yet."""
    newest = snapshot.newest
    monkeypatch.setattr(snapshot, "newest", lambda *args: (newest(*args), also())[0])


def test_a_table_that_is_closed_before_the_last_records_are_copied_leaves_the_last_snapshot(tmp_path, monkeypatch):
    table = make()
    saver = snapshots(tmp_path, table)
    insert(table, 1)
    saver.save()
    insert(table, *range(2, 9))
    between(monkeypatch, table.close)
    assert not saver.save()
    assert ids(restored(tmp_path)) == [1]


def test_items_that_leave_before_their_records_are_copied_are_as_if_deleted(tmp_path, monkeypatch):
    table = make()
    keys = insert(table, *range(5))
    between(monkeypatch, lambda: table.delete(keys[1:3]))
    assert snapshots(tmp_path, table).save()
    assert contents(restored(tmp_path)) == contents(table)
    assert ids(table) == [0, 3, 4]


def test_others_use_the_table_while_its_state_is_computed(monkeypatch):
    table, compute, blocked = make(), RosterBooks.state, []
    insert(table, *range(5))

    def state(books):
        thread = threading.Thread(target=table.sample, args=(3, 0.0), daemon=True)
        thread.start()
        thread.join(60)
        blocked.append(thread.is_alive())
        return compute(books)

    monkeypatch.setattr(RosterBooks, "state", state)
    assert table.state().sampled == 0
    assert table.info()["replay/sampled"] == 3
    assert blocked == [False]


# ---- each item is written once


def with_write(monkeypatch, also):
    """Has `also` be called with the records of each piece, just after it was copied out of the table."""
    write = chunks.write_chunk

    def seen(pieces):
        for piece in pieces:
            also(piece)
            yield piece

    monkeypatch.setattr(
        snapshot, "write_chunk", lambda directory, number, pieces: write(directory, number, seen(pieces))
    )


@pytest.mark.parametrize("piece", [1, 3 * ITEM_BYTES, 2**22])
@pytest.mark.parametrize("remover", REMOVERS)
def test_each_item_is_written_once_over_many_saves(tmp_path, monkeypatch, piece, remover):
    monkeypatch.setattr(snapshot, "_PIECE_BYTES", piece)
    rng, written, count = np.random.default_rng(0), [], 0
    table = make(max_size=40, remover=remover)
    with_write(monkeypatch, lambda records: written.extend(records["0"].tolist()))
    saver, ever = snapshots(tmp_path, table), set()
    for number in range(30):
        if number == 15:  # and so it is over a resume
            table = restored(tmp_path, like=table)
            saver = snapshots(tmp_path, table)
            saver.load()
        for _ in range(int(rng.integers(0, 4))):
            size = int(rng.integers(1, 9))
            insert(table, *range(count, count + size))
            count += size
        assert saver.save()
        ever |= set(ids(table))
        assert contents(restored(tmp_path, like=table)) == contents(table)
    assert sorted(written) == sorted(ever)
    assert len(ever) > (200 if remover == "fifo" else 39)


# ---- killed at any point


class Killed(BaseException):
    pass


class Disk:
    """Counts what a save asks of the disk, and fails before the how-manieth of it.

    Knows what is safe from a loss of power: contents that were forced to disk, under names that were. If `eager`, a
    name that was replaced is on disk at once, before other names.
    """

    def __init__(self, monkeypatch, directory, failure, after=0, eager=False):
        self.left, self.failure, self.directory = after, failure, directory
        self.contents, self.names, self.eager = {}, files(directory), eager
        for owner, name in ((os, "fsync"), (os, "replace"), (Path, "unlink"), (Path, "open")):
            self.wrap(monkeypatch, owner, name, getattr(owner, name))

    def wrap(self, monkeypatch, owner, name, real):
        def call(*args, **kwargs):
            if self.left == 0:
                raise self.failure
            self.left -= 1
            path = Path(os.readlink(f"/proc/self/fd/{args[0]}")) if name == "fsync" else None
            result = real(*args, **kwargs)
            if path == self.directory:
                self.names = {file.name: self.contents.get(file.stat().st_ino) for file in path.iterdir()}
            elif name == "replace" and self.eager:
                self.names["index"] = self.contents.get(Path(args[1]).stat().st_ino)
            elif path is not None:
                self.contents[path.stat().st_ino] = path.read_bytes()
            return result

        self.contents.update({path.stat().st_ino: path.read_bytes() for path in self.directory.iterdir()})
        monkeypatch.setattr(owner, name, call)

    def lose_power(self):
        for path in self.directory.iterdir():
            path.unlink()
        for name, content in self.names.items():
            (self.directory / name).write_bytes(b"torn" if content is None else content)


def kill(directory, point, power, max_bytes):
    """Kills the second save of a table; what it and its items were at the first one and then, and whether it lived."""
    table = make(max_size=20)
    saver = snapshots(directory, table, max_bytes)
    insert(table, *range(14))
    assert saver.save()
    before = contents(table)
    insert(table, *range(14, 25))
    table.sample(5, 0.0)
    with pytest.MonkeyPatch.context() as patch:
        disk = Disk(patch, directory, Killed(), point, eager=power == "lost, names first")
        try:
            assert saver.save()
            killed = False
        except Killed:
            killed = True
    if power != "kept":
        disk.lose_power()
    return before, contents(table), killed


@pytest.mark.parametrize(
    ("room", "power"),
    [
        *((64, power) for power in ("kept", "lost", "lost, names first")),
        (24, "lost, names first"),
        *(pytest.param(24, power, marks=pytest.mark.slow) for power in ("kept", "lost")),
    ],
)
def test_killed_at_any_point_the_snapshot_before_it_or_the_new_one_is_there(tmp_path, monkeypatch, power, room):
    """With little room there are some in between, which lack new items."""
    monkeypatch.setattr(snapshot, "_PIECE_BYTES", 2 * ITEM_BYTES)
    found, max_bytes, killed = [], room * ITEM_BYTES, True
    while killed:
        directory = tmp_path / str(len(found))
        before, now, killed = kill(directory, len(found), power, max_bytes)
        again = restored(directory, max_size=20)
        items_, counters, rng = contents(again)
        if room == 64:
            assert (items_, counters, rng) in (before, now)
        assert set(items_) <= set(now[0]) or (items_, counters, rng) == before
        assert len(items_) >= 9
        found.append(set(items_) == set(now[0]))
        assert found[-1] or killed
        # And it goes on from there; what nothing names goes.
        saver = snapshots(directory, again, max_bytes)
        saver.load()
        insert(again, *range(25, 30))
        assert saver.save()
        assert contents(restored(directory, like=again)) == contents(again)
        assert {f"chunk-{number}" for number in saver._chunks} == files(directory).keys() - {"index", "index.tmp"}
    assert found == sorted(found)  # first the old one, then the new one
    assert found.index(True) > 12


def test_a_failing_disk_is_reported_once_and_the_next_save_makes_up_for_it(tmp_path, caplog):
    for point in range(100):
        directory = tmp_path / str(point)
        table = make(max_size=20)
        saver = snapshots(directory, table)
        insert(table, *range(14))
        assert saver.save()
        insert(table, *range(14, 25))
        caplog.clear()
        with pytest.MonkeyPatch.context() as patch:
            Disk(patch, directory, OSError(28, "No space left on device"), point)
            finished = [saver.save(), saver.save()]
        if not finished[1]:
            assert len(caplog.records) == 1
            assert "No space left on device" in caplog.text
            assert "--checkpoint.replay-max-bytes 0" in caplog.text
        assert set(ids(restored(directory, like=table))) <= set(range(25))
        assert saver.save()
        assert contents(restored(directory, like=table)) == contents(table)
        assert bytes_of_chunks(directory) <= 25 * ITEM_BYTES
        if all(finished):
            break
    assert 5 < point < 99


# ---- damage


def saved_in_chunks_of_5(directory):
    table = make(max_size=20)
    saver = snapshots(directory, table)
    for first in range(0, 20, 5):
        insert(table, *range(first, first + 5), priorities=np.arange(first, first + 5))
        assert saver.save()
    return table


def damage(path, how, where=0.5):
    data = bytearray(path.read_bytes())
    match how:
        case "a flipped bit":
            data[int(where * len(data))] ^= 4
        case "cut short":
            del data[-3:]
        case "longer":
            data += b"more"
        case "emptied":
            data.clear()
    path.write_bytes(data)
    if how == "missing":
        path.unlink()


@pytest.mark.parametrize("how", ["a flipped bit", "cut short", "longer", "emptied", "missing"])
def test_the_items_of_a_damaged_chunk_are_left_out_with_a_warning(tmp_path, caplog, how):
    table = saved_in_chunks_of_5(tmp_path)
    damage(tmp_path / "chunk-2", how)
    again = restored(tmp_path, like=table)
    assert ids(again) == [*range(5), *range(10, 20)]
    assert len(caplog.records) == 1
    assert "chunk-2 " in caplog.records[0].message
    assert "5 items of the replay are lost" in caplog.records[0].message
    # They make room like others that left, and the next save is whole.
    insert(again, *range(20, 25))
    assert ids(again) == [*range(5), *range(10, 25)]
    saver = snapshots(tmp_path, restored(tmp_path, like=table))
    saver.load()
    saver.save()
    caplog.clear()
    assert ids(restored(tmp_path, like=table)) == [*range(5), *range(10, 20)]
    assert not caplog.records


@pytest.mark.parametrize("how", ["a flipped bit", "cut short", "longer", "emptied"])
def test_with_a_damaged_index_the_replay_starts_empty_with_a_warning(tmp_path, caplog, how):
    table = saved_in_chunks_of_5(tmp_path)
    damage(tmp_path / "index", how)
    again = restored(tmp_path, like=table)
    assert ids(again) == []
    assert "index is not as it was written; the replay starts empty" in caplog.text
    insert(again, 77)
    assert snapshots(tmp_path, again).save()
    assert ids(restored(tmp_path, like=table)) == [77]
    assert files(tmp_path).keys() == {"index", "chunk-5"}


@settings(max_examples=30)
@given(name=st.sampled_from(["index", *(f"chunk-{n}" for n in range(1, 5))]), where=st.floats(0, 1, exclude_max=True))
def test_any_flipped_bit_is_found(tmp_path_factory, name, where):
    directory = tmp_path_factory.mktemp("replay")
    table = saved_in_chunks_of_5(directory)
    damage(directory / name, "a flipped bit", where)
    expected = [] if name == "index" else [i for i in range(20) if i // 5 != int(name[-1]) - 1]
    assert ids(restored(directory, like=table)) == expected


# ---- the budget


def test_within_twice_the_bytes_of_the_table_all_items_are_kept_whoever_leaves(tmp_path, monkeypatch, caplog):
    """Items leave at random, so that every chunk keeps a few for long: those are written anew where room is needed."""
    size, peak, rng, count = 64, 0, np.random.default_rng(0), 0
    max_bytes = 2 * size * ITEM_BYTES
    table = make(max_size=size, remover="uniform")
    saver, written = snapshots(tmp_path, table, max_bytes), []

    def measure(piece):
        nonlocal peak
        peak = max(peak, bytes_of_chunks(tmp_path) + piece.nbytes)
        written.extend(piece["0"].tolist())

    with_write(monkeypatch, measure)
    for _ in range(60):
        new = int(rng.integers(1, 30))
        insert(table, *range(count, count + new))
        count += new
        assert saver.save()
        peak = max(peak, bytes_of_chunks(tmp_path))
        assert contents(restored(tmp_path, like=table)) == contents(table)
    assert max_bytes * 0.8 < peak <= max_bytes
    assert len(set(written)) < len(written) < 2 * count
    assert not caplog.records


@pytest.mark.parametrize("remover", REMOVERS)
def test_a_budget_that_is_too_small_is_kept_and_reported_once(tmp_path, caplog, remover):
    table, max_bytes = make(max_size=64, remover=remover), 32 * ITEM_BYTES
    saver, found = snapshots(tmp_path, table, max_bytes), []
    for first in range(0, 400, 16):
        insert(table, *range(first, first + 16))
        assert saver.save()
        assert bytes_of_chunks(tmp_path) <= max_bytes
        again = restored(tmp_path, like=table)
        held = {entry[0]: entry for entry in contents(table)[0]}
        assert all(held[entry[0]] == entry for entry in contents(again)[0])
        found.append(len(ids(again)))
    assert max(found) >= 28
    assert min(found[2:]) >= 8
    assert len(caplog.records) == 1
    assert "checkpoint.replay_max_bytes (512). Raise --checkpoint.replay-max-bytes" in caplog.text


def test_the_newest_items_are_saved_where_not_all_fit(tmp_path):
    table = make(max_size=64)
    insert(table, *range(64))
    snapshots(tmp_path, table, 32 * ITEM_BYTES).save()
    assert ids(restored(tmp_path, like=table)) == list(range(34, 64))  # a sixteenth is kept free


def test_what_an_earlier_run_left_behind_goes(tmp_path):
    saved_in_chunks_of_5(tmp_path)
    table = make()
    insert(table, 7)
    assert snapshots(tmp_path, table).save()
    assert ids(restored(tmp_path)) == [7]
    assert files(tmp_path).keys() == {"index", "chunk-5"}


# ---- other settings


def test_items_with_other_leaves_are_refused_by_name(tmp_path):
    saved_in_chunks_of_5(tmp_path)
    before = files(tmp_path)
    example = {"a": EXAMPLE["a"].astype(np.int32), "b": EXAMPLE["b"], "c": EXAMPLE["b"]}
    match = (
        r"holds items\['a'\] int64\[\], where this run makes items\['a'\] int32\[\], items\['c'\] float32\[2\]\. Drop"
    )
    with pytest.raises(ConfigError, match=match):
        snapshots(tmp_path, make(), example=example).load()
    assert files(tmp_path) == before


@pytest.mark.parametrize("max_size", [1, 7, 12, 100])
def test_a_table_of_another_size_takes_the_newest_without_writing_them_again(tmp_path, monkeypatch, max_size):
    then = saved_in_chunks_of_5(tmp_path)
    table = make(max_size=max_size, sampler="prioritized")
    saver = snapshots(tmp_path, table)
    count = min(max_size, 20)
    assert saver.load() == count
    expected = [(number, *rest) for _, number, *rest in contents(then)[0]][-count:]
    assert [(number, *rest) for _, number, *rest in contents(table)[0]] == expected
    with_write(monkeypatch, lambda records: pytest.fail("written again") if len(records) else None)
    assert saver.save()
    assert contents(restored(tmp_path, like=table)) == contents(table)
    table.update_priorities(table.sample(1, 0.0).keys, np.array([8.5]))
    assert [entry[2] for entry in contents(table)[0]].count(8.5) == 1


def test_a_changed_ratio_does_not_have_to_be_made_up_for(tmp_path):
    table = make(sampler="prioritized", samples_per_insert=2.0, error_buffer=8.0)
    for i in range(40):
        insert(table, i)
        table.sample(2, 0.0)
    snapshots(tmp_path, table).save()
    for ratio in (1.0, 2.0, 50.0):
        changes = {"samples_per_insert": ratio, "error_buffer": max(8.0, ratio)}
        again = restored(tmp_path, sampler="prioritized", **changes)
        assert again._limiter.inserted == 40
        assert abs(again._limiter.difference - ratio) <= changes["error_buffer"]
        assert (again._limiter.sampled == 80) == (ratio == 2.0)
        for i in range(10):  # and neither side waits for long
            for _ in range(int(2 * ratio)):
                if outcome(again, lambda t: t.sample(1, 0.0)) == "it waits":
                    break
            assert len(insert(again, 100 + i)) == 1


def test_items_that_a_lowered_limit_would_have_used_up_are_sampled_once_more(tmp_path):
    table = make(max_size=4)
    insert(table, *range(4))
    table.sample(40, 0.0)
    snapshots(tmp_path, table).save()
    again = restored(tmp_path, max_size=4, max_times_sampled=2)
    assert sorted(set(numbers(again.sample(4, 0.0)))) == [0, 1, 2, 3]
    assert again.info()["replay/items"] == 0


def test_a_table_that_does_not_fit_into_memory_is_refused(tmp_path):
    saved_in_chunks_of_5(tmp_path)
    with pytest.raises(ConfigError, match=r"table\.max_bytes \(100\)"):
        restored(tmp_path, max_bytes=100)


def test_the_settings_are_checked():
    for name in ("replay_interval_s", "replay_max_bytes"):
        with pytest.raises(ConfigError, match=rf"CheckpointConfig.{name} \(-1\) must not be negative"):
            CheckpointConfig(**{name: -1})


# ---- others use the table meanwhile


def test_a_snapshot_is_the_table_at_one_moment_while_others_use_it(tmp_path, monkeypatch):
    """Numbers come one by one and the oldest makes room: at one moment the table has 200 that follow each other."""
    monkeypatch.setattr(snapshot, "_PIECE_BYTES", 64 * ITEM_BYTES)
    table, stop, failures = make(max_size=200), threading.Event(), []
    insert(table, *range(200))

    def use():
        try:
            count = 200
            while not stop.is_set():
                keys = insert(table, count)
                table.update_priorities(keys, np.array([count]))
                table.sample(2, 0.0)
                count += 1
                stop.wait(0.0002)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=use, daemon=True)
    thread.start()
    saver, newest = snapshots(tmp_path, table), []
    while len(newest) < 25 or newest[-1] <= 250:  # so that it moves meanwhile, however slowly
        assert saver.save()
        again = restored(tmp_path, like=table)
        found = contents(again)
        newest.append(found[0][-1][1])
        assert ids(again) == list(range(newest[-1] - 199, newest[-1] + 1))
        assert [priority for _, number, priority, _ in found[0] if number >= 200][:-1] == [
            float(number) for _, number, _, _ in found[0] if number >= 200
        ][:-1]
        assert found[1][0] == newest[-1] + 1
    stop.set()
    thread.join(60)
    assert not failures
    assert not thread.is_alive()
    assert newest == sorted(newest)


def test_items_that_come_faster_than_the_disk_takes_them_are_absent(tmp_path, monkeypatch):
    monkeypatch.setattr(snapshot, "_PIECE_BYTES", 2 * ITEM_BYTES)
    table, count = make(max_size=50), 0

    def flood(records):
        nonlocal count
        insert(table, *range(count, count + 5))
        count += 5

    for _ in range(10):
        flood(None)
    with_write(monkeypatch, flood)
    saver = snapshots(tmp_path, table)
    for _ in range(3):
        assert saver.save()
    again = restored(tmp_path, like=table)
    assert 2 <= len(ids(again)) < 50
    assert sum(again._limiter.inserted - number <= 60 for number in ids(again)) == len(ids(again))
    monkeypatch.undo()
    assert saver.save()
    assert contents(restored(tmp_path, like=table)) == contents(table)


def test_the_log_is_quiet_where_all_is_well(tmp_path, caplog):
    with caplog.at_level(logging.DEBUG):
        table = saved_in_chunks_of_5(tmp_path)
        restored(tmp_path, like=table)
    assert not caplog.records

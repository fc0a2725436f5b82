"""Run directories in buckets, on the local paths of the same library; test_bucket_gcs has the store itself."""

import os
import shutil
import sys

import pytest

from seedx import bucket, rundir
from seedx.bucket import BucketError, Copy
from seedx.checks import ConfigError


@pytest.fixture
def copy_of(tmp_path, monkeypatch):
    """Copies of one run directory on different machines; `there` stands for the bucket."""
    (tmp_path / "bucket").mkdir()
    monkeypatch.setattr(bucket, "is_bucket", lambda run_dir: str(run_dir).startswith(f"{tmp_path}/bucket"))

    def make(machine="a"):
        copy = Copy(f"{tmp_path}/bucket/run", tmp_path / machine)
        copy.fetch()
        return copy

    make.there = tmp_path / "bucket" / "run"
    return make


def begin(copy, *updates):
    (copy.here / "config.json").write_text("{}")
    for update in updates:
        checkpoint(copy.here, update)


def checkpoint(run_dir, update, text="params"):
    path = run_dir / "checkpoints" / str(update)
    (path / "params").mkdir(parents=True)
    (path / "params" / "array").write_text(f"{text} {update}")
    (path / "checksums.json").write_text("{}")


def files(directory):
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file())


def test_another_machine_goes_on_with_what_was_sent(copy_of):
    first = copy_of("a")
    begin(first, 5, 9)
    (first.here / "metrics.jsonl").write_text("{}\n")
    (first.here / "logs").mkdir()
    (first.here / "logs" / "actor-0.log").write_text("said")
    (first.here / "replay").mkdir()
    (first.here / "replay" / "chunk").write_text("large")
    (first.here / "curve.tmp").write_text("half")
    checkpoint(first.here, 10)
    (first.here / "checkpoints" / "10").rename(first.here / "checkpoints" / "10.orbax-checkpoint-tmp")
    first.send()
    second = copy_of("b")
    assert files(second.here) == files(copy_of.there)
    assert files(second.here) == [
        ".run-id",
        "checkpoints/5/checksums.json",
        "checkpoints/5/params/array",
        "checkpoints/9/checksums.json",
        "checkpoints/9/params/array",
        "config.json",
        "logs/actor-0.log",
        "metrics.jsonl",
    ]
    assert (second.here / "checkpoints/9/params/array").read_text() == "params 9"


def test_only_what_changed_is_sent_and_what_was_dropped_goes(copy_of):
    copy = copy_of()
    begin(copy, 5)
    copy.send()
    (copy_of.there / "config.json").write_text("not sent again")
    checkpoint(copy.here, 9)
    shutil.rmtree(copy.here / "checkpoints" / "5")
    copy.send()
    assert (copy_of.there / "config.json").read_text() == "not sent again"
    assert os.listdir(copy_of.there / "checkpoints") == ["9"]
    (copy.here / "config.json").write_text("another")
    copy.send()
    assert (copy_of.there / "config.json").read_text() == "another"


def test_the_newer_of_two_copies_of_a_run_is_gone_on_with(copy_of):
    first = copy_of("a")
    begin(first, 5)
    first.send()
    checkpoint(first.here, 7)  # and the machine dies before it is sent
    copy_of("a")
    assert rundir.newest_update(first.here) == 7
    second = copy_of("b")
    assert rundir.newest_update(second.here) == 5
    checkpoint(second.here, 8)
    second.send()
    (first.here / "metrics.jsonl").write_text("of a past that is given up")
    copy_of("a")
    assert rundir.newest_update(first.here) == 8
    assert not (first.here / "metrics.jsonl").exists()


def test_a_copy_of_an_earlier_run_of_that_name_is_thrown_away(copy_of):
    old = copy_of("a")
    begin(old, 100)
    old.send()
    shutil.rmtree(copy_of.there)
    new = copy_of("b")
    begin(new, 5)
    new.send()
    assert rundir.newest_update(copy_of("a").here) == 5
    shutil.rmtree(copy_of.there)
    assert files(copy_of("a").here) == [".run-id"]


def test_a_checkpoint_that_was_not_sent_to_its_end_is_none(copy_of):
    copy = copy_of("a")
    begin(copy, 5, 9)
    copy.send()
    (copy_of.there / "checkpoints/9/checksums.json").unlink()
    assert rundir.newest_update(copy_of("b").here) == 5


def test_runs_of_other_hosts_below_are_left_alone(copy_of):
    copy = copy_of("a")
    begin(copy, 5)
    copy.send()
    (copy_of.there / "host-1").mkdir()
    (copy_of.there / "host-1" / ".run-id").write_text("x")
    (copy_of.there / "host-1" / "metrics.jsonl").write_text("x")
    assert "host-1" not in os.listdir(copy_of("b").here)


def test_a_run_that_was_brought_there_by_hand(copy_of):
    checkpoint(copy_of.there, 3)
    (copy_of.there / "config.json").write_text("{}")
    copy = copy_of("a")
    assert rundir.newest_update(copy.here) == 3
    copy.send()
    assert (copy_of.there / ".run-id").read_text() == (copy.here / ".run-id").read_text() != ""


def test_a_launcher_works_in_the_copy_and_sends_it_while_it_runs(copy_of, monkeypatch, tmp_path, capfd):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    flags = ["--agent", "impala", f"--run-dir={copy_of.there}", "--resume"]
    with bucket.kept(flags, interval_s=0.01) as argv:
        *rest, _, run_dir = argv
        assert rest == ["--agent", "impala", "--resume"]
        here = bucket.Path(run_dir)
        assert (copy_of.there / ".run-id").exists()
        (here / "config.json").write_text("{}")
        while not (copy_of.there / "config.json").exists():
            pass
        with pytest.raises(rundir.BusyError), _claimed(here), bucket.kept(flags):
            pass
        with _claimed(here), bucket.read(str(copy_of.there)) as read:
            assert read == here
        (here / "summary.json").write_text("{}")
    assert files(copy_of.there) == [".run-id", "config.json", "summary.json"]
    assert f"is sent to {copy_of.there}" in capfd.readouterr().err


class _claimed:
    def __init__(self, run_dir):
        self._run_dir = run_dir

    def __enter__(self):
        self._lock = rundir.claim(self._run_dir)

    def __exit__(self, *_):
        os.close(self._lock)


def test_other_flags_stay_as_they_are(copy_of):
    with bucket.kept(["--run-dir", "runs/a", "--agent", "impala"]) as argv:
        assert argv == ["--run-dir", "runs/a", "--agent", "impala"]


def test_what_is_evaluated_is_sent(copy_of, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    copy = copy_of()
    begin(copy, 5)
    copy.send()
    with bucket.read(str(copy_of.there)) as run_dir:
        assert rundir.newest_update(run_dir) == 5
        (run_dir / "evaluation.json").write_text("{}")
        (run_dir / "config.json").write_text("changed")
    assert (copy_of.there / "evaluation.json").read_text() == "{}"
    assert (copy_of.there / "config.json").read_text() == "{}"


def test_what_cannot_be_sent_is_told(copy_of):
    copy = copy_of()
    begin(copy, 5)
    copy_of.there.write_text("a file in its place")
    with pytest.raises(BucketError, match="could not be sent to"):
        copy.send()
    with pytest.raises(ConfigError, match="cannot be written"):
        copy.sign()


def test_a_kind_of_bucket_without_its_library(monkeypatch):
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(ConfigError, match=r"--run-dir gs://bucket/run needs a library"):
        Copy("gs://bucket/run").fetch()

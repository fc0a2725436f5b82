"""A run directory in a bucket, such as gs://BUCKET/RUN: the run works in a copy on this machine, which is sent there.

Object stores cannot lock, append to a file or rename a directory, as a run does. So all that changed in the copy is
sent once in a while and at the end, a checkpoint's checksums last: without them it counts as unfinished. Replay tables
stay here. A random id of the run tells a copy of it from one of what stood under the same name before.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import secrets
import shutil
import sys
import threading
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path, PurePath
from typing import TYPE_CHECKING

from seedx import rundir
from seedx.checks import ConfigError

if TYPE_CHECKING:
    from etils import epath

INTERVAL_S = 30.0
_ID = ".run-id"
_LAST = "checksums.json"  # of a checkpoint
_STAYS = "replay"


class BucketError(OSError):
    """A bucket does not have all that the run left; this machine does."""


def is_bucket(run_dir: str | Path) -> bool:
    """Whether a run directory is no directory of this machine."""
    return "://" in str(run_dir)


@contextlib.contextmanager
def kept(argv: Sequence[str], interval_s: float = INTERVAL_S) -> Generator[list[str]]:
    """The flags with a copy on this machine in the place of a --run-dir in a bucket; it is sent there meanwhile.

    Args:
        argv: Flags of a launcher.
        interval_s: Between the times that something is sent.

    Raises:
        ConfigError: the bucket cannot be used, or a learner is at work in the copy.
        BucketError: at the end, what is left could not be sent.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--run-dir", "--run_dir", default="")
    flags, rest = parser.parse_known_args(argv)
    if not is_bucket(flags.run_dir):
        yield list(argv)
        return
    copy = Copy(flags.run_dir)
    copy.fetch()
    copy.sign()
    _say(f"the run works in {copy.here}, which is sent to {copy.url}")
    ended = threading.Event()
    sender = threading.Thread(target=_keep_sending, args=(copy, ended, interval_s), name="bucket", daemon=True)
    sender.start()
    try:
        yield [*rest, "--run-dir", str(copy.here)]
    finally:
        ended.set()
        sender.join()
        copy.send()


@contextlib.contextmanager
def read(run_dir: str) -> Generator[Path]:
    """A run directory to read, on this machine; what is evaluated in it is sent to its bucket at the end.

    Raises:
        ConfigError: the bucket cannot be used.
        BucketError: at the end, what is new could not be sent.
    """
    if not is_bucket(run_dir):
        yield Path(run_dir)
        return
    copy = Copy(run_dir)
    with contextlib.suppress(rundir.BusyError):  # then what is at work here is as new
        copy.fetch()
    yield copy.here
    copy.send("evaluation.*")


def _keep_sending(copy: Copy, ended: threading.Event, interval_s: float) -> None:
    said = ""
    while not ended.wait(interval_s):
        try:
            copy.send()
        except BucketError as error:
            if str(error) != said:
                said = str(error)
                _say(f"{said}; tried again every {interval_s:g} s")


class Copy:
    """Of a run directory in a bucket, on this machine. For one thread at a time.

    Args:
        url: Of the run directory.
        home: Where the copies of this machine are; by default ~/.cache/seedx/runs.

    Attributes:
        url: Of the run directory.
        here: The copy.

    Raises:
        ConfigError: there is no access to buckets of this kind.
    """

    def __init__(self, url: str, home: Path | None = None) -> None:
        self.url = url.rstrip("/")
        self._there = _path(self.url)
        cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
        name = f"{self.url.rpartition('/')[2]}-{hashlib.sha256(self.url.encode()).hexdigest()[:12]}"
        self.here = (home or cache / "seedx" / "runs") / name
        self._sent: dict[PurePath, tuple[int, int]] = {}

    def fetch(self) -> None:
        """Makes the copy what the bucket has, unless it is one of the same run and as new.

        Raises:
            ConfigError: the bucket cannot be read.
            BusyError: a learner is at work in the copy.
        """
        self.here.mkdir(parents=True, exist_ok=True)
        lock = rundir.claim(self.here)
        try:
            self._fetch()
        except Exception as error:  # whatever a store's library raises
            raise ConfigError(f"{self.url} cannot be fetched: {_told(error)}") from error
        finally:
            os.close(lock)

    def sign(self) -> None:
        """Writes the run's id into the bucket, which shows at once whether anything can be written there.

        Raises:
            ConfigError: nothing can.
        """
        try:
            self._send(PurePath(_ID))
        except Exception as error:
            raise ConfigError(f"{self.url} cannot be written: {_told(error)}") from error

    def send(self, names: str = "*") -> None:
        """Sends what has changed since the last time.

        Args:
            names: A pattern of the files.

        Raises:
            BucketError: something could not be sent.
        """
        if not (self.here / "config.json").exists():  # nothing was begun
            return
        try:
            for name in sorted(self._files(), key=lambda name: name.name == _LAST):
                if name.match(names):
                    self._send(name)
            kept = {path.name for path in rundir.finished_checkpoints(self.here / "checkpoints")}
            for path in self._checkpoints():
                if kept and path.name not in kept:
                    path.rmtree()
        except Exception as error:
            raise BucketError(f"{self.here} could not be sent to {self.url}: {_told(error)}") from error

    def _fetch(self) -> None:
        begun = (self._there / "config.json").exists()
        theirs = (self._there / _ID).read_text() if (self._there / _ID).exists() else ""
        ours = (self.here / _ID).read_text() if (self.here / _ID).exists() else None
        newest = max((int(path.name) for path in self._checkpoints() if (path / _LAST).exists()), default=0)
        if begun and theirs == ours and rundir.newest_update(self.here) >= newest:
            return
        for path in self.here.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        if begun:
            _say(f"fetching {self.url}")
            for name in _names(self._there):
                (self.here / name).parent.mkdir(parents=True, exist_ok=True)
                with (self._there / name).open("rb") as source, (self.here / name).open("wb") as target:
                    shutil.copyfileobj(source, target, 2**24)
                self._sent[name] = _state(self.here / name)
        if not theirs:
            (self.here / _ID).write_text(secrets.token_hex(16))

    def _checkpoints(self) -> list[epath.Path]:
        directory = self._there / "checkpoints"
        return [path for path in directory.iterdir() if path.name.isdigit()] if directory.exists() else []

    def _files(self) -> Iterator[PurePath]:
        """Of the copy, those that belong into the bucket."""
        for path in self.here.rglob("*"):
            name = path.relative_to(self.here)
            unfinished = name.parts[0] == "checkpoints" and not (len(name.parts) > 1 and name.parts[1].isdigit())
            if not unfinished and name.parts[0] != _STAYS and path.suffix != ".tmp" and path.is_file():
                yield PurePath(name)

    def _send(self, name: PurePath) -> None:
        try:
            state = _state(self.here / name)
            if self._sent.get(name) == state:
                return
            (self._there / name).parent.mkdir(parents=True, exist_ok=True)
            with (self.here / name).open("rb") as source, (self._there / name).open("wb") as target:
                shutil.copyfileobj(source, target, 2**24)
        except FileNotFoundError:
            if (self.here / name).exists():
                raise
            return  # the run has dropped it
        self._sent[name] = state


def _state(path: Path) -> tuple[int, int]:
    """Changes when a file does."""
    status = path.stat()
    return status.st_mtime_ns, status.st_size


def _names(directory: epath.Path) -> Iterator[PurePath]:
    """The files below a directory of a bucket, but for those of unfinished checkpoints, and of other hosts' runs."""
    left = [directory]
    while left:
        top = left.pop()
        paths = list(top.iterdir())
        if top != directory and any(path.name == _ID for path in paths):
            continue
        for path in paths:
            if not path.is_dir():
                yield PurePath(path.relative_to(directory))
            elif path.parent.name != "checkpoints" or (path / _LAST).exists():
                left.append(path)


def _path(url: str) -> epath.Path:
    from etils import epath

    try:
        path = epath.Path(url)
        path.exists()
    except ImportError as error:
        raise ConfigError(
            f"--run-dir {url} needs a library ({error}); for gs://: pip install -e '.[gcs]' -c constraints.txt"
        ) from error
    except Exception as error:
        raise ConfigError(f"--run-dir {url} cannot be used: {_told(error)}") from error
    return path


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _say(text: str) -> None:
    with contextlib.suppress(OSError):
        print(f"seedx: {text}", file=sys.stderr, flush=True)

"""A file with one version, in shared memory or on a disk, that can be read while it is written.

Seven words of 8 bytes, at the start of a page of their own: MAGIC; a sequence, odd while a version is written; its
number; the bytes of its manifest; how many bytes of manifest and payloads are there; and two for who writes. A reader
notes the sequence at which the version will be complete, copies what is there, and uses it only if the sequence is that
one in the end: else another version was written meanwhile. x86-64 does not reorder stores, nor loads; elsewhere
checksums tell.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import mmap
import os
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from seedx.transport.assembly import Assembly, Held
from seedx.transport.buffers import Buffers
from seedx.transport.encode import Encoded, pieces
from seedx.transport.errors import CorruptedError, WeightsLostError
from seedx.transport.manifest import WRITER_BYTES, Manifest, VersionId

_MAGIC = 0x3153544857584453  # "SDXWHTS1"
_PAGE = mmap.PAGESIZE
_SEQUENCE, _VERSION, _MANIFEST, _WRITTEN, _WRITER = range(1, 6)
_WORDS = _WRITER + WRITER_BYTES // 8
_FOLLOW_S = 50e-6  # between looks at what is being written
_LOOK_S = 0.1  # between looks whether the writer lives
STALL_S = 30.0


class TornError(Exception):
    """Another version was written meanwhile, or the writer died: look again."""


class SlotWriter:
    """A new file, readable and writable for its owner alone.

    Raises:
        OSError: it is there, or cannot be made.
    """

    def __init__(self, path: Path) -> None:
        self.fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        os.ftruncate(self.fd, _PAGE)
        self._words = np.frombuffer(mmap.mmap(self.fd, _PAGE), np.uint64)[:_WORDS]
        self._data = np.empty(0, np.uint8)
        self._words[0] = _MAGIC

    def write(self, encoded: Encoded) -> None:
        """Replaces what is there.

        Raises:
            OSError: there is no room.
        """
        words, manifest, id_ = self._words, encoded.manifest.to_bytes(), encoded.manifest.id
        self._grow(len(manifest) + encoded.manifest.stream_bytes)
        words[_WRITER:] = np.frombuffer(id_.writer, np.uint64)
        words[_SEQUENCE] += 1
        words[_WRITTEN] = 0
        words[_VERSION] = id_.version
        words[_MANIFEST] = len(manifest)
        written = 0
        for piece in itertools.chain([memoryview(manifest)], pieces(encoded)):
            self._data[written : written + len(piece)] = np.frombuffer(piece, np.uint8)
            written += len(piece)
            words[_WRITTEN] = written
        words[_SEQUENCE] += 1

    def _grow(self, size: int) -> None:
        """Makes room for so many bytes; of memory that is not there, a store would kill the process."""
        if size > self._data.size:
            os.posix_fallocate(self.fd, 0, _PAGE + size)
            self._data = np.frombuffer(mmap.mmap(self.fd, _PAGE + size), np.uint8)[_PAGE:]

    def is_read(self) -> bool:
        """Whether a reader copies it."""
        try:
            fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        fcntl.flock(self.fd, fcntl.LOCK_UN)
        return False

    def close(self) -> None:
        """The file stays."""
        os.close(self.fd)


class SlotReader:
    """An open slot.

    Args:
        path: Of the file.

    Raises:
        OSError: it is not there.
        WeightsLostError: it is no slot, or another user's.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            status = os.fstat(self._fd)
            if status.st_uid != os.geteuid():
                raise WeightsLostError(f"{path} belongs to user {status.st_uid}, not to {os.geteuid()}.")
            if status.st_size < _PAGE:
                raise WeightsLostError(
                    f"{path} has {status.st_size} bytes, fewer than a page: it holds no weights yet."
                )
            self._words = np.frombuffer(mmap.mmap(self._fd, _PAGE, prot=mmap.PROT_READ), np.uint64)[:_WORDS]
            self._data = np.empty(0, np.uint8)
            if self._words[0] != _MAGIC:
                raise WeightsLostError(f"{path} holds no weights.")
        except BaseException:
            os.close(self._fd)
            raise
        self._inode = status.st_ino

    def is_there(self) -> bool:
        """Whether the file still has its name: another publisher makes others."""
        try:
            return os.stat(self._path, follow_symlinks=False).st_ino == self._inode
        except FileNotFoundError:
            return False

    def id(self) -> VersionId | None:
        """What is there, or is written; None: nothing."""
        if not self._words[_SEQUENCE]:
            return None
        return VersionId(self._words[_WRITER:].tobytes(), int(self._words[_VERSION]))

    def read(
        self,
        buffers: Buffers,
        check: Callable[[Manifest], None],
        is_written: Callable[[], bool],
    ) -> tuple[Manifest, Held]:
        """The version that is there, or is written.

        Args:
            buffers: Memory for the tensors.
            check: Raises if the reader does not want it.
            is_written: Whether the writer lives.

        Raises:
            TornError: another version was written meanwhile, or the writer died.
            CorruptedError: it is not what was published.
            WeightsLostError: the writer stopped in the middle of it.
        """
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(self._fd, fcntl.LOCK_SH | fcntl.LOCK_NB)  # asks the writer to wait; ends with this process
        try:
            return self._read(buffers, check, is_written)
        except CorruptedError:
            if self._torn:
                raise TornError from None
            raise
        finally:
            fcntl.flock(self._fd, fcntl.LOCK_UN)

    def close(self) -> None:
        """Reads no more."""
        os.close(self._fd)

    def _read(
        self,
        buffers: Buffers,
        check: Callable[[Manifest], None],
        is_written: Callable[[], bool],
    ) -> tuple[Manifest, Held]:
        self._complete = (int(self._words[_SEQUENCE]) + 1) // 2 * 2
        self._is_written = is_written
        self._await(1)
        message = np.empty(min(int(self._words[_MANIFEST]), os.fstat(self._fd).st_size), np.uint8)
        self._await(message.size)
        self._copy(message, 0)
        manifest = Manifest.from_bytes(message.tobytes())
        check(manifest)
        assembly, done = Assembly(manifest, None, buffers), message.size
        while (space := assembly.space()) is not None:
            space = space[: max(self._await(done + 1) - done, 0)]
            self._copy(space, done)
            assembly.advance(space.size)
            done += space.size
        self._await(done + 1)  # the end of the writing
        if self._torn:
            raise TornError
        return manifest, assembly.finish()

    @property
    def _torn(self) -> bool:
        return int(self._words[_SEQUENCE]) > self._complete

    def _await(self, least: int) -> int:
        """How many bytes of the version are there, once they are as many, or all."""
        began = looked = time.monotonic()
        while True:
            sequence, written = int(self._words[_SEQUENCE]), int(self._words[_WRITTEN])
            if sequence > self._complete:
                raise TornError
            if written >= least or sequence == self._complete:
                return written
            now = time.monotonic()
            if now - looked > _LOOK_S:
                looked = now
                if not (self.is_there() and self._is_written()):
                    raise TornError
            if now - began > STALL_S:
                raise WeightsLostError(f"the publisher stopped in the middle of a version in {self._path}.")
            time.sleep(_FOLLOW_S)

    def _copy(self, into: np.ndarray, start: int) -> None:
        end = start + into.size
        if end > self._data.size:
            self._data = np.frombuffer(mmap.mmap(self._fd, 0, prot=mmap.PROT_READ), np.uint8)[_PAGE:]
        if end > self._data.size or not into.size:
            raise CorruptedError(f"{self._path} has only {self._data.size} bytes, not {max(end, start + 1)}")
        into[:] = self._data[start:end]

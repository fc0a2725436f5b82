"""The files of a snapshot: chunks of items, each written once, and the index that names them.

    DIR/chunk-<number>   items one after the other, each the bytes of its leaves
    DIR/index            SHA-256 of what follows it; then arrays as np.save writes them, the first of which is JSON

Invariant: an index names only what was forced to disk before, and replaces the one before it as a whole. So whenever a
process is killed, or the machine, the index that is there is good, and so are its chunks.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np


class DamagedError(ValueError):
    """A file is not as it was written; the message says how."""


class Chunk(NamedTuple):
    """A chunk as it should be."""

    rows: int
    sha256: str


def write_chunk(directory: Path, number: int, pieces: Iterable[np.ndarray]) -> Chunk:
    """Writes a new chunk and forces it to disk.

    Args:
        directory: Is made if need be.
        number: Of no chunk that is there.
        pieces: Records of one dtype, `[N]` each, used up before the next one is asked for.

    Raises:
        OSError: it could not be written, and is not there.
    """
    path, digest, rows = _chunk_path(directory, number), hashlib.sha256(), 0
    directory.mkdir(parents=True, exist_ok=True)
    try:
        with path.open("xb") as file:
            for piece in pieces:
                data = piece.view(np.uint8).data
                file.write(data)
                digest.update(data)
                rows += len(piece)
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        path.unlink(missing_ok=True)
        raise
    return Chunk(rows, digest.hexdigest())


def read_chunk(directory: Path, number: int, chunk: Chunk, record: np.dtype) -> np.ndarray:
    """The records of a chunk, `[rows]`.

    Raises:
        DamagedError: they are not those that were written.
    """
    path = _chunk_path(directory, number)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise DamagedError(f"{path} cannot be read ({error.strerror})") from error
    if hashlib.sha256(data).hexdigest() != chunk.sha256 or len(data) != chunk.rows * record.itemsize:
        raise DamagedError(f"{path} is not as it was written")
    return np.frombuffer(data, record)


def write_index(directory: Path, values: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
    """Puts an index in the place of the one before.

    Args:
        directory: With all chunks that the index names; is made if there are none.
        values: What JSON can hold.
        arrays: Of numbers.

    Raises:
        OSError: it could not be written; the one before is still there, or this one is.
    """
    parts = io.BytesIO()
    text = json.dumps({"values": values, "arrays": list(arrays)})
    for array in (np.frombuffer(text.encode(), np.uint8), *arrays.values()):
        np.save(parts, array, allow_pickle=False)
    data = parts.getbuffer()
    path = directory / "index"
    temporary = directory / "index.tmp"
    directory.mkdir(parents=True, exist_ok=True)
    with temporary.open("wb") as file:
        file.write(hashlib.sha256(data).digest())
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    _force(directory)  # the chunks' names, before they are named
    os.replace(temporary, path)
    _force(directory)


def read_index(directory: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The values and arrays of the index.

    Raises:
        FileNotFoundError: there is none.
        DamagedError: it is not as it was written.
    """
    path = directory / "index"
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise
    except OSError as error:
        raise DamagedError(f"{path} cannot be read ({error.strerror})") from error
    digest, data = content[:32], content[32:]
    if hashlib.sha256(data).digest() != digest:
        raise DamagedError(f"{path} is not as it was written")
    parts = io.BytesIO(data)
    found = json.loads(np.load(parts, allow_pickle=False).tobytes())
    return found["values"], {name: np.load(parts, allow_pickle=False) for name in found["arrays"]}


def chunk_sizes(directory: Path) -> dict[int, int]:
    """Number and bytes of each chunk that is there, named or not."""
    paths = {path.name.removeprefix("chunk-"): path for path in directory.glob("chunk-*")}
    return {int(number): path.stat().st_size for number, path in paths.items() if number.isdigit()}


def remove_chunks(directory: Path, keep: Collection[int]) -> None:
    """Removes all chunks but those to keep."""
    for number in chunk_sizes(directory).keys() - set(keep):
        _chunk_path(directory, number).unlink()


def _chunk_path(directory: Path, number: int) -> Path:
    return directory / f"chunk-{number}"


def _force(directory: Path) -> None:
    """Forces the names in a directory to disk."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

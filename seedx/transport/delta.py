"""What changed between two versions of a tensor, bit for bit.

Two encodings: the indices and values of the elements whose bits changed, or both versions XORed and compressed. Equal
bits count, not equal values, so NaNs with their payloads and -0.0 come out as they went in. An XOR is compressed in
blocks, of each block first every element's lowest byte, then the next ones: the higher ones are mostly zero.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator

import numpy as np

from seedx.transport import transport_pb2 as pb
from seedx.transport.errors import CorruptedError
from seedx.transport.tree import bytes_of

_BLOCK = 2**20  # elements
_INDEX = np.dtype("<u4")
_LEVEL = 1


def encode(base: np.ndarray, new: np.ndarray) -> tuple[int, bytes] | None:
    """Encoding and payload of what changed; None if the tensor itself is no larger.

    Args:
        base: What the reader has, C order.
        new: Of the same dtype and shape.
    """
    before, after = _bits(base), _bits(new)
    count = sum(int(np.count_nonzero(a != b)) for _, a, b in _blocks(before, after))
    if not count:
        return pb.Tensor.UNCHANGED, b""
    sparse_bytes = count * (_INDEX.itemsize + new.itemsize)
    sparse_fits = sparse_bytes < new.nbytes and after.size <= 2**32
    xor = _xor(before, after, sparse_bytes if sparse_fits else new.nbytes)
    if xor is not None:
        return pb.Tensor.XOR, xor
    return (pb.Tensor.SPARSE, _sparse(before, after)) if sparse_fits else None


def _sparse(before: np.ndarray, after: np.ndarray) -> bytes:
    found = [(start + np.flatnonzero(a != b)).astype(_INDEX) for start, a, b in _blocks(before, after)]
    indices = np.concatenate(found)
    return indices.tobytes() + after[indices].tobytes()


def _xor(before: np.ndarray, after: np.ndarray, limit: int) -> bytes | None:
    """The compressed XOR; None if it has `limit` bytes or more."""
    compressor, parts, size = zlib.compressobj(_LEVEL), [], 0
    for _, a, b in _blocks(before, after):
        parts.append(compressor.compress(np.ascontiguousarray(_planes(a ^ b).T).data))
        size += len(parts[-1])
        if size >= limit:
            return None
    parts.append(compressor.flush())
    return b"".join(parts) if size + len(parts[-1]) < limit else None


def apply(encoding: int, payload: np.ndarray, array: np.ndarray) -> None:
    """Makes the new version of a tensor.

    Args:
        encoding: SPARSE or XOR.
        payload: uint8 `[n]`.
        array: A copy of the base that `encode` was given, C order; changed in place.

    Raises:
        CorruptedError: the payload does not fit.
    """
    bits = _bits(array)
    if encoding == pb.Tensor.SPARSE:
        count, rest = divmod(payload.size, _INDEX.itemsize + array.itemsize)
        indices = payload[: count * _INDEX.itemsize].view(_INDEX)
        if rest or (count and indices.max() >= bits.size):
            raise CorruptedError(f"a sparse delta of {payload.size} bytes does not fit {bits.size} elements")
        bits[indices] = np.frombuffer(payload[count * _INDEX.itemsize :].tobytes(), bits.dtype)
        return
    unpacked = np.frombuffer(_decompressed(payload, array.nbytes), np.uint8)
    for start, block, _ in _blocks(bits, bits):
        planes = unpacked[start * array.itemsize :][: block.nbytes].reshape(array.itemsize, -1)
        _planes(block)[:] ^= planes.T


def _decompressed(payload: np.ndarray, size: int) -> bytes:
    stream = zlib.decompressobj()
    try:
        unpacked = stream.decompress(payload.data, size + 1)
    except zlib.error as error:
        raise CorruptedError(f"a compressed delta cannot be read ({error})") from None
    if len(unpacked) != size or not stream.eof or stream.unused_data:
        raise CorruptedError(f"a compressed delta has not the {size} bytes of its tensor")
    return unpacked


def _bits(array: np.ndarray) -> np.ndarray:
    return array.reshape(-1).view(f"<u{array.itemsize}")


def _planes(bits: np.ndarray) -> np.ndarray:
    return bytes_of(bits).reshape(-1, bits.itemsize)


def _blocks(before: np.ndarray, after: np.ndarray) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    for start in range(0, before.size, _BLOCK):
        yield start, before[start : start + _BLOCK], after[start : start + _BLOCK]

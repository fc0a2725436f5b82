"""Writes small GGUF files for tests, after ggml/docs/gguf.md; version 3."""

import struct

import numpy as np

ALIGNMENT = 32


def string(text):
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def value(item):
    """A key's value with its type: bool, int (uint32), float (float32), str, or a list of str or int32."""
    match item:
        case bool():
            return struct.pack("<IB", 7, item)
        case int():
            return struct.pack("<II", 4, item)
        case float():
            return struct.pack("<If", 6, item)
        case str():
            return struct.pack("<I", 8) + string(item)
        case [str(), *_]:
            return struct.pack("<IIQ", 9, 8, len(item)) + b"".join(map(string, item))
        case list():
            return struct.pack("<IIQ", 9, 5, len(item)) + np.array(item, "<i4").tobytes()
    raise TypeError(item)


def write(path, metadata, tensors):
    """`tensors`: name to a float32 array, or to (shape in NumPy's order, type's number, bytes of the blocks)."""
    infos, blobs, offset = b"", b"", 0
    for name, tensor in tensors.items():
        if isinstance(tensor, np.ndarray):
            tensor = tensor.shape, 0, tensor.astype("<f4").tobytes()
        shape, kind, raw = tensor
        infos += string(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *reversed(shape), kind, offset)
        blobs += raw + bytes(-len(raw) % ALIGNMENT)
        offset = len(blobs)
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata))
    head += b"".join(string(key) + value(item) for key, item in metadata.items()) + infos
    path.write_bytes(head + bytes(-len(head) % ALIGNMENT) + blobs)

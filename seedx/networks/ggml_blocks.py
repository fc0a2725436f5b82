"""GGML's block formats as float32: weights in blocks that share a scale. NumPy alone.

Layouts: ggml-common.h and ggml-quants.c of llama.cpp. All numbers are little-endian.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

_Blocks = np.ndarray  # [n] of a structured dtype


class BlockFormat(NamedTuple):
    """How a type stores `size` weights in one record, and how `n` records become float32 `[n, size]`."""

    name: str
    size: int
    record: np.dtype
    values: Callable[[_Blocks], np.ndarray]


def _column(blocks: _Blocks, field: str) -> np.ndarray:
    """A field that a block has one of, `[n, 1]` float32."""
    return blocks[field].astype(np.float32)[:, None]


def _halves(nibbles: np.ndarray) -> np.ndarray:
    """`[..., k]` bytes to `[..., 2k]`: all low halves before all high ones."""
    return np.concatenate([nibbles & 15, nibbles >> 4], axis=-1)


def _bits(words: np.ndarray) -> np.ndarray:
    """`[n, 4]` bytes to `[n, 32]` bits, lowest first."""
    return np.unpackbits(words, axis=-1, bitorder="little")


def _q4_0(blocks: _Blocks) -> np.ndarray:
    return _column(blocks, "scale") * (_halves(blocks["low"]).astype(np.float32) - 8)


def _q4_1(blocks: _Blocks) -> np.ndarray:
    return _column(blocks, "scale") * _halves(blocks["low"]).astype(np.float32) + _column(blocks, "least")


def _five_bits(blocks: _Blocks) -> np.ndarray:
    return (_halves(blocks["low"]) | _bits(blocks["high"]) << 4).astype(np.float32)


def _q5_0(blocks: _Blocks) -> np.ndarray:
    return _column(blocks, "scale") * (_five_bits(blocks) - 16)


def _q5_1(blocks: _Blocks) -> np.ndarray:
    return _column(blocks, "scale") * _five_bits(blocks) + _column(blocks, "least")


def _q8_0(blocks: _Blocks) -> np.ndarray:
    return _column(blocks, "scale") * blocks["low"].astype(np.float32)


def _subscales(packed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """8 scales and 8 minima of six bits each, `[n, 8]`, from 12 bytes.

    The first four of each are the low six bits of bytes 0-3 and 4-7; of the last four, bytes 8-11 hold four bits and
    the top two bits of bytes 0-7 the rest.
    """
    first, second, rest = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = np.concatenate([first & 63, rest & 15 | first >> 6 << 4], axis=-1)
    minima = np.concatenate([second & 63, rest >> 4 | second >> 6 << 4], axis=-1)
    return scales, minima


def _k_values(blocks: _Blocks, weights: np.ndarray) -> np.ndarray:
    """Weights `[n, 8, 32]` of Q4_K and Q5_K, scaled and shifted by their sub-blocks."""
    subscales, minima = _subscales(blocks["subscales"])
    scale = (_column(blocks, "scale") * subscales.astype(np.float32))[..., None]
    least = (_column(blocks, "least") * minima.astype(np.float32))[..., None]
    return (scale * weights.astype(np.float32) - least).reshape(len(blocks), 256)


def _nibble_rows(blocks: _Blocks) -> np.ndarray:
    """`[n, 8, 32]`: each 32 bytes hold the low half of one sub-block and of the next."""
    return _halves(blocks["low"].reshape(-1, 4, 32)).reshape(-1, 8, 32)


def _q4_k(blocks: _Blocks) -> np.ndarray:
    return _k_values(blocks, _nibble_rows(blocks))


def _q5_k(blocks: _Blocks) -> np.ndarray:
    high = np.unpackbits(blocks["high"][:, None, :], axis=1, bitorder="little")  # bit j of byte i: weight i of row j
    return _k_values(blocks, _nibble_rows(blocks) | high << 4)


def _q6_k(blocks: _Blocks) -> np.ndarray:
    low = _halves(blocks["low"].reshape(-1, 2, 64)).reshape(-1, 2, 4, 32)
    high = blocks["high"].reshape(-1, 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3
    weights = (low | high << 4).reshape(-1, 16, 16).astype(np.float32) - 32
    scale = _column(blocks, "scale") * blocks["subscales"].astype(np.float32)
    return (scale[..., None] * weights).reshape(len(blocks), 256)


def _bfloat16(blocks: _Blocks) -> np.ndarray:
    return (blocks["low"].astype(np.uint32) << 16).view(np.float32)[:, None]


def _format(name: str, size: int, values: Callable[[_Blocks], np.ndarray], **fields: str) -> BlockFormat:
    return BlockFormat(name, size, np.dtype(list(fields.items())), values)


# By the number that a GGUF file calls it.
FORMATS = {
    0: _format("F32", 1, lambda blocks: _column(blocks, "low"), low="<f4"),
    1: _format("F16", 1, lambda blocks: _column(blocks, "low"), low="<f2"),
    2: _format("Q4_0", 32, _q4_0, scale="<f2", low="16u1"),
    3: _format("Q4_1", 32, _q4_1, scale="<f2", least="<f2", low="16u1"),
    6: _format("Q5_0", 32, _q5_0, scale="<f2", high="4u1", low="16u1"),
    7: _format("Q5_1", 32, _q5_1, scale="<f2", least="<f2", high="4u1", low="16u1"),
    8: _format("Q8_0", 32, _q8_0, scale="<f2", low="32i1"),
    12: _format("Q4_K", 256, _q4_k, scale="<f2", least="<f2", subscales="12u1", low="128u1"),
    13: _format("Q5_K", 256, _q5_k, scale="<f2", least="<f2", subscales="12u1", high="32u1", low="128u1"),
    14: _format("Q6_K", 256, _q6_k, low="128u1", high="64u1", subscales="16i1", scale="<f2"),
    30: _format("BF16", 1, _bfloat16, low="<u2"),
}
# fmt: off
TYPE_NAMES = [  # of the numbers from 0; None was given up
    "F32", "F16", "Q4_0", "Q4_1", None, None, "Q5_0", "Q5_1", "Q8_0", "Q8_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K",
    "Q8_K", "IQ2_XXS", "IQ2_XS", "IQ3_XXS", "IQ1_S", "IQ4_NL", "IQ3_S", "IQ2_S", "IQ4_XS", "I8", "I16", "I32", "I64",
    "F64", "IQ1_M", "BF16", None, None, None, "TQ1_0", "TQ2_0", None, None, None, "MXFP4",
]
# fmt: on


def dequantize(raw: np.ndarray, block_format: BlockFormat) -> np.ndarray:
    """Float32 `[number of blocks * size]` from the blocks' bytes, uint8 in C order."""
    return block_format.values(raw.view(block_format.record)).reshape(-1)

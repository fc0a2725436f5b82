"""Writes golden/ggml_blocks.npz: random blocks of every type, and what llama.cpp's `gguf` package makes of them.

pip install gguf==0.19.0
python tests/record_ggml_blocks.py
"""

from pathlib import Path

import gguf
import numpy as np

BLOCKS = 6
FILE = Path(__file__).parent / "golden" / "ggml_blocks.npz"
# Where a block has float16 scales: they are drawn finite, all other bytes at random.
SCALES = {"F32": (), "F16": (0,), "BF16": (), "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,)}
SCALES |= {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}


def main():
    rng, arrays = np.random.default_rng(0), {}
    for name, places in SCALES.items():
        kind = gguf.GGMLQuantizationType[name]
        raw = rng.integers(0, 256, (BLOCKS, gguf.GGML_QUANT_SIZES[kind][1]), dtype=np.uint8)
        for place in places:
            raw[:, place : place + 2] = rng.normal(size=(BLOCKS, 1)).astype("<f2").view(np.uint8)
        if name in ("F32", "BF16"):
            raw[:, -1] &= 0xBF  # no NaN
        arrays[f"{name}.raw"] = raw
        arrays[f"{name}.values"] = gguf.quants.dequantize(raw, kind).astype(np.float32)
    np.savez_compressed(FILE, **arrays)


if __name__ == "__main__":
    main()

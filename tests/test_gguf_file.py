import contextlib
import struct
from pathlib import Path

import gguf_writer
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from seedx.networks.ggml_blocks import FORMATS, dequantize
from seedx.networks.gguf_file import GgufFile
from seedx.networks.model_error import ModelError

METADATA = {
    "general.architecture": "llama",
    "llama.block_count": 2,
    "llama.eps": 1e-5,
    "tokenizer.ggml.add_bos_token": False,
    "tokenizer.ggml.tokens": ["<s>", "é"],
    "tokenizer.ggml.token_type": [3, 1],
}
MATRIX = np.arange(12, dtype=np.float32).reshape(3, 4)
Q8_0 = struct.pack("<e32b", 0.5, *range(-16, 16))  # one block


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("gguf") / "small.gguf"
    gguf_writer.write(path, METADATA, {"matrix": MATRIX, "row": ((32,), 8, Q8_0)})
    return path


@pytest.fixture(scope="module")
def golden():
    return np.load(Path(__file__).parent / "golden" / "ggml_blocks.npz")


@pytest.mark.parametrize("block_format", FORMATS.values(), ids=lambda block_format: block_format.name)
def test_blocks_become_what_llama_cpp_makes_of_them(golden, block_format):
    raw, values = golden[f"{block_format.name}.raw"], golden[f"{block_format.name}.values"]
    assert values.shape == (6, block_format.size)
    found = dequantize(raw.reshape(-1), block_format)
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found.view(np.uint32), values.reshape(-1).view(np.uint32))


def test_metadata_and_tensors(path):
    file = GgufFile(path)
    assert list(file.metadata) == list(METADATA)
    assert file.metadata["llama.eps"] == pytest.approx(1e-5)
    assert file.metadata["tokenizer.ggml.add_bos_token"] is False
    np.testing.assert_array_equal(file.metadata["tokenizer.ggml.token_type"], [3, 1])
    assert {key: file.metadata[key] for key in ("llama.block_count", "tokenizer.ggml.tokens")} == {
        "llama.block_count": 2,
        "tokenizer.ggml.tokens": ["<s>", "é"],
    }
    np.testing.assert_array_equal(file.tensor("matrix"), MATRIX)
    np.testing.assert_array_equal(file.tensor("row"), np.arange(-16, 16) / 2)


def test_every_truncation_is_refused(path, tmp_path):
    whole, cut = path.read_bytes(), tmp_path / "cut.gguf"
    padding = -len(Q8_0) % gguf_writer.ALIGNMENT  # after the last tensor: not needed
    for size in range(len(whole) - padding):
        cut.write_bytes(whole[:size])
        with pytest.raises(ModelError, match=r"truncated|cannot be opened"):
            GgufFile(cut)


@given(data=st.data())
def test_a_damaged_byte_is_refused_or_read(path, tmp_path_factory, data):
    """No other exception, and no allocation of what was never there."""
    damaged = bytearray(path.read_bytes())
    damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    target = tmp_path_factory.getbasetemp() / "damaged.gguf"
    target.write_bytes(damaged)
    with contextlib.suppress(ModelError), np.errstate(invalid="ignore"):
        file = GgufFile(target)
        assert {name: file.tensor(name).shape for name in file.tensors} == {
            name: info.shape for name, info in file.tensors.items()
        }


def tensors_of(name="w", shape=(32,), kind=8, raw=Q8_0):
    return {name: (shape, kind, raw)}


@pytest.mark.parametrize(
    ("metadata", "tensors", "message"),
    [
        ({}, tensors_of(kind=17), r"tensor 'w' is of type IQ2_XS, which is not supported\. Use a file with F32, F16"),
        ({}, tensors_of(kind=99), r"tensor 'w' is of type 99"),
        ({}, tensors_of(shape=(1, 33)), r"tensor 'w' has the shape \[33, 1\]; Q8_0 stores rows in blocks of 32"),
        ({}, tensors_of(shape=(1, 1, 1, 1, 32)), r"tensor 'w' has 5 dimensions; 1 to 4"),
        ({}, tensors_of(shape=(2**60, 32)), r"tensor 'w' ends at byte \d+, but the file at"),
        ({"general.alignment": 0}, {}, r"general.alignment \(0\) must be a positive integer"),
        ({"general.alignment": 64}, {"a": MATRIX[:1], "w": MATRIX[:1]}, r"'w' has the offset 32, which is no multiple"),
    ],
)
def test_what_is_wrong_is_said(tmp_path, metadata, tensors, message):
    path = tmp_path / "wrong.gguf"
    gguf_writer.write(path, metadata, tensors)
    with pytest.raises(ModelError, match=message):
        GgufFile(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"PK\3\4" + bytes(60), "no GGUF file"),
        (b"GGUF" + struct.pack("<I", 1) + bytes(60), "version 1 is not supported"),
        (b"GGUF" + struct.pack(">I", 3) + bytes(60), "big-endian"),
        (b"", "cannot be opened"),
        (
            b"GGUF" + struct.pack("<IQQ", 3, 0, 2) + 2 * (gguf_writer.string("k") + gguf_writer.value(1)),
            "key 'k' comes twice",
        ),
    ],
)
def test_other_files_are_refused(tmp_path, content, message):
    path = tmp_path / "other.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=message):
        GgufFile(path)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(ModelError, match=r"none\.gguf cannot be opened"):
        GgufFile(tmp_path / "none.gguf")

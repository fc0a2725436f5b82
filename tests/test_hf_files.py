"""Hugging Face models: logits as `transformers` has them, round trips to the bit; what is malformed is refused."""

import json
import struct
from pathlib import Path

import hf_directories
import jax
import jax.numpy as jnp
import numpy as np
import parity_cases
import pytest

from seedx.networks import safetensors_files
from seedx.networks.hf_config import from_hf, to_hf
from seedx.networks.hf_files import load_hf, save_hf
from seedx.networks.model_error import ModelError
from seedx.networks.transformer_config import TransformerConfig

RECORDED = np.load(Path(__file__).parent / "golden" / "logits.npz")


@pytest.mark.parametrize("case", parity_cases.CASES)
def test_logits_are_those_of_transformers(tmp_path, case):
    hf_directories.write_case(tmp_path, case)
    config, params = load_hf(tmp_path)
    assert np.abs(hf_directories.logits(config, params, case) - RECORDED[case]).max() <= 1e-4


def test_every_recorded_case_is_compared():
    assert set(RECORDED) == set(parity_cases.CASES)


@pytest.mark.parametrize("case", parity_cases.CASES)
def test_a_config_survives_the_round_trip(case):
    config = from_hf(parity_cases.CASES[case])
    assert from_hf(json.loads(json.dumps(to_hf(config)))) == config
    assert to_hf(config)["architectures"] == parity_cases.CASES[case]["architectures"] or case == "mistral_full"


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16, np.float16])
@pytest.mark.parametrize(("case", "shard_bytes"), [("qwen2", 10**9), ("gemma3", 3000), ("qwen3", 3000)])
def test_weights_survive_the_round_trip_to_the_bit(tmp_path, case, shard_bytes, dtype):
    tensors = hf_directories.write_case(tmp_path / "a", case, dtype)
    config, params = load_hf(tmp_path / "a", dtype=dtype)
    save_hf(tmp_path / "b", config, params, max_shard_bytes=shard_bytes)
    files = sorted((tmp_path / "b").glob("*.safetensors"))
    assert (len(files) > 1) == (shard_bytes == 3000)
    stored = {name: at.read() for file in files for name, at in safetensors_files.read_header(file).items()}
    assert stored.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert stored[name].dtype == tensor.dtype
        np.testing.assert_array_equal(stored[name].view(np.uint8), tensor.view(np.uint8))
    again, back = load_hf(tmp_path / "b", dtype=dtype)
    assert again == config
    jax.tree.map(np.testing.assert_array_equal, back, params)


def test_another_dtype_is_rounded_once(tmp_path):
    hf_directories.write_case(tmp_path, "llama")
    _, whole = load_hf(tmp_path)
    _, half = load_hf(tmp_path, dtype=jnp.bfloat16)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a.astype(jnp.bfloat16), b), whole, half)


def test_all_tensors_that_do_not_fit_are_named(tmp_path):
    tensors = hf_directories.write_case(tmp_path, "llama")
    del tensors["model.norm.weight"]
    tensors["model.layers.1.mlp.up_proj.weight"] = np.zeros((3, 32), np.float32)
    tensors["model.layers.2.mlp.up_proj.weight"] = np.zeros((48, 32), np.float32)
    hf_directories.write_directory(tmp_path, parity_cases.CASES["llama"], tensors)
    with pytest.raises(ModelError) as refusal:
        load_hf(tmp_path)
    for part in (
        "3 tensors",
        "missing model.norm.weight [32]",
        "unexpected model.layers.2.mlp.up_proj.weight [48, 32]",
        "model.layers.1.mlp.up_proj.weight has shape [3, 32], not [48, 32]",
    ):
        assert part in str(refusal.value)


def test_the_text_part_of_a_multimodal_gemma_is_a_model(tmp_path):
    tensors = hf_directories.write_case(tmp_path / "text", "gemma3")
    _, params = load_hf(tmp_path / "text")
    raw = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": parity_cases.CASES["gemma3"]}
    raw |= {"vision_config": {"hidden_size": 8}, "model_type": "gemma3"}
    vision = {"vision_tower.x": np.zeros(3, np.float32), "multi_modal_projector.y": np.zeros(3, np.float32)}
    for prefix, name in (("old", "language_model.{}"), ("new", "model.language_model.{}")):
        names = {name.format(key if prefix == "old" else key.removeprefix("model.")): t for key, t in tensors.items()}
        hf_directories.write_directory(tmp_path / prefix, raw, names | vision)
        assert jax.tree.all(jax.tree.map(np.array_equal, load_hf(tmp_path / prefix)[1], params)), prefix


@pytest.mark.parametrize(
    ("case", "change", "said"),
    [
        ("llama", {"architectures": ["MambaForCausalLM"]}, "architectures.*Mamba"),
        ("llama", {"hidden_act": "relu"}, "hidden_act.*relu"),
        ("llama", {"attention_bias": True}, "attention_bias.*True"),
        ("llama", {"mlp_bias": True}, "mlp_bias.*True"),
        ("llama", {"quantization_config": {"bits": 4}}, "quantization_config.*4"),
        ("llama", {"some_new_field": 3}, "some_new_field.*3"),
        ("llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type 'dynamic'"),
        ("llama", {"rope_scaling": {"rope_type": "linear"}}, "lacks the field rope_parameters.factor"),
        ("llama", {"rope_scaling": {"type": "linear", "factor": 2.0, "x": 1}}, "rope_parameters.x.*1"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor.*0.5"),
        ("llama", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor.*0.5"),
        ("qwen3", {"attention_bias": True}, "attention_bias.*True"),
        ("qwen2", {"layer_types": ["linear_attention"] * 3}, "layer_types.*linear_attention"),
        ("gemma2", {"hidden_activation": "gelu"}, "hidden_activation.*gelu"),
        ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention.*True"),
        (
            "gemma3",
            {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}},
            "sliding_attention.*linear",
        ),
    ],
)
def test_a_field_that_is_not_supported_is_named_with_its_value(case, change, said):
    with pytest.raises(ModelError, match=said):
        from_hf(parity_cases.CASES[case] | change)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"hidden_size": "64"}, r"hidden_size \('64'\) must be a positive integer"),
        ({"num_hidden_layers": None}, r"num_hidden_layers \(None\)"),
        ({"num_attention_heads": 0}, r"num_attention_heads \(0\)"),
        ({"head_dim": 8.0}, r"head_dim \(8.0\)"),
        ({"rope_theta": "much"}, "wrong kind"),
        ({"architectures": 3}, "wrong kind"),
    ],
)
def test_a_value_of_the_wrong_kind_is_refused(change, said):
    with pytest.raises(ModelError, match=said):
        from_hf(parity_cases.CASES["llama"] | change)


def test_a_missing_field_is_named():
    raw = {name: value for name, value in parity_cases.CASES["llama"].items() if name != "hidden_size"}
    with pytest.raises(ModelError, match="lacks the field hidden_size"):
        from_hf(raw)


def test_settings_of_no_family_are_not_saved(tmp_path):
    config = TransformerConfig(8, 8, 1, 2, 1, 4, 8, attention_bias=True, qk_norm=True)
    with pytest.raises(ModelError, match="No architecture"):
        save_hf(tmp_path, config, {})


def described(**header):
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text


ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"abc", "3 bytes, fewer than the 8"),
        (struct.pack("<Q", 100) + b"{}", "its header should have 100"),
        (struct.pack("<Q", 2**63) + b"{}", "its header should have 9223372036854775808"),
        (struct.pack("<Q", 2) + b"{]", "not JSON"),
        (struct.pack("<Q", 2) + b"\xff\xff", "not JSON"),
        (struct.pack("<Q", 2) + b"[]", "not a JSON object"),
        (struct.pack("<Q", 15) + b'{"a":{},"a":{}}', "twice"),
        (described(a=3), "tensor a is described by 3"),
        (described(a=ENTRY | {"data_offsets": [0]}), "tensor a is described by"),
        (described(a=ENTRY | {"shape": [-2]}), r"tensor a has shape \[-2\]"),
        (described(a=ENTRY | {"shape": [3]}) + bytes(8), r"cannot have the bytes 0 to 8"),
        (described(a=ENTRY | {"data_offsets": [-8, 0]}) + bytes(8), r"cannot have the bytes -8 to 0"),
        (described(a=ENTRY | {"dtype": "F8_E4M3"}), "dtype F8_E4M3"),
        (described(a=ENTRY), "its header describes"),
        (described(a=ENTRY) + bytes(7), "its header describes"),
        (described(a=ENTRY) + bytes(9), "its header describes"),
        (described(a=ENTRY, b=ENTRY | {"data_offsets": [4, 12]}) + bytes(12), "b starts at byte 4.*overlaps"),
        (described(a=ENTRY, b=ENTRY | {"data_offsets": [12, 20]}) + bytes(20), "b starts at byte 12.*hole"),
    ],
)
def test_a_malformed_file_is_refused_with_what_is_wrong(tmp_path, content, said):
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=said):
        safetensors_files.read_header(path)


def index_of(path):
    file = path / "model.safetensors.index.json"
    return file, json.loads(file.read_text())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda path, index: index.pop("weight_map"), "must have a weight_map"),
        (lambda path, index: index["weight_map"].update(x="../secret"), "files beside it"),
        (lambda path, index: index["weight_map"].update(x="gone.safetensors"), "gone.safetensors, which is not there"),
        (lambda path, index: index["weight_map"].update({"x": next(iter(index["weight_map"].values()))}), "lack: x"),
        (lambda path, index: index["weight_map"].pop("model.norm.weight"), "has model.norm.weight.*None"),
        (lambda path, index: (path / "config.json").unlink(), "config.json cannot be read"),
        (lambda path, index: (path / "config.json").write_text("["), "config.json is not JSON"),
    ],
)
def test_a_wrong_index_is_refused(tmp_path, change, said):
    hf_directories.write_case(tmp_path / "a", "llama")
    save_hf(tmp_path / "b", *load_hf(tmp_path / "a"), max_shard_bytes=10_000)
    file, index = index_of(tmp_path / "b")
    change(tmp_path / "b", index)
    file.write_text(json.dumps(index))
    with pytest.raises(ModelError, match=said):
        load_hf(tmp_path / "b")


def test_a_directory_without_weights_is_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(parity_cases.CASES["llama"]))
    with pytest.raises(ModelError, match=r"neither model.safetensors nor model.safetensors.index.json"):
        load_hf(tmp_path)

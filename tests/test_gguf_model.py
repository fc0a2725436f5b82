import dataclasses

import gguf_writer
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from seedx import sharding
from seedx.config import LearnerConfig
from seedx.networks import rope
from seedx.networks.gguf_file import GgufFile
from seedx.networks.gguf_model import config_of, load_params
from seedx.networks.hf_files import save_hf
from seedx.networks.model_error import ModelError
from seedx.networks.safetensors_files import read_header
from seedx.networks.transformer import abstract_params
from seedx.networks.transformer_config import RopeScaling, TransformerConfig

CONFIG = TransformerConfig(
    vocab_size=48,
    width=16,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    ffn_width=24,
    max_length=64,
    rope_theta=500_000.0,
    norm_eps=1e-5,
    tie_embeddings=False,
)
METADATA = {
    "general.architecture": "llama",
    "llama.vocab_size": 48,
    "llama.embedding_length": 16,
    "llama.block_count": 2,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.key_length": 8,
    "llama.feed_forward_length": 24,
    "llama.context_length": 64,
    "llama.rope.freq_base": 500_000.0,
    "llama.rope.dimension_count": 8,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
}
STEMS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}


def permuted(matrix, heads):
    """What llama.cpp's converter does to queries and keys (`LlamaModel.permute` in convert_hf_to_gguf.py)."""
    return matrix.reshape(heads, 2, -1, matrix.shape[1]).swapaxes(1, 2).reshape(matrix.shape)


@pytest.fixture(scope="module")
def params():
    rng = np.random.default_rng(0)
    return jax.tree.map(
        lambda spec: jnp.asarray(rng.normal(size=spec.shape), spec.dtype), abstract_params(CONFIG, jnp.float32)
    )


@pytest.fixture(scope="module")
def tensors(params, tmp_path_factory):
    """The model as llama.cpp's converter would write it, made from the Hugging Face form."""
    directory = tmp_path_factory.mktemp("hf")
    save_hf(directory, CONFIG, params)
    found = {}
    for name, stored in read_header(directory / "model.safetensors").items():
        tensor, stem = np.asarray(stored.read()), name.removesuffix(".weight")
        if stem.startswith("model.layers."):
            _, _, layer, part = stem.split(".", 3)
            heads = {"self_attn.q_proj": 4, "self_attn.k_proj": 2}.get(part)
            found[f"blk.{layer}.{STEMS[part]}.weight"] = permuted(tensor, heads) if heads else tensor
        else:
            found[f"{STEMS[stem]}.weight"] = tensor
    return found


@pytest.fixture
def write(tmp_path, tensors):
    def write(metadata=None, **changes):
        changed = tensors | {name.replace("__", "."): tensor for name, tensor in changes.items()}
        written = {name: tensor for name, tensor in changed.items() if tensor is not None}
        whole = {key: item for key, item in (METADATA | (metadata or {})).items() if item is not None}
        gguf_writer.write(tmp_path / "model.gguf", whole, written)
        return GgufFile(tmp_path / "model.gguf")

    return write


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_model_comes_back(write, params, dtype):
    file = write()
    config = config_of(file)
    assert config == dataclasses.replace(CONFIG, norm_eps=config.norm_eps)
    assert config.norm_eps == pytest.approx(1e-5)
    loaded = load_params(file, config, dtype=dtype)
    assert jax.tree.structure(loaded) == jax.tree.structure(params)
    for ours, theirs in zip(jax.tree.leaves(loaded), jax.tree.leaves(params), strict=True):
        assert ours.dtype == dtype
        np.testing.assert_array_equal(np.asarray(ours), np.asarray(theirs.astype(dtype)))


def test_parameters_go_to_their_shardings(write, params):
    file = write()
    mesh = sharding.build_meshes(LearnerConfig(batch_size=8)).learner
    wanted = jax.tree.map(lambda _: sharding.replicated(mesh), params)
    loaded = load_params(file, config_of(file), shardings=wanted)
    assert all(leaf.sharding == sharding.replicated(mesh) for leaf in jax.tree.leaves(loaded))


def test_what_a_file_may_leave_out(write):
    """The output that is tied to the embedding, and what follows from other settings."""
    keys = ("vocab_size", "attention.head_count_kv", "attention.key_length", "rope.freq_base", "rope.dimension_count")
    metadata = {f"llama.{key}": None for key in keys} | {"tokenizer.ggml.tokens": ["a"] * 48}
    config = config_of(write(metadata, output__weight=None))
    assert config.tie_embeddings
    assert (config.vocab_size, config.num_kv_heads, config.head_dim, config.rope_theta) == (48, 4, 4, 10_000.0)


def test_stretched_frequencies(write):
    scaling = RopeScaling("llama3", 8.0, original_length=8192)
    divisors = rope.frequencies(8, 500_000.0, None) / rope.frequencies(8, 500_000.0, scaling)
    assert len(set(divisors.tolist())) > 1
    file = write(rope_freqs__weight=divisors.astype(np.float32))
    assert config_of(file).rope_scaling == scaling
    load_params(file, config_of(file))  # it is no parameter
    with pytest.raises(ModelError, match=r"rope_freqs.weight is not supported: it is not that of Llama-3.1"):
        config_of(write(rope_freqs__weight=np.array([1, 2, 3, 8], np.float32)))
    linear = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    assert config_of(write(linear)).rope_scaling == RopeScaling("linear", 4.0)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"general.architecture": "mamba"}, r"general.architecture \(mamba\) is not supported"),
        ({"llama.block_count": None}, r"the file has no llama.block_count"),
        ({"llama.attention.head_count": [4, 4]}, r"llama.attention.head_count \(.*\) must be one number"),
        ({"llama.expert_count": 8}, r"llama.expert_count \(8\) is not supported, only 0"),
        ({"llama.rope.dimension_count": 4}, r"llama.rope.dimension_count \(4\) is not supported, only 8"),
        ({"llama.rope.scaling.type": "yarn"}, r"llama.rope.scaling.type \(yarn\) is not supported"),
    ],
)
def test_other_models_are_refused(write, metadata, message):
    with pytest.raises(ModelError, match=message):
        config_of(write(metadata))


def test_every_mismatch_is_listed(write):
    bias = {"blk__0__attn_q__bias": np.zeros(32, np.float32)}
    file = write(blk__1__ffn_up__weight=None, output_norm__weight=np.zeros(8, np.float32), **bias)
    with pytest.raises(ModelError) as caught:
        load_params(file, config_of(file))
    assert all(
        part in str(caught.value)
        for part in (
            "model.gguf",
            "missing blk.1.ffn_up.weight [24, 16]",
            "unexpected blk.0.attn_q.bias [32]",
            "output_norm.weight has shape [8], not [16]",
        )
    )

"""Models of the llama architecture in GGUF files: settings and parameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import PyTree

from seedx.networks import rope
from seedx.networks.gguf_file import GgufFile
from seedx.networks.model_error import ModelError
from seedx.networks.pieces import Piece, assemble, check, pieces
from seedx.networks.transformer_config import RopeScaling, TransformerConfig

# Our names of the pieces, and the file's.
_ENDS = {"embedding": "token_embd.weight", "norm": "output_norm.weight", "output": "output.weight"}
_PARTS = {
    "attention_norm": "attn_norm",
    "q": "attn_q",
    "k": "attn_k",
    "v": "attn_v",
    "o": "attn_output",
    "ffn_norm": "ffn_norm",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "down": "ffn_down",
}
_FREQUENCIES = "rope_freqs.weight"  # by what each rotary frequency is divided: Llama-3.1's stretching
_REQUIRED = object()


def config_of(file: GgufFile) -> TransformerConfig:
    """The settings that a file's metadata state.

    Raises:
        ModelError: the architecture or a setting is not supported, or one is missing; the message names it.
        ConfigError: settings that contradict each other.
    """
    metadata = file.metadata
    architecture = metadata.get("general.architecture")
    if architecture != "llama":
        raise ModelError(f"general.architecture ({architecture}) is not supported in GGUF files, only llama.")

    def number(key: str, default: Any = _REQUIRED) -> Any:
        value = metadata.get(f"llama.{key}", default)
        if value is _REQUIRED:
            raise ModelError(f"the file has no llama.{key}.")
        if not isinstance(value, int | float):
            raise ModelError(f"llama.{key} ({value!r}) must be one number.")
        return value

    width, num_heads = number("embedding_length"), number("attention.head_count")
    head_dim = number("attention.key_length", width // num_heads)
    # What would have to differ for the model to be another one.
    same = {"attention.value_length": head_dim, "rope.dimension_count": head_dim, "expert_count": 0}
    for key, wanted in same.items():
        if number(key, wanted) != wanted:
            raise ModelError(f"llama.{key} ({number(key)}) is not supported, only {wanted}.")
    theta = number("rope.freq_base", 10_000.0)
    return TransformerConfig(
        vocab_size=number("vocab_size", len(metadata.get("tokenizer.ggml.tokens", []))),
        width=width,
        num_layers=number("block_count"),
        num_heads=num_heads,
        num_kv_heads=number("attention.head_count_kv", num_heads),
        head_dim=head_dim,
        ffn_width=number("feed_forward_length"),
        max_length=number("context_length"),
        rope_theta=theta,
        rope_scaling=_scaling(file, head_dim, theta),
        norm_eps=number("attention.layer_norm_rms_epsilon"),
        tie_embeddings="output.weight" not in file.tensors,
    )


def _scaling(file: GgufFile, head_dim: int, theta: float) -> RopeScaling | None:
    metadata: Mapping[str, Any] = file.metadata
    kind = metadata.get("llama.rope.scaling.type", "none")
    if kind == "linear":
        return RopeScaling("linear", metadata.get("llama.rope.scaling.factor", 1.0))
    if kind != "none":
        raise ModelError(f"llama.rope.scaling.type ({kind}) is not supported in GGUF files, only none and linear.")
    if _FREQUENCIES not in file.tensors:
        return None
    # The file keeps the result alone: the factor is the largest divisor, and the rest is the same in all Llama-3s.
    divisors = file.tensor(_FREQUENCIES)
    scaling = RopeScaling("llama3", float(divisors.max()), original_length=8192)
    ours = rope.frequencies(head_dim, theta, None) / rope.frequencies(head_dim, theta, scaling)
    if ours.shape != divisors.shape or not np.allclose(ours, divisors, rtol=1e-4):
        raise ModelError(f"{_FREQUENCIES} is not supported: it is not that of Llama-3.1 with factor {scaling.factor}.")
    return scaling


def load_params(
    file: GgufFile, config: TransformerConfig, *, dtype: DTypeLike = jnp.float32, shardings: PyTree | None = None
) -> PyTree:
    """The parameters of a file; tensors go to their devices one parameter at a time.

    Args:
        file: Open.
        config: Of `config_of`.
        dtype: Of the parameters, whatever the file has.
        shardings: A sharding for each parameter; None: the default device.

    Raises:
        ModelError: tensors are missing, unexpected or misshapen; all are listed.
    """
    named = {_stored_name(name): (name, piece) for name, piece in pieces(config).items()}
    shapes = {name: info.shape for name, info in file.tensors.items() if name != _FREQUENCIES}
    check({stored: piece for stored, (_, piece) in named.items()}, shapes, str(file.path))

    def tensors() -> Iterator[tuple[Piece, np.ndarray]]:
        heads = {"q": config.num_heads, "k": config.num_kv_heads}
        for stored, (name, piece) in named.items():
            part, tensor = name.rpartition(".")[2], file.tensor(stored)
            yield piece, _unpaired(tensor, heads[part]) if part in heads else tensor

    return assemble(config, tensors(), dtype, shardings)


def _stored_name(name: str) -> str:
    """For example "blk.3.attn_q.weight" of "layer_3.q"."""
    if name in _ENDS:
        return _ENDS[name]
    layer, part = name.removeprefix("layer_").split(".")
    return f"blk.{layer}.{_PARTS[part]}.weight"


def _unpaired(tensor: np.ndarray, heads: int) -> np.ndarray:
    """Rows of queries or keys as we order them.

    llama.cpp turns neighbours (2i, 2i + 1) of a head where we turn the pairs (i, i + E/2), so its rows are reordered.
    """
    pairs = tensor.reshape(heads, -1, 2, *tensor.shape[1:])
    return pairs.swapaxes(1, 2).reshape(tensor.shape)

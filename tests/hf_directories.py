"""Hugging Face directories of the models in parity_cases.py, and what our transformer makes of them."""

import dataclasses
import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import parity_cases
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from seedx.networks import safetensors_files
from seedx.networks.hf_config import from_hf
from seedx.networks.hf_files import stored_names
from seedx.networks.transformer import apply


def write_case(path: Path, case: str, dtype=np.float32) -> dict[str, np.ndarray]:
    """Writes the directory; returns its tensors."""
    raw = parity_cases.CASES[case]
    shapes = {name: piece.shape for name, piece in stored_names(from_hf(raw)).items()}
    tensors = {name: parity_cases.weight(name, shape).astype(dtype) for name, shape in shapes.items()}
    write_directory(path, raw, tensors)
    return tensors


def write_directory(path: Path, raw: dict, tensors: dict[str, np.ndarray]) -> None:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(raw))
    specs = {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
    safetensors_files.write(path / "model.safetensors", specs, iter(tensors.values()))


def write_score_model(path: Path, case: str, head: np.ndarray | None = None, **changed) -> np.ndarray:
    """A directory of a case's ...ForSequenceClassification with a tokenizer of bytes; its head `[1, D]`."""
    raw = parity_cases.CASES[case] | changed
    names = stored_names(dataclasses.replace(from_hf(raw), tie_embeddings=True))
    tensors = {name: parity_cases.weight(name, piece.shape) for name, piece in names.items()}
    tensors["score.weight"] = parity_cases.weight("score.weight", (1, raw["hidden_size"])) if head is None else head
    kind = raw["architectures"][0].replace("ForCausalLM", "ForSequenceClassification")
    write_directory(path, raw | {"architectures": [kind.replace("Gemma3For", "Gemma3TextFor")]}, tensors)
    write_byte_tokenizer(path)
    return tensors["score.weight"]


def write_byte_tokenizer(path: Path) -> None:
    """A tokenizer.json with a token for each byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    library = Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    library.pre_tokenizer, library.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    library.save(str(path / "tokenizer.json"))


def logits(config, params, case: str) -> np.ndarray:
    """float32 `[ROWS, LENGTH, V]` of a case's tokens."""
    tokens = jnp.asarray(parity_cases.tokens(case))
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    return np.asarray(jax.jit(functools.partial(apply, config))(params, tokens, positions)[0])

"""A model in Hugging Face's form: a directory with config.json and safetensors, whole or in shards."""

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import PyTree

from seedx.networks import safetensors_files
from seedx.networks.hf_config import MULTIMODAL_GEMMA3, architecture_of, from_hf, to_hf
from seedx.networks.model_error import ModelError
from seedx.networks.pieces import Piece, assemble, check, leaf_at, pieces
from seedx.networks.safetensors_files import StoredTensor
from seedx.networks.transformer_config import TransformerConfig

_WHOLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_PARTS = {
    "attention_norm": "input_layernorm.weight",
    "q": "self_attn.q_proj.weight",
    "k": "self_attn.k_proj.weight",
    "v": "self_attn.v_proj.weight",
    "q_bias": "self_attn.q_proj.bias",
    "k_bias": "self_attn.k_proj.bias",
    "v_bias": "self_attn.v_proj.bias",
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
    "o": "self_attn.o_proj.weight",
    "ffn_norm": "post_attention_layernorm.weight",
    "gate": "mlp.gate_proj.weight",
    "up": "mlp.up_proj.weight",
    "down": "mlp.down_proj.weight",
}
_POST_NORM_PARTS = _PARTS | {
    "attention_post_norm": "post_attention_layernorm.weight",
    "ffn_norm": "pre_feedforward_layernorm.weight",
    "ffn_post_norm": "post_feedforward_layernorm.weight",
}
_ENDS = {"embedding": "model.embed_tokens.weight", "norm": "model.norm.weight", "output": "lm_head.weight"}
_LANGUAGE_PREFIXES = {"language_model.model.": "model.", "model.language_model.": "model.", "language_model.": ""}
_VISION_PREFIXES = ("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector.")


def load_hf(
    path: Path, *, dtype: DTypeLike = jnp.float32, shardings: PyTree | None = None
) -> tuple[TransformerConfig, PyTree]:
    """Settings and parameters of a model; tensors go to their devices one parameter at a time.

    Args:
        path: The directory.
        dtype: Of the parameters, whatever the files have.
        shardings: A sharding for each parameter; None: the default device.

    Raises:
        ModelError: an unsupported config, a malformed file, or tensors that do not fit (all are listed).
    """
    config, stored = read_hf(path)
    named = stored_names(config)
    return config, assemble(config, ((piece, stored[name].read()) for name, piece in named.items()), dtype, shardings)


def read_hf(path: Path) -> tuple[TransformerConfig, dict[str, StoredTensor]]:
    """Settings of a model and its tensors by `stored_names`, which are not read yet.

    Args:
        path: The directory.

    Raises:
        ModelError: as `load_hf`.
    """
    raw = read_json(path / "config.json")
    config = from_hf(raw)
    stored = stored_tensors(path)
    if architecture_of(raw) == MULTIMODAL_GEMMA3:
        stored = {_text_name(name): at for name, at in stored.items() if not name.startswith(_VISION_PREFIXES)}
    if config.tie_embeddings:
        stored.pop(_ENDS["output"], None)  # some files hold the tied matrix twice
    check_stored(stored_names(config), stored, path)
    return config, stored


def save_hf(path: Path, config: TransformerConfig, params: PyTree, *, max_shard_bytes: int = 5 * 10**9) -> None:
    """Writes a model that `load_hf` and `transformers` read; bits stay as they are.

    Args:
        path: The directory, made if need be.
        config: Of the model.
        params: Parameters; each is fetched from its devices in turn.
        max_shard_bytes: Of one file; a larger model is cut into several.

    Raises:
        ModelError: no architecture has these settings.
    """
    raw = to_hf(config)
    path.mkdir(parents=True, exist_ok=True)
    named = stored_names(config)
    specs = {name: (np.dtype(leaf_at(params, piece.path).dtype), piece.shape) for name, piece in named.items()}
    raw["torch_dtype"] = str(next(iter(specs.values()))[0])
    shards = _shards(
        {name: int(np.prod(shape)) * dtype.itemsize for name, (dtype, shape) in specs.items()}, max_shard_bytes
    )
    files = (
        [_WHOLE]
        if len(shards) == 1
        else [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    )
    for file, names in zip(files, shards, strict=True):
        tensors = _tensors(params, [named[name] for name in names])
        safetensors_files.write(path / file, {name: specs[name] for name in names}, tensors)
    # The index last: it is what makes the files a model.
    if len(shards) > 1:
        (path / _WHOLE).unlink(missing_ok=True)
        total = sum(int(np.prod(shape)) * dtype.itemsize for dtype, shape in specs.values())
        weight_map = {name: file for file, names in zip(files, shards, strict=True) for name in names}
        _write_json(path / _INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
    else:
        (path / _INDEX).unlink(missing_ok=True)
    _write_json(path / "config.json", raw)


def stored_names(config: TransformerConfig) -> dict[str, Piece]:
    """The pieces of a model by the names that its files give them."""
    return {_hf_name(config, name): piece for name, piece in pieces(config).items()}


def _hf_name(config: TransformerConfig, name: str) -> str:
    if name in _ENDS:
        return _ENDS[name]
    layer, part = name.removeprefix("layer_").split(".")
    return f"model.layers.{layer}.{(_POST_NORM_PARTS if config.post_norms else _PARTS)[part]}"


def _text_name(name: str) -> str:
    """The name that a tensor of the language part has in a model without images."""
    for prefix, ours in _LANGUAGE_PREFIXES.items():
        if name.startswith(prefix):
            return ours + name.removeprefix(prefix)
    return name


def stored_tensors(path: Path) -> dict[str, StoredTensor]:
    """All tensors of a directory, but for buffers of old versions, which follow from the config.

    Raises:
        ModelError: there is no model, or a malformed one.
    """
    whole = path / _WHOLE
    found = safetensors_files.read_header(whole) if whole.is_file() else _stored_in_shards(path)
    return {name: at for name, at in found.items() if not name.endswith("rotary_emb.inv_freq")}


def check_stored(wanted: dict[str, Piece], stored: dict[str, StoredTensor], path: Path) -> None:
    """Compares what is wanted, by stored name, with what a directory has.

    Raises:
        ModelError: they differ (all differences are listed), or tensors hold no floating-point numbers.
    """
    check(wanted, {name: at.shape for name, at in stored.items()}, str(path))
    if odd := sorted({str(at.dtype) for at in stored.values() if not jnp.issubdtype(at.dtype, jnp.floating)}):
        raise ModelError(f"{path} has tensors of {', '.join(odd)}: quantised checkpoints are not supported.")


def _stored_in_shards(path: Path) -> dict[str, StoredTensor]:
    if not (path / _INDEX).is_file():
        raise ModelError(f"{path} has neither {_WHOLE} nor {_INDEX}.")
    weight_map = read_json(path / _INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not all(re.fullmatch(r"[\w.-]+", str(file)) for file in weight_map.values()):
        raise ModelError(f"{path / _INDEX} must have a weight_map from tensor names to files beside it.")
    found: dict[str, StoredTensor] = {}
    for file in sorted(set(weight_map.values())):
        if not (path / file).is_file():
            raise ModelError(f"{path / _INDEX} names {file}, which is not there.")
        for name, at in safetensors_files.read_header(path / file).items():
            if weight_map.get(name) != file:
                raise ModelError(f"{path / file} has {name}, which {_INDEX} sees in {weight_map.get(name)}.")
            found[name] = at
    if lost := sorted(weight_map.keys() - found.keys()):
        raise ModelError(f"{path / _INDEX} names tensors that its files lack: {', '.join(lost)}.")
    return found


def _shards(sizes: dict[str, int], max_bytes: int) -> list[list[str]]:
    """Names in order, cut where the next tensor would not fit."""
    shards: list[list[str]] = [[]]
    size = 0
    for name, added in sizes.items():
        if shards[-1] and size + added > max_bytes:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += added
    return shards


def _tensors(params: PyTree, wanted: list[Piece]) -> Iterator[np.ndarray]:
    """The stored tensors; a parameter that several in a row are part of is fetched once."""
    path, parameter = None, np.empty(0)
    for piece in wanted:
        if piece.path != path:
            path, parameter = piece.path, np.asarray(leaf_at(params, piece.path))
        yield piece.read(parameter)


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        ModelError: it cannot be read, or holds something else.
    """
    try:
        found = json.loads(path.read_text())
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}.") from None
    except ValueError as error:
        raise ModelError(f"{path} is not JSON: {error}.") from None
    if not isinstance(found, dict):
        raise ModelError(f"{path} must hold a JSON object.")
    return found


def _write_json(path: Path, value: dict[str, Any]) -> None:
    unfinished = path.with_name(path.name + ".part")
    unfinished.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n")
    os.replace(unfinished, path)

"""A model by the name of its source: weights, tokenizer and chat template together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
from huggingface_hub import snapshot_download
from jax.typing import DTypeLike
from jaxtyping import PyTree

from seedx import bpe
from seedx.chat import CHATML, ChatTemplate, template_from_directory, template_from_gguf
from seedx.networks import gguf_model
from seedx.networks.gguf_file import GgufFile
from seedx.networks.hf_files import load_hf, read_hf
from seedx.networks.model_error import ModelError
from seedx.networks.smollm2 import smollm2_file
from seedx.networks.transformer import init_params
from seedx.networks.transformer_config import TransformerConfig
from seedx.tokenizer import Tokenizer

SOURCES = "smollm2, tiny, a .gguf file, a Hugging Face directory, hf://ORGANISATION/NAME"
ShardingsFor = Callable[[TransformerConfig], PyTree]


@dataclass(frozen=True)
class Model:
    """What a source holds.

    Attributes:
        config: Of the transformer.
        params: Its parameters, on their devices.
        tokenizer: Text to ids and back.
        chat_template: Messages to a prompt; None: the model has none.
        name: For people and for the HTTP interface.
    """

    config: TransformerConfig
    params: PyTree
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    name: str


def open_model(
    source: str, dtype: DTypeLike = jnp.float32, shardings_for: ShardingsFor | None = None, seed: int = 0
) -> Model:
    """Reads a model; what is not on this machine is fetched first.

    Args:
        source: One of `SOURCES`. "tiny" has random weights and reads bytes, for tests and demonstrations.
        dtype: Of the parameters.
        shardings_for: Makes a sharding for each parameter; None: the default device.
        seed: Of tiny's weights.

    Raises:
        ModelError: there is no such source, it cannot be fetched, or it cannot be read as it is.
        ConfigError: its tokenizer or chat template is not supported.
    """
    path = Path(source)
    if source == "tiny":
        return _tiny(dtype, shardings_for, seed)
    if source == "smollm2":
        return _from_gguf(smollm2_file(), dtype, shardings_for, source)
    if source.startswith("hf://"):
        return _from_directory(_snapshot(source), dtype, shardings_for, source.removeprefix("hf://"))
    if path.is_dir():
        return _from_directory(path, dtype, shardings_for, path.resolve().name)
    if path.suffix == ".gguf":
        return _from_gguf(path, dtype, shardings_for, path.stem)
    raise ModelError(f"The model {source!r} is none of these: {SOURCES}.")


def _tiny(dtype: DTypeLike, shardings_for: ShardingsFor | None, seed: int) -> Model:
    tokenizer = bpe.byte_tokenizer()
    config = TransformerConfig(
        vocab_size=tokenizer.vocab_size,
        width=128,
        num_layers=4,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        ffn_width=256,
    )
    params = init_params(config, jax.random.key(seed), jnp.dtype(dtype))
    if shardings_for is not None:
        params = jax.device_put(params, shardings_for(config))
    return Model(config, params, tokenizer, ChatTemplate(CHATML, {}), "tiny")


def _from_gguf(path: Path, dtype: DTypeLike, shardings_for: ShardingsFor | None, name: str) -> Model:
    file = GgufFile(path)
    config = gguf_model.config_of(file)
    tokenizer, template = bpe.from_gguf(file.metadata), template_from_gguf(file.metadata)
    params = gguf_model.load_params(file, config, dtype=dtype, shardings=shardings_for and shardings_for(config))
    return Model(config, params, tokenizer, template, name)


def _from_directory(path: Path, dtype: DTypeLike, shardings_for: ShardingsFor | None, name: str) -> Model:
    config, _ = read_hf(path)  # first: what is no model of ours needs no tokenizer
    tokenizer, template = bpe.from_json(path), template_from_directory(path)
    config, params = load_hf(path, dtype=dtype, shardings=shardings_for and shardings_for(config))
    return Model(config, params, tokenizer, template, name)


def _snapshot(source: str) -> Path:
    """The directory of a hub's model, fetched if it is not in the hub's cache."""
    try:
        found = snapshot_download(source.removeprefix("hf://"), allow_patterns=["*.json", "*.safetensors", "*.jinja"])
    except (OSError, ValueError) as error:  # of the network and the hub; of the name
        raise ModelError(
            f"{source} cannot be fetched: {error}\nIs the name right, and is the hub reachable (HF_ENDPOINT)? "
            "A directory that was downloaded elsewhere can be given as a path."
        ) from error
    return Path(found)

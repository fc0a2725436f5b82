"""A model that scores texts: a transformer and a linear head of one output, as Hugging Face keeps a reward model.

That is a directory of a `...ForSequenceClassification` with one label: the tensors of the model without its output, and
`score.weight` `[1, D]`. The score of a text is what the head makes of its last token's hidden state, after the last
norm; the last one that is not the padding of config.json, where that names one.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, PyTree

from seedx.networks.hf_config import from_hf
from seedx.networks.hf_files import check_stored, read_json, stored_names, stored_tensors
from seedx.networks.model_error import ModelError
from seedx.networks.pieces import assemble, pieces
from seedx.networks.safetensors_files import StoredTensor
from seedx.networks.transformer import features
from seedx.networks.transformer_config import TransformerConfig

_KIND, _BASE = "ForSequenceClassification", "ForCausalLM"
_HEAD = "score.weight"


@dataclasses.dataclass(frozen=True)
class ScoreModel:
    """What a directory holds; nothing of the weights is read before `load`.

    Attributes:
        config: Of the transformer, without an output of its own.
        pad_id: Of config.json; None: it has none.
        stored: Tensors by their names in the files.
    """

    config: TransformerConfig
    pad_id: int | None
    stored: dict[str, StoredTensor]

    @property
    def files(self) -> list[Path]:
        """Those with the weights, by name."""
        return sorted({at.path for at in self.stored.values()})

    @property
    def num_params(self) -> int:
        """Numbers in all tensors."""
        return sum(int(np.prod(at.shape)) for at in self.stored.values())

    def load(self, dtype: DTypeLike = jnp.float32) -> tuple[PyTree, Float[Array, "D"]]:
        """The parameters and the head, on the default device."""
        named = stored_names(self.config)
        tensors = ((piece, self.stored[name].read()) for name, piece in named.items())
        return assemble(self.config, tensors, dtype), jnp.asarray(self.stored[_HEAD].read()[0]).astype(dtype)

    def last(self, tokens: Sequence[int]) -> int:
        """The index of the token whose hidden state is scored."""
        return next((i for i in reversed(range(len(tokens))) if tokens[i] != self.pad_id), 0)


def open_score_model(path: Path) -> ScoreModel:
    """Looks at a directory.

    Raises:
        ModelError: it is no such model, its transformer is not supported, or its tensors do not fit (all are listed).
    """
    raw = read_json(path / "config.json")
    named = raw.get("architectures")
    if not isinstance(named, list) or len(named) != 1 or not str(named[0]).endswith(_KIND):
        raise ModelError(
            f"{path}/config.json's field architectures ({named}) must name one {_KIND}, such as Llama{_KIND}: a reward "
            "model is saved as that, with one label."
        )
    base = str(named[0]).removesuffix(_KIND).replace("Gemma3Text", "Gemma3") + _BASE
    raw = {name: value for name, value in raw.items() if name != "problem_type"} | {"architectures": [base]}
    config = dataclasses.replace(from_hf(raw), tie_embeddings=True)  # there is no output
    stored = stored_tensors(path)
    head = pieces(config)["norm"]._replace(shape=(1, config.width))
    check_stored({**stored_names(config), _HEAD: head}, stored, path)
    pad_id: Any = raw.get("pad_token_id")
    if not (pad_id is None or isinstance(pad_id, int)):
        raise ModelError(f"{path}/config.json's field pad_token_id ({pad_id!r}) must be an integer, or null.")
    return ScoreModel(config, pad_id, stored)


def scores(
    config: TransformerConfig,
    params: PyTree,
    head: Float[Array, "D"],
    tokens: Int[Array, "B L"],
    last: Int[Array, "B"],
) -> Float[Array, "B"]:
    """The score of each text, float32.

    Args:
        config: Of the model.
        params: Its parameters.
        head: Its head.
        tokens: Ids; what follows a text's last token is not seen.
        last: The index of the token in each row that is scored.
    """
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    x, _ = features(config, params, tokens, positions)
    x = jnp.take_along_axis(x, last[:, None, None], axis=1)[:, 0]
    return x.astype(jnp.float32) @ head.astype(jnp.float32)

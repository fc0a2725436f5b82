"""Between a stored model, which has a matrix for each of q, k, v, gate and up, and parameters, which fuse them.

A piece is one tensor of a stored model. It says which parameter it is part of and how to see that part in the stored
layout (matrices `[out, in]`); the same view serves to read and to write. File formats differ only in names.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import PyTree

from seedx.networks.model_error import ModelError
from seedx.networks.transformer import abstract_params
from seedx.networks.transformer_config import TransformerConfig


class Piece(NamedTuple):
    """One tensor of a stored model.

    Attributes:
        path: Keys of the parameter that it is part of.
        view: Parameter -> a view of the part, its axes in the stored order.
        shape: Stored; the view's, with some axes joined.
    """

    path: tuple[str, ...]
    view: Callable[[np.ndarray], np.ndarray]
    shape: tuple[int, ...]

    def read(self, parameter: np.ndarray) -> np.ndarray:
        """The stored tensor."""
        return self.view(parameter).reshape(self.shape)

    def write(self, parameter: np.ndarray, tensor: np.ndarray) -> None:
        """Puts the stored tensor in its place."""
        view = self.view(parameter)
        view[...] = tensor.reshape(view.shape).astype(parameter.dtype)


def pieces(config: TransformerConfig) -> dict[str, Piece]:
    """All pieces of a model by our names: "embedding", "layer_0.q", ..., "norm", and "output" if it is not tied."""
    width = config.width
    found = {"embedding": Piece(("embedding",), _whole, (config.vocab_size, width))}
    for layer in range(config.num_layers):
        name = f"layer_{layer}"
        for part, piece in _layer_pieces(config).items():
            found[f"{name}.{part}"] = piece._replace(path=(name, *piece.path))
    found["norm"] = Piece(("norm", "weight"), _whole, (width,))
    if not config.tie_embeddings:
        found["output"] = Piece(("output",), np.transpose, (config.vocab_size, width))
    return found


def _whole(parameter: np.ndarray) -> np.ndarray:
    return parameter


def _layer_pieces(config: TransformerConfig) -> dict[str, Piece]:
    group, head, width = config.queries_per_kv, config.head_dim, config.width
    query_width, kv_width = config.num_heads * head, config.num_kv_heads * head
    qkv, bias, gate_up = ("attention", "qkv"), ("attention", "bias"), ("ffn", "gate_up")
    found = {
        "attention_norm": Piece(("attention_norm", "weight"), _whole, (width,)),
        "q": Piece(qkv, lambda p: p[:, :, :group].transpose(1, 2, 3, 0), (query_width, width)),
        "k": Piece(qkv, lambda p: p[:, :, group].transpose(1, 2, 0), (kv_width, width)),
        "v": Piece(qkv, lambda p: p[:, :, group + 1].transpose(1, 2, 0), (kv_width, width)),
        "o": Piece(("attention", "out"), lambda p: p.transpose(3, 0, 1, 2), (width, query_width)),
        "ffn_norm": Piece(("ffn_norm", "weight"), _whole, (width,)),
        "gate": Piece(gate_up, lambda p: p[:, 0].T, (config.ffn_width, width)),
        "up": Piece(gate_up, lambda p: p[:, 1].T, (config.ffn_width, width)),
        "down": Piece(("ffn", "down"), np.transpose, (width, config.ffn_width)),
    }
    if config.attention_bias:
        found["q_bias"] = Piece(bias, lambda p: p[:, :group], (query_width,))
        found["k_bias"] = Piece(bias, lambda p: p[:, group], (kv_width,))
        found["v_bias"] = Piece(bias, lambda p: p[:, group + 1], (kv_width,))
    if config.qk_norm:
        found["q_norm"] = Piece(("attention", "q_norm", "weight"), _whole, (head,))
        found["k_norm"] = Piece(("attention", "k_norm", "weight"), _whole, (head,))
    if config.post_norms:
        found["attention_post_norm"] = Piece(("attention_post_norm", "weight"), _whole, (width,))
        found["ffn_post_norm"] = Piece(("ffn_post_norm", "weight"), _whole, (width,))
    return found


def check(wanted: Mapping[str, Piece], found: Mapping[str, tuple[int, ...]], where: str) -> None:
    """Compares the pieces by stored name with the shapes of what is stored.

    Raises:
        ModelError: they differ; every missing, unexpected and misshapen tensor is listed.
    """
    faults = [f"missing {name} {list(piece.shape)}" for name, piece in wanted.items() if name not in found]
    faults += [f"unexpected {name} {list(shape)}" for name, shape in found.items() if name not in wanted]
    faults += [
        f"{name} has shape {list(found[name])}, not {list(piece.shape)}"
        for name, piece in wanted.items()
        if name in found and tuple(found[name]) != piece.shape
    ]
    if faults:
        raise ModelError(f"{where} does not fit its config in {len(faults)} tensors: {'; '.join(faults)}.")


def assemble(
    config: TransformerConfig,
    tensors: Iterable[tuple[Piece, np.ndarray]],
    dtype: DTypeLike,
    shardings: PyTree | None = None,
) -> PyTree:
    """Parameters from the tensors of all pieces, in any order.

    A parameter goes to its devices as soon as its last piece is there; only those that are begun are kept on the host.

    Args:
        config: Of the model.
        tensors: Each piece once, with its stored tensor.
        dtype: Of the parameters.
        shardings: A sharding for each parameter; None: the default device.
    """
    abstract = abstract_params(config, dtype)
    remaining: dict[tuple[str, ...], int] = {}
    for piece in pieces(config).values():
        remaining[piece.path] = remaining.get(piece.path, 0) + 1
    begun: dict[tuple[str, ...], np.ndarray] = {}
    params: dict[str, Any] = {}
    for piece, tensor in tensors:
        if piece.path not in begun:
            spec = leaf_at(abstract, piece.path)
            begun[piece.path] = np.empty(spec.shape, spec.dtype)
        piece.write(begun[piece.path], tensor)
        remaining[piece.path] -= 1
        if not remaining[piece.path]:
            sharding = None if shardings is None else leaf_at(shardings, piece.path)
            _put(params, piece.path, jax.device_put(begun.pop(piece.path), sharding))
    assert not any(remaining.values()), "not every piece came"
    return params


def leaf_at(tree: PyTree, path: tuple[str, ...]) -> Any:
    """The leaf of nested dicts under some keys."""
    for key in path:
        tree = tree[key]
    return tree


def _put(tree: dict[str, Any], path: tuple[str, ...], leaf: Any) -> None:
    for key in path[:-1]:
        tree = tree.setdefault(key, {})
    tree[path[-1]] = leaf

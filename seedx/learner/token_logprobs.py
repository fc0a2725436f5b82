"""Log-probabilities of given tokens, without the logits of all tokens in memory at once.

Letters: R rows, L tokens of a row, D width, V vocabulary.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, PyTree

from seedx.learner.text_batch import TokenBatch
from seedx.learner.value_head import head_values
from seedx.learner.zero import gathered
from seedx.networks import transformer
from seedx.networks.transformer_config import TransformerConfig

_CHUNK_BYTES = 64 * 2**20  # of float32 logits


def token_logprobs(
    config: TransformerConfig,
    params: PyTree,
    tokens: Int[Array, "R L"],
    positions: Int[Array, "R L"],
    segments: Int[Array, "R L"],
    parents: Int[Array, "R L"],
    before: Int[Array, "R L"],
    *,
    temperature: float = 1.0,
    dtype: DTypeLike = jnp.float32,
    remat: bool = False,
    layout: PyTree = None,
) -> tuple[Float[Array, "R L"], Float[Array, "R L"], Float[Array, "R L D"]]:
    """Each token's log-probability given those before it in its sequence, entropy and features that it was drawn with.

    The first two are natural, float32, the features in `dtype`. They mean nothing for the first token of a sequence.

    Args:
        config: Of the model.
        params: Its parameters.
        tokens: Packed rows.
        positions: This and the next three are those of `packing.Layout`.
        segments: From 1; 0 is padding.
        parents: Prompts of segments.
        before: Where the token before each lies.
        temperature: Of the distribution.
        dtype: What the model computes in.
        remat: Whether a gradient computes each block anew.
        layout: Where the parameters live, if it is called in `zero.by_rows` with this device's part of them; None: they
            are whole.
    """

    def whole(name: str, part: PyTree) -> PyTree:
        if layout is None:
            return jax.tree.map(lambda leaf: leaf.astype(dtype), part)
        return gathered(part, layout[name], dtype)

    # A block at a time; the others, which are needed at both ends, once.
    blocks = {transformer.layer_name(layer) for layer in range(config.num_layers)}
    params = {name: part if name in blocks else whole(name, part) for name, part in params.items()}
    x, _ = transformer.features(
        config, params, tokens, positions, segments=segments, parents=parents, remat=remat, whole=whole
    )
    x = jnp.take_along_axis(x, before[..., None], axis=1)
    return *_said(config, params, x, tokens, temperature), x


def _said(
    config: TransformerConfig, params: PyTree, x: Float[Array, "R L D"], tokens: Int[Array, "R L"], temperature: float
) -> tuple[Float[Array, "R L"], Float[Array, "R L"]]:
    """Log-probabilities and entropies of `token_logprobs`, from the features x that tokens are drawn from."""

    def said(x: Float[Array, "R C D"], tokens: Int[Array, "R C"]) -> tuple[Array, Array]:
        logits = transformer.logits_of(config, params, x) / temperature
        logprobs = jax.nn.log_softmax(logits)
        entropy = -jnp.sum(jnp.exp(logprobs) * logprobs, axis=-1)
        return jnp.take_along_axis(logprobs, tokens[..., None], axis=-1)[..., 0], entropy

    chunks = _chunks(tokens.shape, config.vocab_size)
    if chunks == 1:
        return said(x, tokens)
    parts = (_split(x, chunks), _split(tokens, chunks))
    _, (logprobs, entropy) = jax.lax.scan(lambda _, part: (None, jax.checkpoint(said)(*part)), None, parts)
    return jnp.moveaxis(logprobs, 0, 1).reshape(tokens.shape), jnp.moveaxis(entropy, 0, 1).reshape(tokens.shape)


def _chunks(shape: tuple[int, ...], vocab_size: int) -> int:
    """Parts of a row's tokens whose logits are held together: the least divisor of its length that is enough."""
    rows, length = shape
    wanted = math.ceil(rows * length * vocab_size * 4 / _CHUNK_BYTES)
    return next(n for n in range(1, length + 1) if length % n == 0 and (n >= wanted or n == length))


def _split(x: Array, chunks: int) -> Array:
    """[R, L, ...] as [chunks, R, L / chunks, ...]."""
    return jnp.moveaxis(x.reshape(x.shape[0], chunks, -1, *x.shape[2:]), 1, 0)


class Model(NamedTuple):
    """How log-probabilities are computed.

    Attributes:
        config: Of the transformer.
        temperature: Of the distribution that completions are drawn from.
        dtype: That the model computes in.
        remat: Whether the gradient computes each block anew.
        layout: See `token_logprobs`.
    """

    config: TransformerConfig
    temperature: float = 1.0
    dtype: DTypeLike = jnp.float32
    remat: bool = False
    layout: PyTree = None

    def logprobs(self, params: PyTree, batch: TokenBatch) -> tuple[Float[Array, "R L"], Float[Array, "R L"]]:
        """Log-probability of each token, and the entropy that it was drawn with."""
        logprobs, entropy, _ = self._token_logprobs(params, batch)
        return logprobs, entropy

    def logprobs_and_values(
        self, params: PyTree, head: PyTree, batch: TokenBatch
    ) -> tuple[Float[Array, "R L"], Float[Array, "R L"], Float[Array, "R L"]]:
        """The same, and the value of the state that each token was drawn in, of a head of `value_head.py`."""
        logprobs, entropy, features = self._token_logprobs(params, batch)
        return logprobs, entropy, head_values(head, features)

    def _token_logprobs(self, params: PyTree, batch: TokenBatch) -> tuple[Array, Array, Array]:
        return token_logprobs(
            self.config,
            params,
            batch.tokens,
            batch.positions,
            batch.segments,
            batch.parents,
            batch.before,
            temperature=self.temperature,
            dtype=self.dtype,
            remat=self.remat,
            layout=self.layout,
        )

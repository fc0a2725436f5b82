"""Matrices of 8 bits: for each output channel a scale, symmetric, the greatest magnitude is 127 (2004.09602).

Weights alone are quantised. A product converts them to the dtype of its other operand, in which they are exact, and
scales what comes out, so that a device may convert as it reads.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Int, Int8, PyTree

_GREATEST = 127


class Int8Matrix(NamedTuple):
    """A quantised matrix, about `values * scale`; it stands in the parameters where the array was."""

    values: Int8[Array, "*S"]  # in the shape of the array
    scale: Float32[Array, "*C"]  # of as many axes; those that a product sums over have size 1


Matrix = Array | Int8Matrix


def quantize(params: PyTree, axes: PyTree) -> PyTree:
    """The parameters with an `Int8Matrix` for each matrix of the model; norms and biases stay.

    Args:
        params: Nested dicts of arrays, finite.
        axes: The names of each one's axes (`transformer.logical_axes`).
    """
    return jax.tree.map(lambda leaf, names: _quantize(leaf, names) if _is_matrix(names) else leaf, params, axes)


def quantized_axes(axes: PyTree) -> PyTree:
    """The names of the axes of quantised parameters; those of size 1 have none."""

    def of(names: tuple[str, ...]) -> Any:
        if not _is_matrix(names):
            return names
        summed = _summed(names)
        return Int8Matrix(names, tuple("" if i in summed else name for i, name in enumerate(names)))  # type: ignore

    return jax.tree.map(of, axes, is_leaf=lambda node: isinstance(node, tuple))


def project(x: Float[Array, "*B N"], matrix: Matrix, dtype: DTypeLike | None = None) -> Float[Array, "*B M"]:
    """x times a matrix whose first axes, joined, are N, and whose others, joined, are M.

    Args:
        x: Rows.
        matrix: In the dtype of x, or int8.
        dtype: Of the result; None: that of x.
    """
    if not isinstance(matrix, Int8Matrix):
        return jnp.matmul(x, matrix.reshape(x.shape[-1], -1), preferred_element_type=dtype)
    # XLA would convert all weights at once, before a loop or at the beginning of its body, and keep them. It cannot do
    # so with what depends on x; nothing is greater than infinity, but that it does not know.
    zero = (x.reshape(-1)[0] > jnp.inf).astype(jnp.int8)
    values = (matrix.values + zero).reshape(x.shape[-1], -1).astype(x.dtype)
    scale = matrix.scale.reshape((1,) * (x.ndim - 1) + (-1,))
    return (jnp.matmul(x, values, preferred_element_type=jnp.float32) * scale).astype(dtype or x.dtype)


def take_rows(matrix: Matrix, index: Int[Array, "*B"], dtype: DTypeLike) -> Float[Array, "*B N"]:
    """Rows `[..., N]` of a matrix `[M, N]`; of an int8 one in `dtype`."""
    if not isinstance(matrix, Int8Matrix):
        return matrix[index]
    return (matrix.values[index].astype(jnp.float32) * matrix.scale[index]).astype(dtype)


def _quantize(matrix: Float[Array, "*S"], names: tuple[str, ...]) -> Int8Matrix:
    matrix = matrix.astype(jnp.float32)
    largest = jnp.max(jnp.abs(matrix), axis=_summed(names), keepdims=True)
    scale = jnp.maximum(largest / _GREATEST, jnp.finfo(jnp.float32).tiny)  # a channel of zeros has one, too
    return Int8Matrix(jnp.round(matrix / scale).astype(jnp.int8), scale)


def _is_matrix(names: tuple[str, ...]) -> bool:
    return len(names) > 1 and "embed" in names


def _summed(names: tuple[str, ...]) -> tuple[int, ...]:
    """The axes that a product sums over: the residual stream's, or all others where the product goes to the stream.

    The embedding goes to the stream, but with tied embeddings it is the output as well, and a scale for each token
    serves both.
    """
    embed = names.index("embed")
    to_stream = embed == len(names) - 1 and "vocab" not in names
    return tuple(i for i in range(len(names)) if (i == embed) != to_stream)

"""An LSTM core that starts afresh at every FIRST row."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float


class Carry(NamedTuple):
    """What an LSTM remembers."""

    cell: Float[Array, "B D"]
    hidden: Float[Array, "B D"]


def initial_carry(batch_size: int, num_features: int) -> Carry:
    """Zeros."""
    zeros = jnp.zeros((batch_size, num_features))
    return Carry(zeros, zeros)


class LSTM(nnx.Module):
    """One layer (Hochreiter and Schmidhuber 1997, with forget gates); `first` rows see a zero carry.

    Args:
        num_inputs: Features of the input.
        num_features: D, width of the cell.
        rngs: Source of the initial weights.
    """

    def __init__(self, num_inputs: int, num_features: int, rngs: nnx.Rngs) -> None:
        self.input = nnx.Linear(num_inputs, 4 * num_features, rngs=rngs)
        self.recurrent = nnx.Linear(
            num_features, 4 * num_features, use_bias=False, kernel_init=nnx.initializers.orthogonal(), rngs=rngs
        )

    def step(self, carry: Carry, x: Float[Array, "B I"], first: Bool[Array, "B"]) -> tuple[Carry, Float[Array, "B D"]]:
        """One row: the next carry and the output."""
        return self._step(carry, self.input(x), first)

    def unroll(
        self, carry: Carry, x: Float[Array, "T B I"], first: Bool[Array, "T B"]
    ) -> tuple[Carry, Float[Array, "T B D"]]:
        """All rows of an unroll: the carry after the last one and the outputs. Only the recurrence is in the scan."""
        return jax.lax.scan(lambda carry, row: self._step(carry, *row), carry, (self.input(x), first))

    def _step(self, carry: Carry, inputs: Array, first: Array) -> tuple[Carry, Array]:
        cell, hidden = (jnp.where(first[:, None], 0.0, x) for x in carry)
        forget, update, candidate, output = jnp.split(inputs + self.recurrent(hidden), 4, axis=-1)
        # The constant makes a fresh LSTM remember.
        cell = jax.nn.sigmoid(forget + 1.0) * cell + jax.nn.sigmoid(update) * jnp.tanh(candidate)
        hidden = jax.nn.sigmoid(output) * jnp.tanh(cell)
        return Carry(cell, hidden), hidden

"""A value head on a language model: what completions are expected to earn, token by token (PPO, 1707.06347).

Letters: R rows, L tokens of a row, D width.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, PyTree

_SQUARES = ("target_squared", "value_error", "value_error_squared", "target")  # of sums that are no figures themselves
_SAME = 1e-6  # targets whose variance is less than this part of their mean square are one value, rounded


def init_head(width: int) -> PyTree:
    """A head whose values are 0: {"weight" `[D]`, "bias" `[]`}, float32."""
    return {"weight": jnp.zeros(width, jnp.float32), "bias": jnp.zeros((), jnp.float32)}


def head_values(head: PyTree, features: Float[Array, "R L D"]) -> Float32[Array, "R L"]:
    """The value of the state in which each token was sampled.

    A sum of products, not a matrix product: accelerators round the operands of those, and a value is to be float32
    whatever the model computes in.

    Args:
        head: Of `init_head`.
        features: That the token was drawn from, of `token_logprobs`.
    """
    return jnp.sum(features.astype(jnp.float32) * head["weight"][None, None], axis=-1) + head["bias"]


def value_sums(
    losses: Float[Array, "*B"], values: Float[Array, "*B"], targets: Float[Array, "*B"], mask: Bool[Array, "*B"]
) -> dict[str, Float[Array, ""]]:
    """Sums over the tokens where mask is True, of which `value_figures` makes figures; without a gradient."""
    error = jnp.where(mask, targets - values, 0.0)
    terms = {
        "value_loss": losses,
        "value": values,
        "target": targets,
        "target_squared": jnp.square(targets),
        "value_error": error,
        "value_error_squared": jnp.square(error),
    }
    return {name: jax.lax.stop_gradient(jnp.sum(term, where=mask)) for name, term in terms.items()}


def value_figures(means: dict[str, float]) -> dict[str, float]:
    """Means over tokens, those of `value_sums` among them, without the parts of variances but with their ratio.

    "explained_variance" is 1 - Var(target - V) / Var(target): 1 if values are right, 0 if they are no better than one
    number, and also where all targets are equal.
    """
    variance = means["target_squared"] - means["target"] ** 2
    left = means["value_error_squared"] - means["value_error"] ** 2
    explained = 1.0 - left / variance if variance > _SAME * means["target_squared"] else 0.0
    return {name: value for name, value in means.items() if name not in _SQUARES} | {"explained_variance": explained}

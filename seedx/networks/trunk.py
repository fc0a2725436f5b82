"""What all networks share below their heads: torso and recurrent core."""

from typing import Any

import jax
from flax import nnx
from jaxtyping import Array, Float, PyTree

from seedx.config import NetworkConfig
from seedx.networks import frame_stack
from seedx.networks.lstm import LSTM
from seedx.networks.torso import build_torso, is_image, vector_size
from seedx.types import EnvSpec


class Trunk(nnx.Module):
    """Torso and core (None without an LSTM); a subclass puts `heads` on top.

    Attributes:
        num_features: Width of what the heads see.
    """

    def __init__(self, config: NetworkConfig, spec: EnvSpec, rngs: nnx.Rngs) -> None:
        self.torso, width = build_torso(config, _stacked_specs(spec.observation, config.frame_stack), rngs)
        if config.previous_action:
            width += sum(vector_size(leaf) for leaf in jax.tree.leaves(spec.action)) + 1
        self.core = LSTM(width, config.lstm, rngs) if config.lstm else None
        self.num_features = config.lstm or width

    def heads(self, x: Float[Array, "*B D"]) -> Any:
        """What the agent makes of the features."""
        raise NotImplementedError


def _stacked_specs(spec: PyTree, k: int) -> PyTree:
    if k == 1:
        return spec
    return jax.tree.map(lambda leaf: frame_stack.stacked_spec(leaf, k) if is_image(leaf) else leaf, spec)

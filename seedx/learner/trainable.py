"""What of a language model's weights is trained, what is not, and how both make the policy."""

from __future__ import annotations

from typing import NamedTuple

import jax
from jax.sharding import Mesh

from seedx import sharding
from seedx.learner.value_head import init_head
from seedx.networks.transformer_config import TransformerConfig
from seedx.types import Tree

_HEAD = "value_head"
_REFERENCE = "reference"


class Trainable(NamedTuple):
    """The seam between the update, which knows of a tree that it trains, and the policy, which others compute with.

    What is trained is the policy's parameters, a dict, and the value head under a name of its own among them. What is
    frozen is the parameters that the loss compares the policy with, or None.

    Attributes:
        config: Of the model.
        mesh: Where the head lives, whole on every device.
        value_head: Whether there is one.
        reference: Whether the policy is compared with the model that the run began with.
    """

    config: TransformerConfig
    mesh: Mesh
    value_head: bool = False
    reference: bool = False

    def begin(self, params: Tree) -> tuple[Tree, Tree]:
        """What is trained and what is frozen, of a run that begins with these parameters; none are copied."""
        head = {}
        if self.value_head:
            head = {_HEAD: jax.device_put(init_head(self.config.width), sharding.replicated(self.mesh))}
        return {**params, **head}, params if self.reference else None

    def policy(self, trained: Tree) -> Tree:
        """The parameters of the policy."""
        return {name: leaf for name, leaf in trained.items() if name != _HEAD}

    def head(self, trained: Tree) -> Tree:
        """The value head; None if there is none."""
        return trained.get(_HEAD)

    def stored(self, trained: Tree, frozen: Tree) -> dict[str, Tree]:
        """What a checkpoint holds of both beside the policy's parameters."""
        head = {_HEAD: trained[_HEAD]} if self.value_head else {}
        return head | ({_REFERENCE: frozen} if self.reference else {})

    def restored(self, params: Tree, stored: dict[str, Tree]) -> tuple[Tree, Tree]:
        """What is trained and what is frozen, of the policy's parameters and of what `stored` gave."""
        head = {_HEAD: stored[_HEAD]} if self.value_head else {}
        return {**params, **head}, stored.get(_REFERENCE)

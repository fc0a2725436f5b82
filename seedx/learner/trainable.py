"""What of a language model's weights is trained, what is not, and how both make the policy."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
from jax.sharding import Mesh

from seedx import sharding
from seedx.learner.value_head import init_head
from seedx.lora_config import LoraConfig
from seedx.networks import lora
from seedx.networks.transformer_config import TransformerConfig
from seedx.types import Tree

_HEAD = "value_head"


class Trainable(NamedTuple):
    """The seam between the update, which knows of a tree that it trains, and the policy, which others compute with.

    What is trained is a dict: the policy's parameters or the adapters of its base, and the value head under a name of
    its own among them. What is frozen is the parameters that the run began with, if something needs them: the base, and
    the reference that the loss compares the policy with, which with adapters is the base. Else it is None.

    Attributes:
        config: Of the model.
        mesh: Where it lives; the value head is whole on every device.
        value_head: Whether there is one.
        reference: Whether the policy is compared with the model that the run began with.
        lora: The adapters.
        seed: Of the adapters.
        split: Whether parameters are split over fsdp.
    """

    config: TransformerConfig
    mesh: Mesh
    value_head: bool = False
    reference: bool = False
    lora: LoraConfig = LoraConfig()
    seed: int = 0
    split: bool = True

    def begin(self, params: Tree) -> tuple[Tree, Tree]:
        """What is trained and what is frozen, of a run that begins with these parameters; none are copied."""
        head = {}
        if self.value_head:
            head = {_HEAD: jax.device_put(init_head(self.config.width), sharding.replicated(self.mesh))}
        if self.lora.rank:
            return {**self._adapters(), **head}, params
        return {**params, **head}, params if self.reference else None

    def policy(self, trained: Tree, frozen: Tree) -> Tree:
        """The parameters of the policy."""
        own = _without_head(trained)
        return lora.merge(frozen, own, self.lora.scale) if self.lora.rank else own

    def policy_program(self, params: Tree) -> Callable[[Tree, Tree], Tree]:
        """`policy` for where nothing else is computed; what it makes lives where these parameters do."""
        if not self.lora.rank:
            return self.policy  # which computes nothing, and copies nothing
        return jax.jit(self.policy, out_shardings=sharding.layout_of(params))

    def head(self, trained: Tree) -> Tree:
        """The value head; None if there is none."""
        return trained.get(_HEAD)

    def stored(self, trained: Tree, frozen: Tree) -> dict[str, Tree]:
        """What a checkpoint holds of both beside the policy's parameters."""
        head = {_HEAD: trained[_HEAD]} if self.value_head else {}
        if self.lora.rank:
            return {"adapters": _without_head(trained), "base": frozen, **head}
        return head | ({"reference": frozen} if self.reference else {})

    def restored(self, params: Tree, stored: dict[str, Tree]) -> tuple[Tree, Tree]:
        """What is trained and what is frozen, of the policy's parameters and of what `stored` gave."""
        head = {_HEAD: stored[_HEAD]} if self.value_head else {}
        if self.lora.rank:
            return {**stored["adapters"], **head}, stored["base"]
        return {**params, **head}, stored.get("reference")

    def _adapters(self) -> Tree:
        def init(key: jax.Array) -> Tree:
            return lora.init_adapters(self.config, self.lora.rank, key)

        key = jax.random.key(self.seed)
        axes, shapes = lora.adapter_axes(self.config), jax.eval_shape(init, key)
        layout = sharding.serve_shardings(self.mesh, axes, shapes, split=self.split)
        return jax.jit(init, out_shardings=layout)(key)


def _without_head(trained: Tree) -> Tree:
    return {name: leaf for name, leaf in trained.items() if name != _HEAD}

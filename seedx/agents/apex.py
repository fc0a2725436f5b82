"""Ape-X DQN (arXiv 1803.00933): n-step double Q-learning from prioritized replay of single transitions."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PyTree

from seedx.agents.r2d2 import R2D2, chosen
from seedx.checks import require
from seedx.config import Config, R2D2Config
from seedx.types import EnvSpec, StepType, Unroll


class Apex(R2D2):
    """An `Agent`: R2D2 without burn-in, rescaling and sequences.

    An item is `num_steps` transitions, and one begins at every row (`learner.period` 1). The first transition is what
    is learned from, the others are its horizon.
    """

    _trained = slice(1)

    def __init__(self, config: Config, spec: EnvSpec) -> None:
        steps, length, burn_in = config.apex.num_steps, config.learner.unroll_length, config.learner.burn_in
        require(
            steps == length and burn_in == 0,
            f"agent 'apex' learns from the first of learner.unroll_length ({length}) transitions, the others are its "
            f"horizon of apex.num_steps ({steps}): the two must be equal, and learner.burn_in ({burn_in}) 0.",
        )
        require(
            config.network.lstm == 0,
            f"agent 'apex' learns from single transitions: network.lstm ({config.network.lstm}) must be 0. For memory "
            "take --agent r2d2.",
        )
        r2d2 = R2D2Config(**dataclasses.asdict(config.apex), rescale=False, priority_eta=1.0)
        super().__init__(dataclasses.replace(config, r2d2=r2d2), spec)

    def _values(
        self, params: PyTree, target_params: PyTree, unroll: Unroll
    ) -> tuple[Float[Array, "1 B A"], Float[Array, "R B"]]:
        """Q of row 0, and as every row's value that of the row from which row 0 bootstraps.

        That row is the first whose action was not executed, or the last; no other rows go through the networks.
        """
        ends = (unroll.timestep.step_type == StepType.LAST).at[-1].set(True)
        end = self._row(unroll, jnp.argmax(ends, axis=0))
        values = chosen(self._q(target_params, end), jnp.argmax(self._q(params, end), axis=-1))
        start = jax.tree.map(lambda leaf: leaf[:1], unroll._replace(state=None))._replace(state=unroll.state)
        return self._q(params, start), jnp.broadcast_to(values, ends.shape)

    def _row(self, unroll: Unroll, number: Int[Array, "B"]) -> Unroll:
        """One row of each item, with the state before it; that of row 0, which is not trained on then, is not told."""

        def take(tree: PyTree, number: Int[Array, "B"]) -> PyTree:
            return jax.tree.map(lambda leaf: jax.vmap(lambda rows, i: rows[i], (1, 0))(leaf, number), tree)

        rows = jax.tree.map(lambda leaf: leaf[None], take(unroll._replace(state=None), number))
        before = take(unroll.action, jnp.maximum(number - 1, 0))
        return rows._replace(state=self._network.remember(unroll.state, before))

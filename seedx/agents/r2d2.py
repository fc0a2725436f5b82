"""R2D2 (OpenReview r1lyTjAqYX): double Q-learning from prioritized replay of sequences with stored recurrent state."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Key, PyTree

from seedx.checks import require
from seedx.config import Config
from seedx.learner.double_q import mixed_priorities, n_step_returns
from seedx.learner.losses import masked_sum
from seedx.learner.rescaling import rescale, unscale
from seedx.networks.heads import DuelingQ, num_discrete_actions
from seedx.networks.network import NetworkState, build_network
from seedx.types import EnvSpec, LossOutput, Settings, TimeStep, Unroll, transition_mask


class R2D2:
    """An `Agent`: pure functions of a config and an environment's spec.

    `extras` is `{"q": float32 [B], "max_q": float32 [B]}`, Q(x_t, a_t) and max_a Q(x_t, a) of the network that acted;
    initial priorities are made of them.
    """

    _trained = slice(None)  # which of the rows after the burn-in are trained on

    def __init__(self, config: Config, spec: EnvSpec) -> None:
        require(
            config.learner.target_period > 0,
            f"learner.target_period (0) must be positive: agent {config.agent!r} needs a target network.",
        )
        self._config = config.r2d2
        self._lead, self._burn_in = config.network.lead, config.learner.burn_in
        self._network = build_network(config.network, spec, DuelingQ)
        self._num_actions = num_discrete_actions(spec)
        self._action_dtype = jax.dtypes.canonicalize_dtype(spec.action.dtype)

    def init(self, key: Key[Array, ""]) -> PyTree:
        """Fresh parameters: nested dicts of float32 arrays."""
        return self._network.init(key)

    def initial_state(self, batch_size: int) -> NetworkState:
        """State before the first row, `[B, ...]` leaves."""
        return self._network.initial_state(batch_size)

    def unroll_state(self, state: NetworkState) -> NetworkState:
        """All but the frames before, which are in the rows that lead an unroll."""
        return state._replace(rings=None)

    def act(
        self, params: PyTree, state: NetworkState, timestep: TimeStep, keys: Key[Array, "B"], settings: Settings
    ) -> tuple[Array, NetworkState, dict[str, Float[Array, "B"]]]:
        """The best action `[B]`, or with probability epsilon any: `(action, state, extras)`.

        Environment i of N explores with epsilon^(1 + (power - 1) i / (N - 1)) (Ape-X, 1803.00933); those of evaluation
        do not explore.
        """
        q, state = self._network.step(params, state, timestep)
        powers = 1 + (self._config.epsilon_power - 1) * settings.rank
        epsilon = jnp.where(settings.greedy, 0.0, self._config.epsilon**powers)
        action = jax.vmap(_explore)(keys, epsilon, q).astype(self._action_dtype)
        extras = {"q": chosen(q, action), "max_q": jnp.max(q, axis=-1)}
        return action, self._network.remember(state, action), extras

    def loss(
        self,
        params: PyTree,
        target_params: PyTree,
        unroll: Unroll,
        weights: Float[Array, "B"],
        key: Key[Array, ""],
    ) -> tuple[Float[Array, ""], LossOutput]:
        """1/2 squared n-step double Q error, weighted, summed over the executed transitions after the burn-in.

        Target and errors carry no gradient but through Q(x_t, a_t).
        """
        del key  # nothing is drawn
        unroll = self._network.stacked(unroll)
        q, values = self._values(params, target_params, unroll)
        rows = jax.tree.map(lambda leaf: leaf[self._burn_in :], unroll._replace(state=None))
        executed = transition_mask(rows.timestep.step_type)
        targets = jax.lax.stop_gradient(self._targets(rows.timestep, values, executed)[self._trained])
        mask = executed[self._trained]
        errors = jnp.where(mask, targets - chosen(q, rows.action[:-1][self._trained]), 0.0)
        loss = 0.5 * masked_sum(weights[None] * jnp.square(errors), mask)
        metrics = {
            "td_error": masked_sum(jnp.abs(errors), mask),
            "value": masked_sum(jnp.max(q, axis=-1), mask),
            "target": masked_sum(targets, mask),
            "importance_weight": masked_sum(jnp.broadcast_to(weights[None], mask.shape), mask),
        }
        priorities = mixed_priorities(jax.lax.stop_gradient(errors), mask, self._config.priority_eta)
        return loss, LossOutput(metrics, jnp.sum(mask), priorities)

    def initial_priorities(self, unrolls: Unroll) -> Float[np.ndarray, "N"]:
        """From the values that acting kept: the acting network stands in for both the online and the target one."""
        start = self._lead + self._burn_in
        rows = unrolls.timestep._replace(observation=None), unrolls.extras
        timestep, extras = jax.tree.map(lambda leaf: np.moveaxis(leaf, 1, 0)[start:], rows)
        executed = transition_mask(timestep.step_type)
        errors = (self._targets(timestep, extras["max_q"], executed) - extras["q"][:-1])[self._trained]
        return mixed_priorities(errors, executed[self._trained], self._config.priority_eta).astype(np.float32)

    def _values(
        self, params: PyTree, target_params: PyTree, unroll: Unroll
    ) -> tuple[Float[Array, "T B A"], Float[Array, "T+1 B"]]:
        """Q of the rows of a stacked unroll that are trained on, and the values that these may bootstrap from."""
        q = self._q(params, unroll)
        return q[:-1], chosen(self._q(target_params, unroll), jnp.argmax(q, axis=-1))

    def _q(self, params: PyTree, unroll: Unroll) -> Float[Array, "T B A"]:
        """Q of a stacked unroll after the burn-in, which starts from the stored state and carries no gradient."""
        state = unroll.state
        if self._burn_in:
            before = jax.tree.map(lambda leaf: leaf[: self._burn_in], (unroll.timestep, unroll.action))
            state = jax.lax.stop_gradient(self._network.unroll(params, state, *before)[1])
        rows = jax.tree.map(lambda leaf: leaf[self._burn_in :], (unroll.timestep, unroll.action))
        return self._network.unroll(params, state, *rows)[0]

    def _targets(self, timestep: TimeStep, values: Any, mask: Any) -> Any:
        """Targets `[T, B]` from bootstrap values `[T+1, B]`, on the scale that Q is learned on; JAX or NumPy."""
        config, xp = self._config, values.__array_namespace__()
        rewards = timestep.reward[1:]
        if config.max_abs_reward > 0:
            rewards = xp.clip(rewards, -config.max_abs_reward, config.max_abs_reward)
        discounts = config.discount * timestep.discount[1:]
        if not config.rescale:
            return n_step_returns(rewards, discounts, values, mask, config.num_steps)
        return rescale(n_step_returns(rewards, discounts, unscale(values), mask, config.num_steps))


def _explore(key: Key[Array, ""], epsilon: Float[Array, ""], q: Float[Array, "A"]) -> Array:
    """The greedy action, or any with probability epsilon."""
    key_whether, key_which = jax.random.split(key)
    any_action = jax.random.randint(key_which, (), 0, q.shape[-1])
    return jnp.where(jax.random.uniform(key_whether) < epsilon, any_action, jnp.argmax(q, axis=-1))


def chosen(q: Float[Array, "*B A"], action: Array) -> Float[Array, "*B"]:
    """Q(x, a) of one action a row."""
    return jnp.take_along_axis(q, action[..., None].astype(jnp.int32), axis=-1)[..., 0]

"""IMPALA (arXiv 1802.01561): an actor-critic that corrects for policy lag with V-trace."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key, PyTree

from seedx.config import Config
from seedx.learner.losses import entropy_loss, masked_sum, policy_gradient_loss, value_loss
from seedx.learner.vtrace import vtrace
from seedx.networks.distributions import distribution_for
from seedx.networks.heads import ActorCritic
from seedx.networks.network import NetworkState, build_network
from seedx.types import EnvSpec, LossOutput, Settings, TimeStep, Unroll, transition_mask


class Impala:
    """An `Agent`: pure functions of a config and an environment's spec.

    `extras` is `{"log_prob": float32 [B]}`, log mu(a_t|x_t) of the behaviour policy.
    """

    def __init__(self, config: Config, spec: EnvSpec) -> None:
        self._config = config.impala
        self._network = build_network(config.network, spec, ActorCritic)
        self._distribution = distribution_for(spec.action)

    def init(self, key: Key[Array, ""]) -> PyTree:
        """Fresh parameters: nested dicts of float32 arrays."""
        return self._network.init(key)

    def initial_state(self, batch_size: int) -> NetworkState:
        """State before the first row, `[B, ...]` leaves; a plain MLP has none."""
        return self._network.initial_state(batch_size)

    def unroll_state(self, state: NetworkState) -> NetworkState:
        """All but the frames before, which are in the rows that lead an unroll."""
        return state._replace(rings=None)

    def act(
        self, params: PyTree, state: NetworkState, timestep: TimeStep, keys: Key[Array, "B"], settings: Settings
    ) -> tuple[PyTree, NetworkState, dict[str, Float[Array, "B"]]]:
        """Samples `[B]` actions, or takes the most likely one where `settings.greedy`: `(action, state, extras)`."""
        (parameters, _), state = self._network.step(params, state, timestep)
        sampled = self._distribution.sample(parameters, keys)
        greedy = self._distribution.mode(parameters)
        action = jax.tree.map(lambda g, s: _where_row(settings.greedy, g, s), greedy, sampled)
        # Of the action as stored, so that an unchanged policy finds the same number in the loss.
        extras = {"log_prob": self._distribution.log_prob(parameters, action)}
        return action, self._network.remember(state, action), extras

    def loss(
        self,
        params: PyTree,
        target_params: None,
        unroll: Unroll,
        weights: Float[Array, "B"],
        key: Key[Array, ""],
    ) -> tuple[Float[Array, ""], LossOutput]:
        """Policy gradient + value_cost * 1/2 squared error - entropy_cost * entropy, summed over executed transitions.

        No gradient flows through targets, advantages or importance weights. The metrics are summed likewise.
        """
        del target_params, weights, key  # every unroll counts alike and once; nothing is drawn
        unroll = self._network.stacked(unroll)
        config, timestep = self._config, unroll.timestep
        mask = transition_mask(timestep.step_type)
        (parameters, values), _ = self._network.unroll(params, unroll.state, timestep, unroll.action)
        log_probs = self._distribution.log_prob(parameters[:-1], jax.tree.map(lambda a: a[:-1], unroll.action))
        log_rhos = jax.lax.stop_gradient(log_probs) - unroll.extras["log_prob"][:-1]
        rewards = timestep.reward[1:]
        if config.max_abs_reward > 0:
            rewards = jnp.clip(rewards, -config.max_abs_reward, config.max_abs_reward)
        targets, advantages = vtrace(
            log_rhos,
            config.discount * timestep.discount[1:],
            rewards,
            jax.lax.stop_gradient(values),
            mask,
            lambda_=config.lambda_,
            clip_rho=config.clip_rho,
            clip_pg_rho=config.clip_pg_rho,
        )
        policy = policy_gradient_loss(log_probs, advantages, mask)
        value = value_loss(values[:-1], targets, mask)
        entropy = entropy_loss(self._distribution.entropy(parameters[:-1]), mask)
        rhos = jnp.exp(log_rhos)
        metrics = {
            "policy_loss": policy,
            "value_loss": value,
            "entropy": -entropy,
            "rho": masked_sum(rhos, mask),
            "clip_fraction": masked_sum((rhos > config.clip_rho).astype(jnp.float32), mask),
            "approx_kl": masked_sum(-log_rhos, mask),
            "value": masked_sum(values[:-1], mask),
            "advantage": masked_sum(advantages, mask),
        }
        loss = policy + config.value_cost * value + config.entropy_cost * entropy
        return loss, LossOutput(metrics, count=jnp.sum(mask))


def _where_row(condition: Array, x: Array, y: Array) -> Array:
    """Per-row choice between `[B, ...]` arrays."""
    return jnp.where(condition.reshape(-1, *(1,) * (x.ndim - 1)), x, y)

"""The models: a trunk with the heads of an actor-critic, or of a dueling Q-network."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from seedx.checks import ConfigError
from seedx.config import NetworkConfig
from seedx.networks.distributions import distribution_for
from seedx.networks.trunk import Trunk
from seedx.types import ArraySpec, EnvSpec


class ActorCritic(Trunk):
    """Policy and value."""

    def __init__(self, config: NetworkConfig, spec: EnvSpec, rngs: nnx.Rngs) -> None:
        super().__init__(config, spec, rngs)
        num_parameters = distribution_for(spec.action).num_parameters
        # A small policy head starts near the uniform policy.
        small, one = nnx.initializers.orthogonal(0.01), nnx.initializers.orthogonal(1.0)
        self.policy = nnx.Linear(self.num_features, num_parameters, kernel_init=small, rngs=rngs)
        self.value = nnx.Linear(self.num_features, 1, kernel_init=one, rngs=rngs)

    def heads(self, x: Float[Array, "*B D"]) -> tuple[Float[Array, "*B P"], Float[Array, "*B"]]:
        """Policy parameters and value."""
        return self.policy(x), self.value(x)[..., 0]


class DuelingQ(Trunk):
    """Action values: Q(x, a) = V(x) + A(x, a) - mean_a A(x, a) (1511.06581, equation 9); a hidden layer in each stream.

    Raises:
        ConfigError: the action is not a single discrete one.
    """

    def __init__(self, config: NetworkConfig, spec: EnvSpec, rngs: nnx.Rngs) -> None:
        super().__init__(config, spec, rngs)
        num_actions = num_discrete_actions(spec)
        width = config.dueling_hidden
        self.value_hidden = nnx.Linear(self.num_features, width, rngs=rngs)
        self.value = nnx.Linear(width, 1, rngs=rngs)
        self.advantage_hidden = nnx.Linear(self.num_features, width, rngs=rngs)
        self.advantage = nnx.Linear(width, num_actions, rngs=rngs)

    def heads(self, x: Float[Array, "*B D"]) -> Float[Array, "*B A"]:
        """Action values."""
        value = self.value(jax.nn.relu(self.value_hidden(x)))
        advantage = self.advantage(jax.nn.relu(self.advantage_hidden(x)))
        return value + advantage - jnp.mean(advantage, axis=-1, keepdims=True)


def num_discrete_actions(spec: EnvSpec) -> int:
    """How many actions there are to choose from.

    Raises:
        ConfigError: the action is not a single discrete one.
    """
    if not isinstance(spec.action, ArraySpec) or spec.action.num_values is None or spec.action.shape:
        raise ConfigError(
            f"env {spec.env!r} has the actions {spec.action}; this agent needs one discrete action. Use --agent impala."
        )
    return spec.action.num_values

"""Agents with checks and faults, for the tests: `--agent faulty_agents:checking`."""

import jax.numpy as jnp

from seedx.agents.impala import Impala
from seedx.types import transition_mask


class Checking(Impala):
    """IMPALA with a metric `broken`: how many rows of the unrolls do not follow from the row before."""

    def loss(self, params, target_params, unroll, weights, key):
        loss, output = super().loss(params, target_params, unroll, weights, key)
        serial, t, action = jnp.moveaxis(unroll.timestep.observation, -1, 0)
        executed = transition_mask(unroll.timestep.step_type)
        broken = (serial[1:] != serial[:-1]) | (t[1:] != t[:-1] + 1)
        broken |= executed & (action[1:] != unroll.action[:-1].astype(jnp.float32))
        return loss, output._replace(metrics={**output.metrics, "broken": broken.sum().astype(jnp.float32)})


def checking(config, spec):
    return Checking(config, spec)


class Diverging(Impala):
    """IMPALA whose loss becomes NaN at the environments' 100th step."""

    def loss(self, params, target_params, unroll, weights, key):
        loss, output = super().loss(params, target_params, unroll, weights, key)
        return jnp.where(unroll.timestep.observation[..., 1].max() > 100.0, jnp.nan, loss), output


def diverging(config, spec):
    return Diverging(config, spec)


class Raising(Impala):
    """IMPALA with a mistake in its loss."""

    def loss(self, params, target_params, unroll, weights, key):
        raise TypeError("a mistake in the loss")


def raising(config, spec):
    return Raising(config, spec)

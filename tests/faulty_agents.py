"""Agents with checks and faults, for the tests: `--agent faulty_agents:checking`."""

import os
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback

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


class Once(Checking):
    """`Checking` with a metric `repeated`: transitions of an update that were in an earlier one too."""

    def loss(self, params, target_params, unroll, weights, key):
        loss, output = super().loss(params, target_params, unroll, weights, key)
        executed = transition_mask(unroll.timestep.step_type)
        shape = jax.ShapeDtypeStruct((), jnp.float32)
        repeated = io_callback(self._count_repeated, shape, unroll.timestep.observation[1:], executed)
        return loss, output._replace(metrics={**output.metrics, "repeated": repeated})

    def _count_repeated(self, rows, executed):
        found = {(int(serial), int(t)) for serial, t, _ in np.asarray(rows)[np.asarray(executed)]}
        seen = self.__dict__.setdefault("_seen", set())
        repeated = len(found & seen) + int(np.sum(executed)) - len(found)
        seen |= found
        return np.float32(repeated)


def once(config, spec):
    return Once(config, spec)


class Slow(Checking):
    """`Checking` whose update takes a fifth of a second."""

    def loss(self, params, target_params, unroll, weights, key):
        loss, output = super().loss(params, target_params, unroll, weights, key)
        zero = io_callback(lambda: (time.sleep(0.2), np.float32(0))[1], jax.ShapeDtypeStruct((), jnp.float32))
        return loss, output._replace(metrics={**output.metrics, "broken": output.metrics["broken"] + zero})


def slow(config, spec):
    return Slow(config, spec)


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


def recording(config, spec):
    """`Slow` whose learner appends the keys of all items that it samples to the file SAMPLED_KEYS."""
    from seedx.replay.reverb_replay import ReverbReplay

    sample = ReverbReplay.sample

    def recorded(*args):
        found = sample(*args)
        with open(os.environ["SAMPLED_KEYS"], "a") as file:
            file.write("".join(f"{key}\n" for key in found.keys.tolist()))
        return found

    ReverbReplay.sample = recorded
    return Slow(config, spec)

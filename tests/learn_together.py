"""One host of a learner that is fed recorded batches: `python learn_together.py OUT.npz [HOST COUNT COORDINATOR]`.

Writes the parameters and the optimizer's state after the last update, and what the policy server would act with.
"""

import dataclasses
import sys
from pathlib import Path

import jax
import numpy as np
from fakes import VECTOR, random_unroll, sample_of

from seedx import sharding
from seedx.agents.impala import Impala
from seedx.config import Config, LearnerConfig, NetworkConfig
from seedx.hosts import Hosts
from seedx.learner.batches import Batches, masked_batch
from seedx.learner.learner import Learner, initial_state
from seedx.metrics import Metrics
from seedx.replay.fifo import Fifo
from seedx.threads import Crew
from seedx.votes import Vote
from seedx.weights import WeightStore

B, T, UPDATES = 16, 5, 6
CONFIG = Config(
    network=NetworkConfig(torso="mlp", hidden=(16,), lstm=4),
    learner=LearnerConfig(batch_size=B, unroll_length=T, learning_rate_steps=500),
)
SHORT = 3  # in this update the last host has no batch


def share(unroll, hosts):
    """A host's part of a batch, as its replay gives it."""
    columns = slice(hosts.index * B // hosts.count, (hosts.index + 1) * B // hosts.count)
    rows = jax.tree.map(lambda leaf: np.moveaxis(leaf, 1, 0)[columns], tuple(unroll[:-1]))
    return sample_of(unroll._replace(**dict(zip(unroll._fields, rows, strict=False)), state=cut(unroll.state, columns)))


def cut(state, rows):
    return jax.tree.map(lambda leaf: np.asarray(leaf)[rows], state)


def masked_half(unroll):
    """The batch without the second half's transitions: what a short host leaves."""
    unroll.timestep.step_type[:, B // 2 :] = 2
    return unroll


def main(out, index=0, count=1, coordinator=""):
    hosts = Hosts(coordinator, int(count), int(index))
    lifeline = hosts.join("the same", 60.0, lambda: False, print)
    agent, metrics, weights = Impala(CONFIG, VECTOR), Metrics(), WeightStore()
    meshes = sharding.build_meshes(CONFIG.learner)
    weights = WeightStore(sharding.mover(meshes.learner, meshes.inference))
    state = initial_state(agent, CONFIG.learner, meshes.learner, CONFIG.seed)
    learner = Learner(agent, CONFIG.learner, meshes, state, weights, metrics, CONFIG.seed, Path(out).parent, hosts)
    own = dataclasses.replace(CONFIG.learner, batch_size=hosts.share(B))
    batches = Batches(Fifo(8), own, 0.0, meshes.learner, metrics, Crew())
    hosts.meet("learning", 60.0)
    for i in range(UPDATES):
        unroll = random_unroll(B, T, seed=i, state=agent.initial_state(B))
        batch = batches.prepare(share(masked_half(unroll) if i == SHORT else unroll, hosts))
        if i == SHORT and 2 * hosts.index >= hosts.count > 1:
            batch = masked_batch(jax.tree.map(lambda leaf: leaf, batch.host), meshes.learner)
        vote = Vote("steps" if i == UPDATES - 1 else None, not batch.masked, batch.env_steps, float(hosts.index), 1)
        learner.step(batch, None if hosts.alone else vote)
    acting = weights.latest().params
    for mine, learned in zip(jax.tree.leaves(acting), jax.tree.leaves(learner.state.params), strict=True):
        assert mine.is_fully_addressable
        for a, b in zip(mine.addressable_shards, learned.addressable_shards, strict=True):
            assert a.data.unsafe_buffer_pointer() == b.data.unsafe_buffer_pointer()  # published without a copy
    if not hosts.alone:
        assert learner.votes is not None
        assert learner.votes.stop == "steps"
        assert learner.votes.returns == ((hosts.count - 1) / 2, hosts.count)
        nothing = masked_batch(batch.host, meshes.learner)
        before = learner.state
        learner.step(nothing, Vote(None, False, 0, 0.0, 0))  # of all hosts: no update
        assert learner.state.updates == before.updates == UPDATES
    arrays = acting, sharding.local_view(learner.state.opt_state, meshes.learner)
    leaves = {str(i): np.asarray(leaf) for i, leaf in enumerate(jax.tree.leaves(arrays))}
    np.savez(out, env_steps=learner.state.env_steps, updates=learner.state.updates, **leaves)
    lifeline.end()
    hosts.leave()


if __name__ == "__main__":
    main(*sys.argv[1:])

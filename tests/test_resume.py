"""State resume: a learner restored at update k goes on as if it had never stopped, bit for bit."""

import dataclasses

import jax
import numpy as np
from bits import assert_bit_equal
from fakes import VECTOR, random_unroll, sample_of

from seedx import sharding
from seedx.agents.impala import Impala
from seedx.checkpoint import Checkpointer
from seedx.config import Config, LearnerConfig, NetworkConfig
from seedx.learner.batches import Batches
from seedx.learner.learner import Learner, LearnerState, initial_state
from seedx.metrics import Metrics
from seedx.replay.fifo import Fifo
from seedx.threads import Crew
from seedx.weights import WeightStore

CONFIG = Config(
    network=NetworkConfig(torso="mlp", hidden=(16,)),
    learner=LearnerConfig(batch_size=8, unroll_length=5, devices=2, learning_rate_steps=500, optimizer="adam"),
)
UPDATES, STOPPED_AT = 8, 5


def make_learner(agent, state, tmp_path, config=CONFIG):
    meshes, weights = sharding.build_meshes(config.learner), WeightStore()
    return Learner(agent, config.learner, meshes, state, weights, Metrics(), config.seed, tmp_path), weights


def feed(learner, batches):
    """Updates on items that were recorded as a replay gives them."""
    mesh = sharding.build_meshes(CONFIG.learner).learner
    prepare = Batches(Fifo(8), CONFIG.learner, 0.0, mesh, Metrics(), Crew()).prepare
    for unroll in batches:
        rows = jax.tree.map(lambda leaf: np.moveaxis(leaf, 1, 0), tuple(unroll[:-1]))
        learner.step(prepare(sample_of(unroll._replace(**dict(zip(unroll._fields[:-1], rows, strict=True))))))


def test_restored_and_fed_the_same_batches_it_ends_with_the_same_bits(tmp_path):
    agent = Impala(CONFIG, VECTOR)
    state = agent.initial_state(8)
    recorded = [random_unroll(8, 5, seed=i, state=state) for i in range(UPDATES)]
    mesh = sharding.build_meshes(CONFIG.learner).learner

    whole, _ = make_learner(agent, initial_state(agent, CONFIG.learner, mesh, 1), tmp_path)
    feed(whole, recorded)

    first, _ = make_learner(agent, initial_state(agent, CONFIG.learner, mesh, 1), tmp_path)
    feed(first, recorded[:STOPPED_AT])
    saver = Checkpointer(tmp_path)
    saved = first.state
    metadata = {"env_steps": saved.env_steps}
    saver.save(saved.updates, saved.params, {"opt_state": saved.opt_state}, metadata, block=True)
    saver.close()

    template = initial_state(agent, CONFIG.learner, mesh, 2)  # of another seed: nothing of it may stay
    found = Checkpointer(tmp_path).restore(template.params, {"opt_state": template.opt_state})
    restored = LearnerState(found.params, None, found.state["opt_state"], found.update, found.metadata["env_steps"])
    second, weights = make_learner(agent, restored, tmp_path)
    assert weights.latest().version == STOPPED_AT
    feed(second, recorded[STOPPED_AT:])

    assert second.state.updates == whole.state.updates == UPDATES
    assert second.state.env_steps == whole.state.env_steps
    ours, theirs = (jax.tree.leaves((s.state.params, s.state.opt_state)) for s in (second, whole))
    assert len(ours) == len(theirs) > 8
    assert_bit_equal(ours, theirs)
    # And the batches matter: without the last one, the parameters differ.
    shorter, _ = make_learner(agent, initial_state(agent, CONFIG.learner, mesh, 1), tmp_path)
    feed(shorter, recorded[:-1])
    assert not np.array_equal(*(np.asarray(jax.tree.leaves(s.state.params)[-1]) for s in (shorter, whole)))


def rate_after(env_steps, config, tmp_path):
    """The learning rate of an update after so many environment steps."""
    agent = Impala(config, VECTOR)
    mesh = sharding.build_meshes(config.learner).learner
    state = initial_state(agent, config.learner, mesh, 1)._replace(env_steps=env_steps, updates=9)
    learner, _ = make_learner(agent, state, tmp_path, config)
    feed(learner, [random_unroll(8, 5, state=agent.initial_state(8))])
    return learner._metrics.snapshot()["learner/learning_rate"]


def test_the_learning_rate_goes_on_where_it_was(tmp_path):
    rate = np.float32(CONFIG.learner.learning_rate)
    assert rate_after(250, CONFIG, tmp_path) == rate / 2
    constant = dataclasses.replace(CONFIG, learner=dataclasses.replace(CONFIG.learner, learning_rate_steps=0))
    assert rate_after(250, constant, tmp_path) == rate

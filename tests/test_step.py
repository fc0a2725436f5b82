"""The jitted functions over slots: keys by actor, environment and session, padding that touches nothing, sizes."""

import math

import jax
import numpy as np
import pytest
from fakes import VECTOR
from hypothesis import given
from hypothesis import strategies as st
from server_harness import Script, make_config

from seedx import sharding
from seedx.agents.impala import Impala
from seedx.inference import step

S = 6


@pytest.fixture(scope="module")
def policy():
    config = make_config()
    agent = Impala(config, VECTOR)
    return step.make_policy_step(agent, S, jax.random.key(1), sharding.build_meshes(config.learner).inference), agent


def attached(policy, tables, slots, actor_id=0, envs=(0, 1), session=0, greedy=False):
    """The tables, as NumPy arrays, after some slots were attached."""
    tables = policy.attach(
        jax.tree.map(jax.numpy.array, tables),
        np.array(slots, np.int32),
        np.int32(actor_id),
        np.array(envs, np.int32),
        np.int32(session),
        np.full(len(slots), 0.5, np.float32),
        np.bool_(greedy),
    )
    return jax.tree.map(np.array, tables)


def test_keys_are_of_the_actor_its_environment_and_its_session_whatever_the_slot(policy):
    policy, _ = policy
    keys = {}
    for name, arguments in {
        "here": {"slots": [0, 1]},
        "elsewhere": {"slots": [4, 3]},
        "another actor": {"slots": [0, 1], "actor_id": 1},
        "another session": {"slots": [0, 1], "session": 1},
        "other environments": {"slots": [0, 1], "envs": (2, 3)},
    }.items():
        tables = attached(policy, policy.fresh(), **arguments)
        keys[name] = tables.key[arguments["slots"]].tolist()
    assert keys["here"] == keys.pop("elsewhere")
    assert len({tuple(key) for pair in keys.values() for key in pair}) == 8


def test_attaching_touches_no_other_slot_and_padding_touches_none(policy):
    policy, _ = policy
    before = attached(policy, policy.fresh(), range(S), envs=range(S), greedy=True)
    before = before._replace(step=before.step + np.int32(7))
    after = attached(policy, before, [2, S], envs=(0, 0), session=3)
    assert after.step.tolist() == [7, 7, 0, 7, 7, 7]
    assert after.greedy.tolist() == [True, True, False, True, True, True]
    changed = (after.key != before.key).any(axis=1)
    assert changed.tolist() == [False, False, True, False, False, False]


def test_acting_counts_the_steps_of_its_rows_alone(policy):
    policy, agent = policy
    tables = jax.tree.map(jax.numpy.array, attached(policy, policy.fresh(), range(S), envs=range(S)))
    row = Script(VECTOR, [1, 2, 3, 4]).row(0)
    tables, output = policy.act(agent.init(jax.random.key(0)), tables, np.array([5, 0, S, S], np.int32), row)
    assert np.array(tables.step).tolist() == [1, 0, 0, 0, 0, 1]
    assert output.action.shape == (4,)


class Counting(Impala):
    """IMPALA with a state of two parts, of which all that it says goes with unrolls."""

    def initial_state(self, batch_size):
        return {"rows": np.zeros(batch_size, np.int32), "twice": np.zeros(batch_size, np.int32)}

    def act(self, params, state, timestep, keys, settings):
        action, _, extras = super().act(params, super().initial_state(0), timestep, keys, settings)
        return action, {"rows": state["rows"] + 1, "twice": state["twice"] + 2}, extras


class Whole(Counting):
    unroll_state = None


class Half(Counting):
    def unroll_state(self, state):
        return {"rows": state["rows"]}


@pytest.mark.parametrize(("kind", "parts"), [(Whole, {"rows": 1, "twice": 2}), (Half, {"rows": 1})])
def test_the_state_before_a_row_comes_out_as_far_as_the_agent_says_it_goes_with_unrolls(kind, parts):
    config = make_config()
    agent, mesh = kind(config, VECTOR), sharding.build_meshes(config.learner).inference
    policy, row = step.make_policy_step(agent, S, jax.random.key(1), mesh), Script(VECTOR, [1, 2]).row(0)
    tables, slots, params = policy.fresh(), np.array([4, 1], np.int32), agent.init(jax.random.key(0))
    for t in range(2):
        tables, output = policy.act(params, tables, slots, row)
        assert jax.tree.map(lambda leaf: leaf.tolist(), output.state) == {k: [t * n] * 2 for k, n in parts.items()}
    assert jax.tree.map(lambda leaf: leaf[slots].tolist(), tables.state) == {"rows": [2, 2], "twice": [4, 4]}


@given(st.integers(1, 3000), st.integers(1, 64), st.sampled_from([1, 2, 8]))
def test_sizes_hold_every_batch_are_few_and_do_not_pad_large_batches_much(max_rows, smallest, multiple):
    sizes = step.bucket_sizes(max_rows, smallest, multiple)
    assert sizes == sorted(set(sizes))
    assert all(size % multiple == 0 for size in sizes)
    assert max_rows <= sizes[-1] < max_rows + multiple
    assert len(sizes) <= 3 + math.log(max_rows, 4)
    for rows in range(1, max_rows + 1):
        size = step.bucket_for(rows, sizes)
        assert rows <= size < max(4 * rows + 4, smallest) + multiple
        if rows > max_rows / 2:
            assert size < 2 * rows + multiple


def test_alternating_groups_are_not_padded():
    assert step.bucket_sizes(64, 16, 1) == [16, 32, 64]
    assert step.bucket_sizes(2048, 1024, 1) == [1024, 2048]
    assert step.bucket_sizes(2048, 1, 1) == [1, 4, 16, 64, 256, 1024, 2048]


def test_padding():
    assert step.padded(np.array([3, 1], np.int32), 4, 9).tolist() == [3, 1, 9, 9]
    assert step.padded(np.array([3, 1], np.int32), 2, 9).tolist() == [3, 1]

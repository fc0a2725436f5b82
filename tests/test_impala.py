"""The IMPALA agent: its loss against a NumPy transcription, masks, truncation, evaluation rows, trees, and lowering."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from seedx.agents.impala import Impala
from seedx.config import Config, ImpalaConfig, NetworkConfig
from seedx.types import ArraySpec, EnvSpec, Settings, StepType, TimeStep, Unroll, transition_mask

T, B = 6, 4
ONES = np.ones(B, np.float32)
VECTOR = EnvSpec("vector", ArraySpec((3,), "float32"), ArraySpec((), "int64", num_values=3))
TREE = EnvSpec(
    "tree",
    {"image": ArraySpec((10, 5), "uint8"), "vector": ArraySpec((3,), "float32")},
    (ArraySpec((), "int64", 3), {"box": ArraySpec((2,), "float32", None, -2.0, 2.0), "m": ArraySpec((2,), "int32", 4)}),
)
AGENTS = {
    "vector": (VECTOR, NetworkConfig()),
    "recurrent": (VECTOR, NetworkConfig(lstm=8, previous_action=True)),
    "tree": (TREE, NetworkConfig(lstm=8, previous_action=True, frame_stack=2, hidden=(8,))),
}


@functools.cache
def make(name):
    spec, network = AGENTS[name]
    agent = Impala(Config(network=network), spec)
    return agent, agent.init(jax.random.key(0))


@functools.cache
def act_of(agent):
    return jax.jit(agent.act)


@functools.cache
def loss_of(agent):
    return jax.jit(jax.value_and_grad(agent.loss, has_aux=True))


def timesteps(spec, seed=0, lead=0):
    """`[T+1, B]`: column 0 is one episode, 1 terminates at row 2, 2 is truncated at row 3, 3 begins at row 1.

    `lead` rows go before, with which episodes begin.
    """
    rng, rows = np.random.default_rng(seed), lead + T + 1

    def draw(leaf):
        x = rng.normal(size=(rows, B, *leaf.shape))
        return (100 * np.abs(x)).astype(leaf.dtype) if leaf.dtype == "uint8" else x.astype(leaf.dtype)

    step_type = np.full((rows, B), StepType.MID, np.uint8)
    discount = np.ones((rows, B), np.float32)
    step_type[:lead] = StepType.FIRST
    step_type[lead + 2, 1] = step_type[lead + 3, 2] = step_type[lead, 3] = StepType.LAST
    step_type[lead + 3, 1] = step_type[lead + 4, 2] = step_type[lead + 1, 3] = StepType.FIRST
    discount[lead + 2, 1] = discount[lead, 3] = 0.0
    reward = rng.normal(size=(rows, B)).astype(np.float32)
    return TimeStep(step_type, reward, discount, jax.tree.map(draw, spec.observation))


def act_through(agent, params, timestep):
    """The unroll that acting on given timesteps makes."""
    act, state, rows, states = act_of(agent), agent.initial_state(B), [], []
    settings = Settings(np.arange(B, dtype=np.int32), np.zeros(B, np.float32), np.zeros(B, bool))
    num_rows = len(timestep.reward)
    for t in range(num_rows):
        keys = jax.random.split(jax.random.key(t), B)
        states.append(agent.unroll_state(state))
        action, state, extras = act(params, state, jax.tree.map(lambda x, t=t: x[t], timestep), keys, settings)
        rows.append((action, extras))
    action, extras = jax.tree.map(lambda *x: jnp.stack(x), *rows)
    return Unroll(timestep, action, extras, jnp.zeros((num_rows, B), jnp.int32), states[num_rows - T - 1])


@pytest.mark.parametrize("name", AGENTS)
def test_acting_and_learning_agree_and_every_gradient_is_finite(name):
    agent, params = make(name)
    spec, network = AGENTS[name]
    unroll = act_through(agent, params, timesteps(spec, lead=network.lead))
    (loss, output), gradient = loss_of(agent)(params, None, unroll, ONES, jax.random.key(0))
    mask = transition_mask(unroll.timestep.step_type[network.lead :])
    assert int(output.count) == mask.sum()
    assert np.isfinite(loss)
    np.testing.assert_allclose(output.metrics["rho"], mask.sum(), rtol=1e-4)  # on-policy: every ratio is 1
    np.testing.assert_allclose(output.metrics["approx_kl"], 0.0, atol=1e-3)
    assert output.priorities is None
    assert jax.tree.map(jnp.shape, gradient) == jax.tree.map(jnp.shape, params)
    assert all(np.isfinite(g).all() for g in jax.tree.leaves(gradient))
    assert any(np.abs(g).max() > 0 for g in jax.tree.leaves(gradient["policy"]))


def test_loss_is_the_sum_of_its_transcription():
    impala = ImpalaConfig(discount=0.9, entropy_cost=0.03, value_cost=0.7, lambda_=0.8, max_abs_reward=0.5)
    agent, (_, params) = Impala(Config(impala=impala), VECTOR), make("vector")
    unroll = act_through(agent, params, timesteps(VECTOR))
    rng = np.random.default_rng(1)
    behaviour = np.asarray(unroll.extras["log_prob"]) + rng.normal(size=(T + 1, B)).astype(np.float32)
    unroll = unroll._replace(extras={"log_prob": behaviour})
    (loss, output), _ = loss_of(agent)(params, None, unroll, ONES, jax.random.key(0))

    logits, values = map(
        np.float64, jax.jit(agent._network.unroll)(params, unroll.state, unroll.timestep, unroll.action)[0]
    )
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    policy = value = entropy = 0.0
    for b in range(B):
        target = values[T, b]
        for t in reversed(range(T)):
            if unroll.timestep.step_type[t, b] == StepType.LAST:
                target = values[t, b]
                continue
            reward = np.clip(unroll.timestep.reward[t + 1, b], -0.5, 0.5)
            gamma = 0.9 * unroll.timestep.discount[t + 1, b]
            taken = log_p[t, b, unroll.action[t, b]]
            rho = min(1.0, np.exp(taken - behaviour[t, b]))
            delta = rho * (reward + gamma * values[t + 1, b] - values[t, b])
            policy -= taken * rho * (reward + gamma * target - values[t, b])
            target = values[t, b] + delta + gamma * 0.8 * rho * (target - values[t + 1, b])
            value += 0.5 * (target - values[t, b]) ** 2
            entropy -= (np.exp(log_p[t, b]) * log_p[t, b]).sum()
    got = output.metrics
    np.testing.assert_allclose(
        [got["policy_loss"], got["value_loss"], got["entropy"]], [policy, value, entropy], rtol=1e-4
    )
    np.testing.assert_allclose(loss, policy + 0.7 * value - 0.03 * entropy, rtol=1e-4)


def test_an_ignored_action_has_no_gradient_and_its_numbers_do_not_leak():
    agent, params = make("vector")
    unroll = act_through(agent, params, timesteps(VECTOR))
    mask = transition_mask(unroll.timestep.step_type)
    shape = (T + 1, B, 3)
    original = agent._network

    def loss_of_shift(shift, unroll):
        def unrolled(*inputs):
            (logits, values), state = original.unroll(*inputs)
            return (logits + shift, values), state

        agent._network = original._replace(unroll=unrolled)
        try:
            return agent.loss(params, None, unroll, jnp.asarray(ONES), jax.random.key(0))[0]
        finally:
            agent._network = original

    gradient = np.asarray(jax.jit(jax.grad(loss_of_shift))(jnp.zeros(shape), unroll))
    np.testing.assert_array_equal(np.abs(gradient[:-1]).sum(-1) > 0, mask)
    np.testing.assert_array_equal(gradient[-1], 0.0)

    reward, log_prob = np.array(unroll.timestep.reward), np.array(unroll.extras["log_prob"])
    reward[1:][~mask] = np.nan
    log_prob[:-1][~mask] = np.nan
    dirty = unroll._replace(timestep=unroll.timestep._replace(reward=reward), extras={"log_prob": log_prob})
    clean_out, dirty_out = (loss_of(agent)(params, None, u, ONES, jax.random.key(0)) for u in (unroll, dirty))
    for a, b in zip(jax.tree.leaves(clean_out), jax.tree.leaves(dirty_out), strict=True):
        np.testing.assert_array_equal(a, b)


def test_halves_of_a_batch_add_up():
    agent, params = make("recurrent")
    unroll = act_through(agent, params, timesteps(VECTOR))

    def part(rows):
        timestep, action, extras, version = jax.tree.map(lambda x: x[:, rows], unroll[:4])
        return Unroll(timestep, action, extras, version, jax.tree.map(lambda x: x[rows], unroll.state))

    whole = loss_of(agent)(params, None, unroll, ONES, jax.random.key(0))
    halves = [loss_of(agent)(params, None, part(slice(i, i + 2)), ONES[:2], jax.random.key(0)) for i in (0, 2)]
    for a, b, c in zip(*map(jax.tree.leaves, (whole, *halves)), strict=True):
        np.testing.assert_allclose(a, b + c, atol=1e-4, rtol=1e-4)


def test_greedy_rows_take_the_most_likely_action_and_the_others_sample():
    agent, params = make("tree")
    params = {**params, "policy": jax.tree.map(lambda x: 100 * x, params["policy"])}
    timestep = jax.tree.map(lambda x: x[0], timesteps(TREE))
    act = act_of(agent)

    def run(greedy, seed):
        settings = Settings(np.arange(B, dtype=np.int32), np.zeros(B, np.float32), np.array(greedy))
        action, _, extras = act(
            params, agent.initial_state(B), timestep, jax.random.split(jax.random.key(seed), B), settings
        )
        return jax.tree.leaves((action, extras))

    mixed, other_key, greedy = run([True, False] * 2, 0), run([True, False] * 2, 1), run([True] * B, 0)
    for a, b, c in zip(mixed, other_key, greedy, strict=True):
        np.testing.assert_array_equal(a[::2], b[::2])
        np.testing.assert_array_equal(a[::2], c[::2])
    assert any(np.any(a[1::2] != b[1::2]) for a, b in zip(mixed, other_key, strict=True))


def test_learns_a_bandit():
    """The reward is 1 for action 0: its probability goes to 1 under plain gradient descent."""
    agent, params = make("vector")
    step_type = np.full((T + 1, B), StepType.MID, np.uint8)
    ones = np.ones((T + 1, B), np.float32)
    timestep = jax.tree.map(jnp.asarray, TimeStep(step_type, ones, ones, np.ones((T + 1, B, 3), np.float32)))
    settings = Settings(jnp.arange(B), jnp.zeros(B), jnp.zeros(B, bool))

    @jax.jit
    def update(params, key):
        first_row = jax.tree.map(lambda x: jnp.asarray(x[0]), timestep)
        keys = jax.random.split(key, (T + 1, B))
        action, _, extras = jax.vmap(lambda k: agent.act(params, agent.initial_state(B), first_row, k, settings))(keys)
        reward = jnp.concatenate([ones[:1], (action[:-1] == 0).astype(jnp.float32)])
        unroll = Unroll(timestep._replace(reward=reward), action, extras, action, agent.initial_state(B))
        gradient = jax.grad(agent.loss, has_aux=True)(params, None, unroll, jnp.ones(B), key)[0]
        return jax.tree.map(lambda p, g: p - 0.02 * g, params, gradient), jnp.mean(reward[1:])

    for i in range(150):
        params, mean_reward = update(params, jax.random.key(i))
    assert mean_reward > 0.9


@pytest.mark.parametrize("name", AGENTS)
def test_lowers_for_tpu_and_gpu(name):
    agent, params = make(name)
    spec, network = AGENTS[name]
    timestep, rows = timesteps(spec, lead=network.lead), network.lead + T + 1
    state = agent.initial_state(B)
    keys = jax.random.split(jax.random.key(0), B)
    settings = Settings(np.arange(B, dtype=np.int32), np.zeros(B, np.float32), np.zeros(B, bool))
    first_row = jax.tree.map(lambda x: x[0], timestep)
    action, _, extras = jax.eval_shape(agent.act, params, state, first_row, keys, settings)
    action, extras = jax.tree.map(lambda x: jax.ShapeDtypeStruct((rows, *x.shape), x.dtype), (action, extras))
    unroll = Unroll(timestep, action, extras, np.zeros((rows, B), np.int32), agent.unroll_state(state))
    export = functools.partial(jax.export.export, platforms=["tpu", "cuda"])
    assert export(jax.jit(agent.act))(params, state, first_row, keys, settings).platforms == ("tpu", "cuda")
    gradient = jax.jit(jax.grad(agent.loss, has_aux=True))
    assert export(gradient)(params, None, unroll, ONES, jax.random.key(0)).platforms == ("tpu", "cuda")

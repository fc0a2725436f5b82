"""R2D2: targets, priorities and burn-in against plain transcriptions; exploration by the place of an environment."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fakes import VECTOR, random_unroll

from seedx.agents.apex import Apex
from seedx.agents.r2d2 import R2D2
from seedx.checks import ConfigError
from seedx.config import ApexConfig, Config, LearnerConfig, NetworkConfig, R2D2Config
from seedx.learner.double_q import n_step_returns
from seedx.learner.rescaling import EPSILON
from seedx.types import ArraySpec, EnvSpec, Settings, StepType

B, BURN_IN, T = 4, 3, 7
CONFIG = Config(
    agent="r2d2",
    network=NetworkConfig(hidden=(8,), lstm=6, previous_action=True, dueling_hidden=8),
    r2d2=R2D2Config(discount=0.9, num_steps=3, max_abs_reward=0.5),
    learner=LearnerConfig(batch_size=B, burn_in=BURN_IN, unroll_length=T, target_period=10),
)
WEIGHTS = np.array([1.0, 0.5, 0.25, 0.1], np.float32)


@functools.cache
def make(rescale=True, burn_in=BURN_IN):
    r2d2 = dataclasses.replace(CONFIG.r2d2, rescale=rescale)
    learner = dataclasses.replace(CONFIG.learner, burn_in=burn_in, unroll_length=T + BURN_IN - burn_in)
    agent = R2D2(dataclasses.replace(CONFIG, r2d2=r2d2, learner=learner), VECTOR)
    params, target_params = (agent.init(jax.random.key(i)) for i in (0, 1))
    return agent, params, target_params, jax.jit(jax.value_and_grad(agent.loss, has_aux=True))


def sequence(agent, seed=0):
    """A random unroll `[BURN_IN + T + 1, B]` that starts from a state with a past."""
    state = jax.tree.map(lambda x: np.asarray(x) + np.full((), 0.3, np.float32).astype(x.dtype), agent.initial_state(B))
    unroll = random_unroll(B, BURN_IN + T, seed=seed, state=state)
    q = np.random.default_rng(seed).normal(size=(2, BURN_IN + T + 1, B)).astype(np.float32)
    return unroll._replace(extras={"q": q[0], "max_q": q[0] + np.abs(q[1])})


def q_values(agent, params, unroll):
    """Q of all rows, row by row, with the state that acting would have had."""
    state, rows, step = jax.tree.map(jnp.asarray, unroll.state), [], jax.jit(agent._network.step)
    for t in range(BURN_IN + T + 1):
        q, state = step(params, state, jax.tree.map(lambda x, t=t: jnp.asarray(x[t]), unroll.timestep))
        state = agent._network.remember(state, jnp.asarray(unroll.action[t]))
        rows.append(np.float64(q))
    return np.stack(rows)


def h(x):
    return np.sign(x) * (np.sqrt(abs(x) + 1) - 1) + EPSILON * x


def h_inverse(x):
    root = np.sqrt(1 + 4 * EPSILON * (abs(x) + 1 + EPSILON))
    return np.sign(x) * (((root - 1) / (2 * EPSILON)) ** 2 - 1)


def target(unroll, values, t, b, rescale):
    """The n-step target of one row, from bootstrap values of all rows."""
    total, product, k = 0.0, 1.0, t
    executed = unroll.timestep.step_type[:, b] != StepType.LAST
    while k < min(t + 3, BURN_IN + T) and executed[k]:
        total += product * np.clip(unroll.timestep.reward[k + 1, b], -0.5, 0.5)
        product *= 0.9 * unroll.timestep.discount[k + 1, b]
        k += 1
    return h(total + product * h_inverse(values[k, b])) if rescale else total + product * values[k, b]


@pytest.mark.parametrize("rescale", [True, False])
@pytest.mark.parametrize("burn_in", [BURN_IN, 0])
def test_loss_and_priorities_are_their_transcription(rescale, burn_in):
    agent, params, target_params, loss_of = make(rescale, burn_in)
    unroll = sequence(agent)
    (loss, output), gradient = loss_of(params, target_params, unroll, jnp.asarray(WEIGHTS), jax.random.key(0))
    q, target_q = q_values(agent, params, unroll), q_values(agent, target_params, unroll)
    best = np.take_along_axis(target_q, q.argmax(-1)[..., None], axis=-1)[..., 0]
    expected, priorities = 0.0, []
    for b in range(B):
        errors = [
            target(unroll, best, t, b, rescale) - q[t, b, unroll.action[t, b]]
            for t in range(burn_in, BURN_IN + T)
            if unroll.timestep.step_type[t, b] != StepType.LAST
        ]
        expected += 0.5 * WEIGHTS[b] * np.sum(np.square(errors))
        priorities.append(0.9 * np.max(np.abs(errors)) + 0.1 * np.mean(np.abs(errors)))
    np.testing.assert_allclose(loss, expected, rtol=1e-4)
    np.testing.assert_allclose(output.priorities, priorities, rtol=1e-4)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient))
    assert any(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(gradient))


@pytest.mark.parametrize("rescale", [True, False])
def test_initial_priorities_stand_on_what_acting_kept(rescale):
    agent, *_ = make(rescale)
    unroll = sequence(agent)
    expected = []
    for b in range(B):
        errors = [
            target(unroll, np.float64(unroll.extras["max_q"]), t, b, rescale) - unroll.extras["q"][t, b]
            for t in range(BURN_IN, BURN_IN + T)
            if unroll.timestep.step_type[t, b] != StepType.LAST
        ]
        expected.append(0.9 * np.max(np.abs(errors)) + 0.1 * np.mean(np.abs(errors)))
    rows = jax.tree.map(lambda x: np.moveaxis(x, 0, 1), tuple(unroll[:-1]))
    found = agent.initial_priorities(type(unroll)(*rows, state=unroll.state))
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected, rtol=1e-4)


IMAGE = EnvSpec("image", ArraySpec((6, 5), "uint8"), ArraySpec((), "int32", num_values=3))


@pytest.mark.parametrize("agent_type", [R2D2, Apex])
def test_of_the_rows_that_lead_only_the_frames_matter(agent_type):
    lead, burn_in = 2, BURN_IN if agent_type is R2D2 else 0
    config = dataclasses.replace(
        CONFIG,
        network=NetworkConfig(
            torso="shallow",
            frame_stack=lead + 1,
            lstm=6 if agent_type is R2D2 else 0,
            previous_action=True,
            dueling_hidden=8,
        ),
        apex=ApexConfig(num_steps=3),
        learner=LearnerConfig(batch_size=B, burn_in=burn_in, unroll_length=3, target_period=10),
    )
    agent = agent_type(config, IMAGE)
    params, target_params = (agent.init(jax.random.key(i)) for i in (0, 1))
    unroll = random_unroll(B, lead + burn_in + 3, seed=2, spec=IMAGE, state=agent.unroll_state(agent.initial_state(B)))
    q = np.random.default_rng(2).normal(size=(2, lead + burn_in + 4, B)).astype(np.float32)
    unroll = unroll._replace(extras={"q": q[0], "max_q": q[1]})
    unroll.timestep.step_type[lead - 1 : lead + burn_in + 1] = StepType.MID  # nothing is forgotten on the way
    loss_of = jax.jit(lambda unroll: agent.loss(params, target_params, unroll, jnp.asarray(WEIGHTS), jax.random.key(0)))

    def results(unroll):
        items = jax.tree.map(lambda x: np.moveaxis(x, 0, 1), unroll._replace(state=None))
        return jax.tree.leaves((loss_of(unroll), agent.initial_priorities(items)))

    expected, changed = results(unroll), jax.tree.map(np.copy, unroll)
    executed = unroll.timestep.step_type[lead + burn_in : -1] != StepType.LAST
    assert loss_of(unroll)[1].count == (executed.sum() if agent_type is R2D2 else executed[0].sum())
    for leaf in (*changed.timestep[1:3], changed.action, *changed.extras.values(), changed.version):
        leaf[:lead] = 1 - leaf[:lead]
    for a, b in zip(expected, results(changed), strict=True):
        np.testing.assert_array_equal(a, b)
    changed.timestep.observation[:lead] = 255 - changed.timestep.observation[:lead]
    assert results(changed)[0] != expected[0]


def test_the_burn_in_has_no_gradient_but_its_rows_matter():
    agent, params, target_params, _ = make()
    unroll = sequence(agent)

    def loss(observation):
        timestep = unroll.timestep._replace(observation=observation)
        rows = unroll._replace(timestep=timestep)
        return agent.loss(params, target_params, rows, jnp.asarray(WEIGHTS), jax.random.key(0))[0]

    step_type = np.full_like(unroll.timestep.step_type, StepType.MID)  # nothing is forgotten on the way
    unroll = jax.tree.map(jnp.asarray, unroll._replace(timestep=unroll.timestep._replace(step_type=step_type)))
    observation = unroll.timestep.observation
    value, gradient = jax.jit(jax.value_and_grad(loss))(observation)
    assert np.abs(gradient[:BURN_IN]).max() == 0
    assert (np.abs(gradient[BURN_IN:-1]).max(axis=(1, 2)) > 0).all()
    assert abs(jax.jit(loss)(observation.at[0].add(1.0)) - value) > 1e-6


def test_environments_explore_by_their_place_and_those_of_evaluation_do_not():
    agent, params, *_ = make()
    n = 4000
    timestep = jax.tree.map(lambda x: jnp.broadcast_to(x[0, :1], (n, *x.shape[2:])), sequence(agent).timestep)
    keys = jax.random.split(jax.random.key(3), n)
    act = jax.jit(agent.act)
    for rank, greedy, epsilon in ((0.0, False, 0.4), (1 / 7, False, 0.16), (1.0, False, 0.4**8), (0.0, True, 0.0)):
        settings = Settings(jnp.arange(n), jnp.full(n, rank, jnp.float32), jnp.full(n, greedy))
        action, _, extras = act(params, agent.initial_state(n), timestep, keys, settings)
        best = np.bincount(action).argmax()
        others = np.mean(np.asarray(action) != best)  # one in three of the explored is the best one
        assert abs(others - epsilon * 2 / 3) < 4 * np.sqrt(0.25 / n)
        assert (extras["q"] <= extras["max_q"]).all()
        np.testing.assert_array_equal(extras["q"] == extras["max_q"], np.asarray(action) == best)


@pytest.mark.parametrize(
    "action", [ArraySpec((), "float32", None, -1.0, 1.0), (ArraySpec((), "int32", 2), ArraySpec((), "int32", 3))]
)
def test_actions_that_cannot_be_valued_are_refused(action):
    with pytest.raises(ConfigError, match=r"env 'other' has the actions .* --agent impala"):
        R2D2(CONFIG, EnvSpec("other", VECTOR.observation, action)).init(jax.random.key(0))


def apex(num_steps=3, lstm=0, spec=VECTOR, network=None, **learner):
    settings = {"batch_size": B, "unroll_length": 3, "period": 1, "target_period": 10, **learner}
    network = dataclasses.replace(CONFIG.network, lstm=lstm, **network or {})
    apex = ApexConfig(num_steps=num_steps, discount=0.9, max_abs_reward=0.5)
    return Apex(dataclasses.replace(CONFIG, network=network, apex=apex, learner=LearnerConfig(**settings)), spec)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_steps": 5}, r"unroll_length \(3\).*num_steps \(5\): the two must be equal"),
        ({"num_steps": 2}, r"the two must be equal"),
        ({"burn_in": 2}, r"burn_in \(2\) 0"),
        ({"lstm": 6}, r"lstm \(6\) must be 0.*--agent r2d2"),
        ({"target_period": 0}, r"target_period \(0\) must be positive"),
    ],
)
def test_settings_with_which_nothing_would_be_learned_are_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        apex(**change)


def test_apex_learns_from_the_first_transition_of_an_item():
    agent, unroll = apex(), random_unroll(B, 3)
    step_type = np.full_like(unroll.timestep.step_type, StepType.MID)
    step_type[0, 1] = StepType.LAST  # this one was not executed
    unroll = unroll._replace(timestep=unroll.timestep._replace(step_type=step_type), state=agent.initial_state(B))
    params = agent.init(jax.random.key(0))
    loss_of = jax.jit(jax.grad(lambda *x: agent.loss(*x, jax.random.key(0)), has_aux=True))
    _, output = loss_of(params, params, unroll, jnp.asarray(WEIGHTS))
    assert int(output.count) == B - 1
    np.testing.assert_array_equal(np.asarray(output.priorities) > 0, np.arange(B) != 1)


IMAGES = {"torso": "shallow", "frame_stack": 3}


@pytest.mark.parametrize(
    ("num_steps", "spec", "network"),
    [(1, VECTOR, {}), (3, VECTOR, {"previous_action": False}), (4, VECTOR, {}), (3, IMAGE, IMAGES)],
)
def test_apex_reads_two_rows_of_an_item_and_gives_what_all_rows_would(num_steps, spec, network):
    """Ends and time limits at every place: loss, metrics, priorities and gradient against networks over all rows."""
    agent = apex(num_steps, spec=spec, network=network, unroll_length=num_steps)
    size, lead, rng = 64, 2 if network is IMAGES else 0, np.random.default_rng(num_steps)
    state = jax.tree.map(np.ones_like, agent.unroll_state(agent.initial_state(size)))
    unroll = random_unroll(size, lead + num_steps, spec=spec, state=state)
    unroll.timestep.step_type[:] = rng.choice(3, unroll.timestep.step_type.shape, p=[0.2, 0.5, 0.3])
    params, target_params = (agent.init(jax.random.key(i)) for i in (0, 1))
    weights = jnp.asarray(rng.random(size, np.float32))

    def plain(params):
        rows = agent._network.stacked(jax.tree.map(jnp.asarray, unroll))
        q, target_q = (
            agent._network.unroll(some, rows.state, rows.timestep, rows.action)[0] for some in (params, target_params)
        )
        values = jnp.take_along_axis(target_q, jnp.argmax(q, axis=-1)[..., None], axis=-1)[..., 0]
        rewards, discounts = jnp.clip(rows.timestep.reward[1:], -0.5, 0.5), 0.9 * rows.timestep.discount[1:]
        executed = jnp.asarray(rows.timestep.step_type[:-1] != StepType.LAST)
        target = jax.lax.stop_gradient(n_step_returns(rewards, discounts, values, executed, num_steps)[0])
        chosen = jnp.take_along_axis(q[0], rows.action[0][:, None], axis=-1)[:, 0]
        errors = jnp.where(executed[0], target - chosen, 0.0)
        metrics = {"td_error": jnp.abs(errors), "value": q[0].max(-1), "target": target, "importance_weight": weights}
        metrics = {name: jnp.where(executed[0], value, 0.0).sum() for name, value in metrics.items()}
        return 0.5 * (weights * errors**2).sum(), (metrics, executed[0].sum(), jnp.abs(errors))

    (loss, output), gradient = jax.jit(jax.value_and_grad(agent.loss, has_aux=True))(
        params, target_params, unroll, weights, jax.random.key(0)
    )
    (expected, other), expected_gradient = jax.jit(jax.value_and_grad(plain, has_aux=True))(params)
    assert set(output.metrics) == set(other[0])
    found = loss, (dict(output.metrics), output.count, output.priorities), gradient
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves((expected, other, expected_gradient)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_apex_takes_a_fraction_of_the_work_that_all_rows_would_take():
    """Online with gradient on one row (3 passes), online and target on another: 5 instead of 4 * (num_steps + 1)."""

    def flops(agent_type):
        config = dataclasses.replace(CONFIG, network=network, apex=settings, r2d2=settings_of_r2d2, learner=learner)
        agent = agent_type(config, VECTOR)
        params = agent.init(jax.random.key(0))
        unroll = random_unroll(B, 7, state=agent.initial_state(B))
        loss = jax.jit(jax.value_and_grad(agent.loss, has_aux=True))
        return loss.lower(params, params, unroll, WEIGHTS, jax.random.key(0)).compile().cost_analysis()["flops"]

    network = NetworkConfig(hidden=(128, 128), dueling_hidden=128)
    settings, settings_of_r2d2 = ApexConfig(num_steps=7), R2D2Config(num_steps=7, rescale=False)
    learner = LearnerConfig(batch_size=B, unroll_length=7, period=1, target_period=10)
    assert flops(Apex) < 0.25 * flops(R2D2)


def test_lowers_for_tpu_and_gpu():
    agent, params, target_params, _ = make()
    unroll = sequence(agent)
    export = functools.partial(jax.export.export, platforms=["tpu", "cuda"])
    arguments = params, target_params, unroll, WEIGHTS, jax.random.key(0)
    gradient = jax.jit(jax.grad(agent.loss, has_aux=True))
    assert export(gradient)(*arguments).platforms == ("tpu", "cuda")

"""The update against sums and optimizers written out in NumPy, and that devices and microbatches change nothing."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bits import assert_bit_equal
from fakes import VECTOR, Regression, random_unroll, sample_of

from seedx import sharding
from seedx.agents.impala import Impala
from seedx.config import Config, LearnerConfig, NetworkConfig
from seedx.learner.batches import Batches
from seedx.learner.learner import Learner, NonFiniteError, initial_state
from seedx.learner.update import batch_shardings, learning_rate, make_optimizer, make_update
from seedx.metrics import Metrics
from seedx.replay.fifo import Fifo
from seedx.threads import Crew
from seedx.types import ArraySpec, EnvSpec, transition_mask
from seedx.weights import WeightStore

T, B = 5, 16
ONES = np.ones(B, np.float32)
CONFIG = LearnerConfig(batch_size=B, unroll_length=T, learning_rate=0.05, devices=1)


def meshes(devices=1):
    return sharding.build_meshes(dataclasses.replace(CONFIG, devices=devices))


def mesh(devices=1):
    return meshes(devices).learner


@functools.cache
def regression_update(config, devices):
    return make_update(Regression(), config, mesh(devices), 0)


def run(agent, config, batch, devices=1, updates=1):
    """Params, optimizer state and the last update's result after some updates on one batch."""
    small = isinstance(agent, Regression)
    update = regression_update(config, devices) if small else make_update(agent, config, mesh(devices), 0)
    params = agent.init(jax.random.key(1))
    opt_state = make_optimizer(config).init(params)
    for i in range(updates):
        result = update(params, None, opt_state, batch, jnp.asarray(ONES), jnp.float32(i * 100), jnp.int32(i), None)
        params, opt_state = result.params, result.opt_state
    return result


def assert_close(a, b, rtol=1e-5, atol=1e-6):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(x, y, rtol=rtol, atol=atol)


@pytest.mark.parametrize(("devices", "microbatches"), [(8, 1), (1, 4), (1, 16), (8, 2), (2, 4)])
def test_devices_and_microbatches_change_nothing(devices, microbatches):
    config, batch = dataclasses.replace(CONFIG, microbatches=microbatches), random_unroll(B, T)
    result = run(Regression(), config, batch, devices, updates=3)
    assert all(len(leaf.devices()) == devices for leaf in jax.tree.leaves(result.params))
    assert_close(result, run(Regression(), CONFIG, batch, updates=3))


def test_devices_and_microbatches_change_nothing_for_a_recurrent_network():
    agent = Impala(Config(network=NetworkConfig(hidden=(8,), lstm=4, previous_action=True)), VECTOR)
    state = jax.tree.map(lambda x: np.asarray(x) + np.ones((), x.dtype), agent.initial_state(B))
    batch = random_unroll(B, T, state=state)
    whole = run(agent, CONFIG, batch, updates=2)
    parts = run(agent, dataclasses.replace(CONFIG, microbatches=2), batch, devices=8, updates=2)
    assert_close(whole, parts, rtol=2e-4, atol=2e-5)


def test_with_and_without_jit():
    config, batch = dataclasses.replace(CONFIG, microbatches=2), jax.tree.map(jnp.asarray, random_unroll(B, T))
    jitted = run(Regression(), config, batch, updates=3)
    # Without jit, an enum's members are strict int32.
    with jax.disable_jit(), jax.numpy_dtype_promotion("standard"):
        eager = run(Regression(), config, batch, updates=3)
    assert_close(eager, jitted)


def gradient_of_mean(params, batch):
    """float64 mean gradient of Regression over executed transitions, its loss and the mean error."""
    x, reward = np.float64(batch.timestep.observation[:-1]), np.float64(batch.timestep.reward[1:])
    mask = transition_mask(batch.timestep.step_type)
    error = (x @ params["w"] + params["b"] - reward)[mask]
    gradient = {"w": (error[:, None] * x[mask]).mean(0), "b": error.mean()}
    return gradient, 0.5 * (error**2).mean(), error.mean()


def transcription(config, params, batch, updates):
    """`updates` steps of clipping and RMSProp or Adam, float64."""
    params = {k: np.float64(v) for k, v in params.items()}
    first, second = ({k: np.zeros_like(v) for k, v in params.items()} for _ in range(2))
    for i in range(updates):
        gradient, loss, error = gradient_of_mean(params, batch)
        norm = np.sqrt(sum((g**2).sum() for g in gradient.values()))
        scale = min(1.0, config.max_grad_norm / norm) if config.max_grad_norm else 1.0
        done = min(1.0, 100 * i / config.learning_rate_steps) if config.learning_rate_steps else 0.0
        rate = config.learning_rate + done * (config.learning_rate_end - config.learning_rate)
        for k in params:
            g = scale * gradient[k]
            if config.optimizer == "rmsprop":
                second[k] = config.rmsprop_decay * second[k] + (1 - config.rmsprop_decay) * g**2
                params[k] = params[k] - rate * g / (np.sqrt(second[k]) + config.epsilon)
            else:
                first[k], second[k] = 0.9 * first[k] + 0.1 * g, 0.999 * second[k] + 0.001 * g**2
                m, v = first[k] / (1 - 0.9 ** (i + 1)), second[k] / (1 - 0.999 ** (i + 1))
                params[k] = params[k] - rate * m / (np.sqrt(v) + config.epsilon)
    return params, {"loss": loss, "error": error, "grad_norm": norm, "learning_rate": rate}


@pytest.mark.parametrize(
    "change",
    [
        {"max_grad_norm": 0.0},
        {"max_grad_norm": 0.1},
        {"optimizer": "adam", "epsilon": 1e-8},
        {"optimizer": "adam", "max_grad_norm": 0.1, "learning_rate_steps": 200, "learning_rate_end": 0.01},
        {"rmsprop_decay": 0.5, "learning_rate_steps": 150},
    ],
)
def test_the_optimizers_are_their_transcriptions(change):
    config, batch = dataclasses.replace(CONFIG, **change), random_unroll(B, T)
    params = Regression().init(jax.random.key(1))
    result = run(Regression(), config, batch, updates=4)
    expected, metrics = transcription(config, params, batch, updates=4)
    assert_close(result.params, expected)
    assert result.metrics.keys() == metrics.keys()
    for name, value in metrics.items():
        np.testing.assert_allclose(result.metrics[name], value, rtol=1e-4, err_msg=name)


def test_the_learning_rate_follows_environment_steps():
    config = LearnerConfig(learning_rate=1.0, learning_rate_end=0.2, learning_rate_steps=1000)
    got = [float(learning_rate(config, jnp.float32(steps))) for steps in (0, 500, 1000, 10**9)]
    np.testing.assert_allclose(got, [1.0, 0.6, 0.2, 0.2], rtol=1e-6)
    constant = LearnerConfig(learning_rate=1.0, learning_rate_end=0.2)
    assert float(learning_rate(constant, jnp.float32(10**9))) == 1.0


def test_masked_transitions_do_not_count():
    batch = random_unroll(B, T)
    mask = transition_mask(batch.timestep.step_type)
    reward = batch.timestep.reward.copy()
    reward[1:][~mask] = np.nan
    dirty = batch._replace(timestep=batch.timestep._replace(reward=reward))
    for a, b in zip(*(jax.tree.leaves(run(Regression(), CONFIG, x)) for x in (batch, dirty)), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_batch_without_executed_transitions_is_no_division_by_zero():
    batch = random_unroll(B, 1)
    batch.timestep.step_type[0] = 2
    result = run(Regression(), dataclasses.replace(CONFIG, unroll_length=1), batch)
    assert bool(result.finite)
    assert_close(result.params, Regression().init(jax.random.key(1)), rtol=0, atol=0)


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e30])
@pytest.mark.parametrize("optimizer", ["rmsprop", "adam"])
def test_an_update_that_is_not_finite_changes_nothing(value, optimizer):
    config = dataclasses.replace(CONFIG, optimizer=optimizer)
    update = regression_update(config, 1)
    batch = random_unroll(B, T)
    bad = random_unroll(B, T)
    bad.timestep.observation[2, 3, 1] = value
    bad.timestep.step_type[2, 3] = 1
    params = Regression().init(jax.random.key(1))
    sound = update(params, None, make_optimizer(config).init(params), batch, ONES, np.float32(0), np.int32(0), None)
    before = jax.tree.map(np.array, (sound.params, sound.opt_state))
    result = update(sound.params, None, sound.opt_state, bad, ONES, np.float32(0), np.int32(1), None)
    assert bool(sound.finite)
    assert not bool(result.finite)
    after = jax.tree.map(np.array, (result.params, result.opt_state))
    assert_bit_equal(before, after)


def test_only_the_optimizer_state_is_donated():
    update = regression_update(CONFIG, 8)
    params, _, opt_state, *_ = initial_state(Regression(), CONFIG, mesh(8), 0)
    batch = jax.device_put(random_unroll(B, T), batch_shardings(mesh(8)))
    result = update(params, None, opt_state, batch, ONES, np.float32(0), np.int32(0), None)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(opt_state))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves((params, batch, result)))
    jax.block_until_ready(jax.tree.map(jnp.copy, params))


# ---- the learner


def make_learner(tmp_path, devices=1, **state):
    weights, metrics = WeightStore(), Metrics()
    start = initial_state(Regression(), CONFIG, mesh(devices), 3)._replace(**state)
    learner = Learner(Regression(), CONFIG, meshes(devices), start, weights, metrics, 0, tmp_path)
    batches = Batches(Fifo(100), CONFIG, 0.0, mesh(devices), metrics, Crew())
    return learner, weights, metrics, batches


def as_items(unroll):
    rows = jax.tree.map(lambda leaf: np.moveaxis(leaf, 1, 0), tuple(unroll[:-1]))
    return type(unroll)(*rows, state=unroll.state)


def as_sample(unroll):
    return sample_of(as_items(unroll))


@pytest.mark.parametrize("devices", [1, 8])
def test_a_learner_publishes_what_it_learned(tmp_path, devices):
    learner, weights, metrics, batches = make_learner(tmp_path, devices=devices, updates=7, env_steps=500)
    assert weights.latest() == (7, learner.state.params)
    unroll = random_unroll(B, T)
    unroll = unroll._replace(version=unroll.version + np.int32(5))
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), unroll)
    learner.compile(shapes)
    executed = int(transition_mask(unroll.timestep.step_type).sum())
    for i in range(1, 4):
        batch = batches.prepare(as_sample(unroll))
        assert batch.env_steps == executed
        for a, b in zip(jax.tree.leaves(batch.host), jax.tree.leaves(unroll), strict=True):
            np.testing.assert_array_equal(a, b)
        learner.step(batch)
        assert (learner.state.updates, learner.state.env_steps) == (7 + i, 500 + i * executed)
        assert weights.latest().version == 7 + i
        assert weights.latest().params is learner.state.params  # published without a copy
    row = metrics.snapshot()
    lag = {name: value for name, value in row.items() if "lag" in name}
    assert lag["learner/lag_updates_mean"] == 3.0  # versions 7, 8 and 9 learned from rows of version 5
    assert lag["learner/lag_updates_max"] == 4.0
    assert learner.lag_sum == 9.0
    assert np.isfinite(row["learner/loss"])


def test_rows_before_those_that_are_trained_on_count_neither_as_steps_nor_as_lag(tmp_path):
    learner, _, metrics, batches = make_learner(tmp_path, updates=9)
    unroll = random_unroll(B, 3 + T)  # three rows lead, or warm up a state
    unroll.version[3:] = 5
    batch = batches.prepare(as_sample(unroll))
    assert batch.env_steps == transition_mask(unroll.timestep.step_type[3:]).sum()
    learner.step(batch)
    assert metrics.snapshot()["learner/lag_updates_mean"] == 4.0


def test_rows_that_a_later_learner_acted_for_are_counted_and_not_taken_for_young(tmp_path):
    learner, _, metrics, batches = make_learner(tmp_path, updates=9)
    unroll = random_unroll(B, T)
    unroll.version[:] = 5
    unroll.version[1, 0] = 5000  # two items of a table that another learner filled, or this one before it was resumed
    unroll.version[:, 1] = 5000
    learner.step(batches.prepare(as_sample(unroll)))
    row = metrics.snapshot()
    assert row["learner/newer_items"] == 2
    assert row["learner/lag_updates_mean"] == np.mean([4 * (T - 1) / T, 0, *[4] * (B - 2)])
    assert row["learner/lag_updates_max"] == 4


def test_two_learners_are_alike_bit_for_bit(tmp_path):
    results = []
    for _ in range(2):
        learner, _, _, batches = make_learner(tmp_path)
        for seed in range(2):
            learner.step(batches.prepare(as_sample(random_unroll(B, T, seed))))
        results.append(jax.tree.map(np.array, (learner.state.params, learner.state.opt_state)))
    assert_bit_equal(*results)


def test_a_non_finite_update_is_an_error_that_keeps_its_batch(tmp_path):
    learner, weights, _, batches = make_learner(tmp_path)
    learner.step(batches.prepare(as_sample(random_unroll(B, T))))
    before, version = jax.tree.map(np.array, learner.state), weights.latest().version
    bad = random_unroll(B, T, seed=1)
    bad.timestep.step_type[1, 1] = 1
    bad.timestep.reward[2, 1] = np.inf
    with pytest.raises(NonFiniteError, match=r"update 2 is not finite.*learning-rate") as failure:
        learner.step(batches.prepare(as_sample(bad)))
    (path,) = tmp_path.glob("*.npz")
    assert str(path) in str(failure.value)
    with np.load(path) as saved:
        np.testing.assert_array_equal(saved[".timestep.reward"], bad.timestep.reward)
        np.testing.assert_array_equal(saved[".timestep.observation"], bad.timestep.observation)
        np.testing.assert_array_equal(saved[".extras['log_prob']"], bad.extras["log_prob"])
        assert len(saved.files) == len(jax.tree.leaves(bad))
    assert weights.latest().version == version
    for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(learner.state), strict=True):
        np.testing.assert_array_equal(a, b)
    learner.step(batches.prepare(as_sample(random_unroll(B, T))))  # and it could go on
    assert weights.latest().version == version + 1


def test_batches_come_from_the_replay_in_order(tmp_path):
    fifo, metrics, crew = Fifo(100), Metrics(), Crew()
    batches = Batches(fifo, dataclasses.replace(CONFIG, batch_size=4), 0.0, mesh(), metrics, crew)
    assert batches.next(0.01) is None
    batches.start()
    for i in range(3):
        fifo.insert(as_items(random_unroll(4, T, seed=i)), np.ones(4), 1.0)
    for i in range(3):
        batch = batches.next(10.0)
        np.testing.assert_array_equal(batch.unroll.timestep.reward, random_unroll(4, T, seed=i).timestep.reward)
    assert crew.join(5.0) == []
    assert crew.failure is None


def test_devices_send_each_other_the_sum_of_gradients_and_no_frames():
    config = Config(network=NetworkConfig(torso="shallow", frame_stack=4), learner=CONFIG)
    spec = EnvSpec("frames", ArraySpec((36, 36), "uint8"), ArraySpec((), "int32", num_values=3))
    agent = Impala(config, spec)
    batch = random_unroll(B, config.unroll_rows - 1, spec=spec, state=jax.tree.map(np.asarray, agent.initial_state(B)))
    state = initial_state(agent, CONFIG, mesh(8), 0)
    update = make_update(agent, dataclasses.replace(CONFIG, microbatches=2), mesh(8), 0)
    scalars = jnp.float32(0), jnp.int32(0)
    text = update.lower(state.params, None, state.opt_state, batch, ONES, *scalars, None).compile().as_text()
    assert "all-reduce(" in text
    assert not any(f"{sent}(" in text for sent in ("all-gather", "all-to-all", "collective-permute", "reduce-scatter"))

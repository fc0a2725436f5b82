"""The network: an unroll is its steps, resets, every observation and torso, previous actions, and what is refused."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from seedx.checks import ConfigError
from seedx.config import NetworkConfig
from seedx.networks.heads import ActorCritic
from seedx.networks.network import build_network
from seedx.networks.torso import as_float
from seedx.types import ArraySpec, EnvSpec, StepType, TimeStep, Unroll

B, ROWS = 3, 6
ACTION = ArraySpec((), "int64", num_values=3)
VECTOR = EnvSpec("vector", ArraySpec((4,), "float32"), ACTION)
IMAGE = EnvSpec("image", ArraySpec((10, 5), "uint8", maximum=255.0), ACTION)
TREE = EnvSpec(
    "tree",
    {"image": ArraySpec((12, 9, 3), "uint8"), "vector": (ArraySpec((3,), "float32"), ArraySpec((), "int64", 7))},
    (ACTION, {"box": ArraySpec((2,), "float32", None, -1.0, 1.0)}),
)


def draw(spec, rng, *leading):
    """A random array of a spec."""
    shape, dtype = (*leading, *spec.shape), np.dtype(spec.dtype)
    if spec.num_values is not None:
        return rng.integers(0, spec.num_values, shape).astype(dtype)
    return (rng.integers(0, 256, shape) if dtype == np.uint8 else rng.normal(size=shape)).astype(dtype)


def rollout(spec, seed=0, rows=ROWS):
    """Timesteps and actions `[rows, B]` with episode starts in the middle, but none in column 0."""
    rng = np.random.default_rng(seed)
    step_type = np.full((rows, B), StepType.MID, np.uint8)
    step_type[0] = step_type[3::5, 1] = step_type[4::6, 2] = StepType.FIRST
    reward = rng.normal(size=(rows, B)).astype(np.float32)
    observation = jax.tree.map(lambda leaf: draw(leaf, rng, rows, B), spec.observation)
    action = jax.tree.map(lambda leaf: draw(leaf, rng, rows, B), spec.action)
    return TimeStep(step_type, reward, np.ones_like(reward), observation), action


SPECS = {"vector": VECTOR, "image": IMAGE, "tree": TREE}


@functools.cache
def build(spec, **config):
    """A compiled network and its parameters."""
    network = build_network(NetworkConfig(**config), SPECS[spec], ActorCritic)
    params = network.init(jax.random.key(0))
    # The heads start near zero; larger ones show a difference in any input.
    params["policy"]["kernel"] = 100.0 * params["policy"]["kernel"]
    step, stacked, unroll = map(jax.jit, (network.step, network.stacked, network.unroll))
    return network._replace(step=step, stacked=stacked, unroll=unroll), params


def step_through(network, params, timestep, action):
    """Policies and values of all rows, and the states before each and after the last."""
    outputs, states = [], [network.initial_state(B)]
    for t in range(len(timestep.reward)):
        output, state = network.step(params, states[-1], jax.tree.map(lambda x, t=t: x[t], timestep))
        states.append(network.remember(state, jax.tree.map(lambda x, t=t: jnp.asarray(x[t]), action)))
        outputs.append(output)
    return (*map(np.stack, zip(*outputs, strict=True)), states)


def learned(network, params, state, timestep, action):
    """What learning makes of the rows of an unroll, some of which lead; `state` is that before the others."""
    version = np.zeros(timestep.reward.shape, np.int32)
    unroll = network.stacked(Unroll(timestep, action, {}, version, state._replace(rings=None)))
    assert unroll.version.shape == unroll.timestep.reward.shape
    return network.unroll(params, unroll.state, unroll.timestep, unroll.action)


@pytest.mark.parametrize(
    ("spec", "config"),
    [
        ("vector", {}),
        ("vector", {"lstm": 8, "previous_action": True, "activation": "relu"}),
        ("image", {"frame_stack": 3}),
        ("tree", {"lstm": 8, "previous_action": True, "frame_stack": 4}),
        ("tree", {"torso": "deep", "hidden": (8,)}),
        ("tree", {"torso": "mlp", "frame_stack": 2}),
    ],
    ids=lambda x: x if isinstance(x, str) else "-".join(map(str, x.values())),
)
def test_an_unroll_is_its_steps_and_goes_on_from_a_state(spec, config):
    network, params = build(spec, **config)
    lead = NetworkConfig(**config).lead
    timestep, action = rollout(SPECS[spec], rows=lead + 2 * ROWS)
    policy, value, states = step_through(network, params, timestep, action)
    for start in (0, ROWS):  # the second one starts in the middle of episodes
        rows = jax.tree.map(lambda x, start=start: x[start : start + lead + ROWS], (timestep, action))
        (got_policy, got_value), after = learned(network, params, states[start + lead], *rows)
        part = slice(start + lead, start + lead + ROWS)
        np.testing.assert_allclose(got_policy, policy[part], atol=2e-5)
        np.testing.assert_allclose(got_value, value[part], atol=2e-5)
        for a, b in zip(jax.tree.leaves(states[part.stop]._replace(rings=None)), jax.tree.leaves(after), strict=True):
            assert (a.dtype, a.shape) == (b.dtype, b.shape)
            np.testing.assert_allclose(a, b, atol=2e-5)


def test_first_forgets_everything_before_it():
    network, params = build("image", lstm=8, previous_action=True, frame_stack=3)
    timestep, action = rollout(IMAGE)  # two rows lead
    start = network.initial_state(B)
    before = np.asarray(learned(network, params, start, timestep, action)[0][0])  # before its arrays change
    # Everything before row 3 of column 1, the action that the reset ignored and the reward of the FIRST row change.
    other, other_action = rollout(IMAGE, seed=1)
    timestep.observation[:3, 1], action[:3, 1] = other.observation[:3, 1], other_action[:3, 1]
    timestep.reward[:4, 1] += 1.0
    (after, _), _ = learned(network, params, start, timestep, action)
    np.testing.assert_allclose(after[1:, 1], before[1:, 1], atol=1e-6)
    assert np.abs(after[:1, 1] - before[:1, 1]).max() > 1e-3


@pytest.mark.parametrize("what", ["action", "reward", "frame", "leading frame"])
def test_the_past_matters_within_an_episode(what):
    network, params = build("image", lstm=8, previous_action=True, frame_stack=3)
    timestep, action = rollout(IMAGE, rows=2 + ROWS)  # two rows lead
    (before, _), _ = learned(network, params, network.initial_state(B), timestep, action)
    before = np.asarray(before)  # computed by now: JAX may still read the arrays that change below
    match what:
        case "action":
            action[3, 0] = (action[3, 0] + 1) % 3
        case "reward":
            timestep.reward[4, 0] = -timestep.reward[4, 0]
        case "frame":
            timestep.observation[4, 0] = 255 - timestep.observation[4, 0]
        case "leading frame":
            timestep.observation[0, 0] = 255 - timestep.observation[0, 0]
    (after, _), _ = learned(network, params, network.initial_state(B), timestep, action)
    moved = np.abs(after - before).max(-1) > 1e-7
    np.testing.assert_array_equal(moved[:, 0], np.arange(ROWS) >= (0 if what == "leading frame" else 2))
    assert not moved[:, 1:].any()


def test_a_plain_mlp_has_no_state():
    assert jax.tree.leaves(build_network(NetworkConfig(), VECTOR, ActorCritic).initial_state(B)) == []


def test_starts_near_the_uniform_policy_and_depends_on_the_key_only():
    network = build_network(NetworkConfig(), VECTOR, ActorCritic)
    params = [network.init(jax.random.key(seed)) for seed in (0, 0, 1)]
    (policy, value), _ = jax.jit(network.step)(
        params[0], network.initial_state(B), jax.tree.map(lambda x: x[0], rollout(VECTOR)[0])
    )
    assert np.abs(policy).max() < 0.05 < np.abs(value).max()
    same, other = (jax.tree.leaves(jax.tree.map(lambda x, y: np.array_equal(x, y), params[0], p)) for p in params[1:])
    assert all(same)
    assert not all(other)
    assert all(
        isinstance(k, str) for path, _ in jax.tree_util.tree_leaves_with_path(params[0]) for k in (p.key for p in path)
    )


@pytest.mark.parametrize(("torso", "features"), [("shallow", 256), ("deep", 256)])
def test_paper_torsos_have_the_paper_sizes(torso, features):
    atari = EnvSpec("atari", ArraySpec((84, 84), "uint8"), ArraySpec((), "int64", num_values=18))
    network = build_network(NetworkConfig(torso=torso, frame_stack=4), atari, ActorCritic)
    shapes = jax.eval_shape(network.init, jax.random.key(0))
    convs = [x.shape for x in jax.tree.leaves(shapes["torso"]["convs"]) if x.ndim == 4]
    if torso == "shallow":
        assert convs == [(8, 8, 4, 16), (4, 4, 16, 32)]
    else:
        assert len(convs) == 15
        assert sorted({shape[-1] for shape in convs}) == [16, 32]
    assert shapes["policy"]["kernel"].shape == (features, 18)


def test_leaves_as_a_net_sees_them():
    board = jnp.array([[0, 1], [51, 255]], jnp.uint8)
    np.testing.assert_allclose(as_float(ArraySpec((2,), "uint8"), board), np.asarray(board) / np.float32(255))
    np.testing.assert_array_equal(as_float(ArraySpec((2,), "uint8", maximum=51.0), board[1:]), [[1.0, 5.0]])
    np.testing.assert_array_equal(as_float(ArraySpec((), "int64", 3), jnp.array([2, 0])), [[0, 0, 1], [1, 0, 0]])
    np.testing.assert_array_equal(as_float(ArraySpec((), "int32"), jnp.array([-7])), np.float32([-7]))


def test_a_grid_of_categories_is_one_hot_through_the_mlp():
    grid = EnvSpec("grid", {"grid": ArraySpec((7, 5, 3), "uint8", 11), "text": ArraySpec((6,), "uint8")}, ACTION)
    params = jax.eval_shape(build_network(NetworkConfig(), grid, ActorCritic).init, jax.random.key(0))
    assert params["torso"]["mlp"]["layers"]["layer_0"]["kernel"].shape == (7 * 5 * 3 * 11 + 6, 64)


class Doubles(nnx.Module):
    num_features = 4

    def __call__(self, observation):
        return 2 * observation


def doubles(spec, rngs):
    assert spec == VECTOR.observation
    assert isinstance(rngs, nnx.Rngs)
    return Doubles()


def test_a_torso_of_ones_own():
    network, params = build("vector", torso=f"{__name__}:doubles")
    timestep, action = rollout(VECTOR)
    (policy, _), _ = network.unroll(params, network.initial_state(B), timestep, action)
    np.testing.assert_allclose(policy, 2 * timestep.observation @ params["policy"]["kernel"], atol=1e-4)


def no_module(spec, rngs):
    return lambda observation: observation


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"torso": "resnet"}, "'auto', 'mlp', 'shallow', 'deep'"),
        ({"torso": "no_such_module:f"}, "no module 'no_such_module'"),
        ({"torso": "depe"}, "must be 'auto', 'mlp'"),
        ({"torso": f"{__name__}:missing"}, "no function 'missing'"),
        ({"torso": f"{__name__}:no_module"}, "num_features"),
        ({"frame_stack": 4}, "needs an image"),
    ],
)
def test_refuses_what_it_cannot_build(config, message):
    with pytest.raises(ConfigError, match=message):
        build_network(NetworkConfig(**config), VECTOR, ActorCritic)

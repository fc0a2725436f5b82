"""The policy server through real gRPC: what actors get, what the replay gets, and who is not disturbed by whom."""

import contextlib
import dataclasses
import queue
import threading
import time

import grpc
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fakes import VECTOR
from server_harness import Script, Server, T, make_config, play, wait_until

from seedx.checks import ConfigError
from seedx.config import NetworkConfig
from seedx.envs.actor import run_actor
from seedx.inference import client, wire
from seedx.inference.client import Connection, Finished, RejectedError, Replaced, ServerLostError
from seedx.inference.frontend import FrontEnd
from seedx.inference.streams import Streams
from seedx.types import ArraySpec, EnvSpec, StepType

TREE = EnvSpec(
    "tree",
    {"image": ArraySpec((10, 5), "uint8"), "vector": ArraySpec((3,), "float32")},
    (ArraySpec((), "int32", 3), {"box": ArraySpec((2,), "float32", None, -2.0, 2.0)}),
)
RECURRENT = NetworkConfig(hidden=(8,), lstm=8, previous_action=True, frame_stack=3)


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    with Server(f"unix:{tmp_path_factory.mktemp('s')}/s", make_config(actors=4)) as server:
        yield server


@pytest.fixture
def server(shared):
    """The shared server, without streams and with an empty replay."""
    shared.unrolls()
    yield shared
    wait_until(lambda: shared.streams.num_streams == 0)
    assert shared.crew.failure is None, shared.crew.describe_failure()
    assert not shared.policy._delivery.withheld()


@pytest.fixture(scope="module")
def recurrent(tmp_path_factory):
    """Images stacked on the device, nested observations and actions, an LSTM that sees its last action."""
    config = make_config(actors=1, groups=1, envs=2, network=RECURRENT)
    with Server(f"unix:{tmp_path_factory.mktemp('r')}/s", config, TREE) as server:
        yield server


class Continued:
    """A stream whose rows may follow any other than LAST: all are MID."""

    def __init__(self, stream):
        self._stream = stream

    def send(self, row):
        self._stream.send(row._replace(step_type=np.full_like(row.step_type, StepType.MID)))

    def receive(self):
        return self._stream.receive()


# ---- what the replay gets


def of_script(unrolls, script, environment):
    """The unrolls of one environment of a script, in order."""
    seed = script.rows.observation[0, environment, 0]
    return [unroll for unroll in unrolls if unroll.timestep.observation[0, 0] == seed]


def assert_rows(unrolls, script, actions):
    """Unrolls of T+1 rows that overlap by one hold the script's rows and the actions that the actor was given."""
    num_rows = len(jax.tree.leaves(actions)[0])
    for n in range(script.num_envs):
        own = of_script(unrolls, script, n) if script.num_envs > 1 else unrolls
        assert len(own) == (num_rows - 1) // T
        for i, unroll in enumerate(own):
            rows = slice(i * T, i * T + T + 1)
            expected = jax.tree.map(lambda x, n=n, rows=rows: x[rows, n], (script.rows, actions))
            for a, b in zip(jax.tree.leaves((unroll.timestep, unroll.action)), jax.tree.leaves(expected), strict=True):
                assert a.dtype == b.dtype
                np.testing.assert_array_equal(a, b)


def test_unrolls_are_what_the_environments_emitted_and_what_the_actors_were_told(server):
    scripts = [Script(VECTOR, [1, 2]), Script(VECTOR, [3, 4, 5])]
    with contextlib.closing(server.connect(0, groups=1)) as a, contextlib.closing(server.connect(1, 1, 3)) as b:
        streams = [a.open_stream(0), b.open_stream(0)]
        actions = play(None, scripts, 4 * T + 3, streams)
        wait_until(lambda: server.replay.info()["replay/items"] == 4 * 5)
    unrolls = server.unrolls()
    for script, given in zip(scripts, actions, strict=True):
        assert_rows(unrolls, script, given)
    assert all((unroll.version == 0).all() for unroll in unrolls)


def log_rhos(server, unrolls):
    """log pi / mu of every row `[T+1, B]`, pi from the agent's own unroll of the network."""
    network, distribution = server.agent._network, server.agent._distribution

    @jax.jit
    def rhos(params, unroll):
        unroll = network.stacked(unroll)
        outputs, _ = network.unroll(params, unroll.state, unroll.timestep, unroll.action)
        return distribution.log_prob(outputs[0], unroll.action) - unroll.extras["log_prob"]

    return np.asarray(rhos(server.params, batch_of(unrolls)))


def batch_of(unrolls):
    """A batch as the learner has it."""
    batch = jax.tree.map(lambda *x: np.stack(x, axis=1), *[unroll._replace(state=None) for unroll in unrolls])
    return batch._replace(state=jax.tree.map(lambda *x: np.stack(x), *[unroll.state for unroll in unrolls]))


def test_the_learner_finds_the_log_probs_that_acting_stored(server):
    scripts = [Script(VECTOR, [1, 2]), Script(VECTOR, [3, 4])]
    with contextlib.closing(server.connect(0, groups=2)) as connection:
        play(connection, scripts, 5 * T + 1)
        wait_until(lambda: server.replay.info()["replay/items"] == 20)
    rhos = log_rhos(server, server.unrolls())
    assert rhos.shape == (T + 1, 20)
    assert np.abs(rhos).max() < 1e-5


def test_the_learner_finds_them_through_state_stacks_and_trees(recurrent):
    """An LSTM, its last action and reward, stacked frames: everything that the server keeps for a slot."""
    script, lead = Script(TREE, [1, 2]), RECURRENT.lead
    with contextlib.closing(recurrent.connect(0)) as connection:
        (actions,) = play(connection, [script], lead + 6 * T + 1)
        wait_until(lambda: recurrent.replay.info()["replay/items"] == 12)
    unrolls = recurrent.unrolls()
    for n in range(2):
        own = [u for u in unrolls if u.timestep.observation["vector"][0, 0] == n + 1]
        assert [u.timestep.observation["vector"][0, 1] for u in own] == [i * T for i in range(6)]
        for i, unroll in enumerate(own):
            rows = slice(i * T, i * T + lead + T + 1)
            expected = jax.tree.map(lambda x, n=n, rows=rows: x[rows, n], (script.rows, actions))
            for a, b in zip(jax.tree.leaves((unroll.timestep, unroll.action)), jax.tree.leaves(expected), strict=True):
                assert a.dtype == b.dtype
                np.testing.assert_array_equal(a, b)
    assert isinstance(actions[0], np.ndarray)
    assert set(actions[1]) == {"box"}
    # Continuous log-densities are larger numbers than log-probabilities; measured: 4e-6.
    assert np.abs(log_rhos(recurrent, unrolls)).max() < 2e-5
    executed = script.rows.step_type[lead : lead + 6 * T] != StepType.LAST
    wait_until(lambda: recurrent.policy.env_steps == executed.sum())
    # No frame but those of the rows comes with an unroll, and their stacks are those that acting saw, bit for bit.
    assert all(unroll.state.rings is None for unroll in unrolls)
    stacks = np.asarray(jax.jit(recurrent.agent._network.stacked)(batch_of(unrolls)).timestep.observation["image"])
    seen = stacks_of(script, RECURRENT.frame_stack)
    for b, unroll in enumerate(unrolls):
        seed, first = unroll.timestep.observation["vector"][0, :2].astype(int)
        np.testing.assert_array_equal(stacks[:, b], seen[first + lead : first + lead + T + 1, seed - 1])
    # The states matter: without them the same rows look different.
    forgotten = [u._replace(state=jax.tree.map(np.zeros_like, u.state)) for u in unrolls]
    assert np.abs(log_rhos(recurrent, forgotten)).max() > 1e-3


def stacks_of(script, k):
    """The last k frames of every row of a script's image, none from before its episode."""
    frames, stacks = script.rows.observation["image"], []
    for t, step_type in enumerate(script.rows.step_type):
        fresh = (step_type == StepType.FIRST)[:, None, None, None]
        before = np.repeat(frames[t][..., None], k - 1, -1) if t == 0 else stacks[-1][..., 1:]
        stack = np.concatenate([np.where(fresh, frames[t][..., None], before), frames[t][..., None]], -1)
        stacks.append(stack)
    return np.stack(stacks)


def test_a_stream_that_closes_mid_unroll_leaves_nothing(server):
    for seeds, rows, expected in (([1, 2], T, 0), ([3, 4], T + 1, 2)):
        with contextlib.closing(server.connect(0)) as connection:
            play(connection, [Script(VECTOR, seeds)], rows)
        wait_until(lambda: server.streams.num_streams == 0)
        wait_until(lambda expected=expected: server.replay.info()["replay/items"] == expected)
    assert {unroll.timestep.observation[0, 0] for unroll in server.unrolls()} == {3.0, 4.0}


def test_evaluation_is_greedy_and_stays_out_of_training(server):
    script = Script(VECTOR, [1, 2, 3, 4])
    statistics = server.policy.episodes, server.policy.eval_episodes
    with contextlib.closing(server.connect(0, groups=2, envs=4, evaluation=True)) as connection:
        stream = connection.open_stream(0)
        play(None, [script], 1, [stream])  # what was before is counted by now
        before, eval_before = (s.snapshot()["episodes"] for s in statistics)
        stream = connection.open_stream(1)
        (actions,) = play(None, [script], 3 * T, [stream])
    network, state = server.agent._network, server.agent.initial_state(4)
    logits = [network.step(server.params, state, jax.tree.map(jnp.asarray, script.row(t)))[0][0] for t in range(3 * T)]
    np.testing.assert_array_equal(actions, np.argmax(np.array(logits), axis=-1))
    ended = np.count_nonzero(script.rows.step_type[: 3 * T] == StepType.LAST)
    wait_until(lambda: server.policy.eval_episodes.snapshot()["episodes"] == eval_before + ended)
    assert server.policy.episodes.snapshot()["episodes"] == before
    assert server.unrolls() == []


# ---- batching


def both_actors(server, rows=15):
    """The actions of two actors that play at the same time, two groups each, as new to the server."""
    scripts = [Script(VECTOR, seeds) for seeds in ([1, 2], [3, 4], [5, 6], [7, 8])]
    results = {}

    def act(actor_id):
        with contextlib.closing(server.connect(actor_id, groups=2)) as connection:
            results[actor_id] = play(connection, scripts[2 * actor_id : 2 * actor_id + 2], rows)

    threads = [threading.Thread(target=act, args=(actor_id,), daemon=True) for actor_id in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return results[0] + results[1]


def test_actions_do_not_depend_on_the_batch(tmp_path):
    """Each group alone, all together or padded, and on one device or eight: the same keys give the same actions."""
    seen = []
    for name, config in {
        "alone": make_config(max_batch_size=2),
        "together": make_config(groups=1, envs=4),  # one size, 8; goes at all live rows
        "on eight devices": make_config(devices=8),
    }.items():
        with Server(f"unix:{tmp_path}/s", config) as server:
            seen.append(both_actors(server))
        assert all(len(np.unique(actions)) > 1 for actions in seen[-1]), name
    for others in seen[1:]:
        np.testing.assert_array_equal(seen[0], others)


_compilations = []
jax.monitoring.register_event_duration_secs_listener(
    lambda event, *_, **__: _compilations.append(event) if "backend_compile" in event else None
)


def test_nothing_is_compiled_after_warm_up(server):
    newer = jax.tree.map(lambda x: x + 0.0, server.params)
    before = len(_compilations)
    for actor_id, envs in enumerate([1, 3, 5, 7, 16, 2]):
        with contextlib.closing(server.connect(actor_id, groups=1, envs=envs)) as connection:
            play(connection, [Script(VECTOR, np.arange(envs))], T + 2)
        wait_until(lambda: server.streams.num_streams == 0)
        if actor_id == 2:
            server.weights.publish(server.weights.latest().version + 1, newer)
    assert _compilations[before:] == []
    assert server.metrics.snapshot().get("batcher/compilations", 0) == 0


def test_replies_carry_the_version_that_chose(server):
    first = server.weights.latest().version
    script = Script(VECTOR, [1, 2])
    with contextlib.closing(server.connect(0)) as connection:
        stream = connection.open_stream(0)
        versions = []
        for t in range(T + 1):
            stream.send(script.row(t))
            stream.receive()
            versions.append(stream.version)
            server.weights.publish(first + t + 1, server.params)
        wait_until(lambda: server.replay.info()["replay/items"] == 2)
    assert versions == list(range(first, first + T + 1))
    for unroll in server.unrolls():
        assert unroll.version.tolist() == versions


def test_a_hung_stream_is_waited_for_no_longer_than_its_timeout(server, monkeypatch):
    monkeypatch.setattr(server.policy._batcher, "_max_wait_s", 3600.0)
    server.metrics.snapshot()
    with contextlib.closing(server.connect(0, envs=8)) as hung, contextlib.closing(server.connect(9)) as alive:
        hanging, stream = hung.open_stream(0), alive.open_stream(0)
        play(None, [Script(VECTOR, np.arange(8)), Script(VECTOR, [1, 2])], 1, [hanging, stream])
        wait_until(lambda: server.metrics.snapshot()["batcher/live_slots"] == 10)
        received = threading.Event()
        script = Script(VECTOR, [1, 2], num_rows=9)
        act = lambda: (play(None, [script], 6, [Continued(stream)]), received.set())  # noqa: E731
        thread = threading.Thread(target=act, daemon=True)
        thread.start()
        assert not received.wait(0.2)
        with_timeout = dataclasses.replace(server.config.inference, stream_timeout_s=1e-9)
        monkeypatch.setattr(server.policy, "_config", dataclasses.replace(server.config, inference=with_timeout))
        assert received.wait(60)
        thread.join(60)


# ---- who is not disturbed by whom


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"reward": [0.0, np.nan]}, "reward of environment 1 is nan"),
        ({"observation": [[0.0, 0, 0], [0, np.inf, 0]]}, "observation of environment 1 .*as float32, .* 3.4e"),
        ({"step_type": [0, 7]}, "step_type is 7"),
        ({"step_type": [0, 1]}, "step_type of environment 1 is MID; it must be FIRST"),
        ({"discount": [1.5, 1.0]}, r"discount ranges over \[1\.0, 1\.5\]"),
    ],
)
def test_rows_that_cannot_be_used_end_their_own_stream_only(server, change, message):
    scripts = [Script(VECTOR, [1, 2]), Script(VECTOR, [3, 4])]
    with contextlib.closing(server.connect(0, groups=2)) as a, contextlib.closing(server.connect(1)) as b:
        good, bad = [a.open_stream(0), a.open_stream(1)], b.open_stream(0)
        sound = scripts[0].row(0)
        ((name, value),) = change.items()
        bad.send(sound._replace(**{name: np.array(value, getattr(sound, name).dtype)}))
        actions = play(None, scripts, 2 * T + 1, good)
        with pytest.raises(RejectedError, match=rf"INVALID_ARGUMENT.*{message}"):
            bad.receive()
        wait_until(lambda: server.streams.num_streams == 2)
        wait_until(lambda: server.replay.info()["replay/items"] == 8)
    unrolls = server.unrolls()
    for script, given in zip(scripts, actions, strict=True):
        assert_rows(unrolls, script, given)


def test_a_newer_run_of_an_actor_takes_the_place_of_an_older_one(server, monkeypatch):
    with contextlib.closing(server.connect(0)) as old:
        stream = old.open_stream(0)
        play(None, [Script(VECTOR, [1, 2])], T, [stream])
        with contextlib.closing(server.connect(0)) as new:
            with pytest.raises(Replaced, match="replaced by a newer run of actor 0"):
                stream.receive()
            streams = [new.open_stream(0)]
            play(None, [Script(VECTOR, [3, 4])], 1, streams)
            # A process that started earlier stays out, however often its link comes and goes.
            monkeypatch.setattr(client, "_STARTED_NS", client._STARTED_NS - 1)
            for _ in range(2):
                with pytest.raises(Replaced, match="actor 0 is connected already and was started later"):
                    server.connect(0)
            script = Script(VECTOR, [3, 4])
            play(None, [script], T, [Continued(streams[0])])
            wait_until(lambda: server.replay.info()["replay/items"] == 2)
    assert {unroll.timestep.observation[0, 0] for unroll in server.unrolls()} == {3.0, 4.0}


def test_another_environment_is_refused_by_the_leaf_that_differs(server):
    other = EnvSpec("vector", ArraySpec((4,), "float32"), VECTOR.action)
    with pytest.raises(ConfigError, match=r"FAILED_PRECONDITION.*observation is float32\[4\].*expects float32\[3\]"):
        server.connect(0, spec=other)


def test_a_group_larger_than_the_largest_batch_is_refused_and_leaves_nothing(server, monkeypatch):
    monkeypatch.setattr(server.policy._batcher, "max_rows", 3)
    for _ in range(2):
        with contextlib.closing(server.connect(0, envs=4)) as connection:
            stream = connection.open_stream(0)
            stream.send(Script(VECTOR, np.arange(4)).row(0))
            with pytest.raises(RejectedError, match=r"4 environments exceeds the largest batch \(3\)"):
                stream.receive()
        wait_until(lambda: server.streams.num_streams == 0)


def test_garbage_on_a_stream_ends_it_alone(server):
    with contextlib.closing(server.connect(0)) as connection, grpc.insecure_channel(server.address) as channel:
        streams = [connection.open_stream(0)]
        play(None, [Script(VECTOR, [1, 2])], 1, streams)
        for raw in (b"\xff\xff", b"", b"\x12\x03abc"):
            with pytest.raises(grpc.RpcError) as refusal:
                next(channel.stream_stream(wire.ACT)(iter([raw]), timeout=60))
            assert refusal.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        play(None, [Script(VECTOR, [1, 2])], 3, [Continued(streams[0])])


def test_a_full_queue_withholds_replies_of_training_alone(server, monkeypatch):
    monkeypatch.setattr(server.replay, "_max_items", 2)
    script, evaluation = Script(VECTOR, [1, 2]), Script(VECTOR, [3, 4, 5])
    paced_before = server.metrics.snapshot().get("store/paced_s", 0.0)
    with (
        contextlib.closing(server.connect(0)) as training,
        contextlib.closing(server.connect(1, envs=3, evaluation=True)) as greedy,
    ):
        stream = training.open_stream(0)
        play(None, [script], 2 * T, [stream])
        stream.send(script.row(2 * T))  # finishes the second unroll, for which there is no room
        received = threading.Event()
        thread = threading.Thread(target=lambda: (stream.receive(), received.set()), daemon=True)
        thread.start()
        play(greedy, [evaluation], 30)  # one that acts greedily goes on
        wait_until(lambda: server.metrics.snapshot()["batcher/live_slots"] == 3)  # and nobody waits for the other
        assert not received.wait(0.2)
        assert server.replay.info()["replay/items"] == 2
        server.replay.sample(2, 1.0)
        assert received.wait(60)
        thread.join(60)
        assert server.metrics.snapshot()["store/paced_s"] > paced_before + 0.2
        wait_until(lambda: server.replay.info()["replay/items"] == 2)
    first = [unroll.timestep.observation[0, 1] for unroll in server.unrolls()]
    assert first == [T, T]  # the second unroll, whole


# ---- the end


def acting(config, address, scripts, actor_id=0):
    """`run_actor` on a thread; its exceptions, empty if it ended as it should."""
    failures, made = [], iter(scripts)

    def run():
        try:
            run_actor(config, address, actor_id, lambda seeds: next(made))
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, failures


def test_an_actor_outlives_a_restart_of_the_server_and_ends_with_training(tmp_path):
    address, config = f"unix:{tmp_path}/s", make_config(actors=1, max_batch_size=4, envs=4)
    scripts = [Script(VECTOR, [1, 2, 3, 4], num_rows=30_000), Script(VECTOR, [5, 6, 7, 8], num_rows=30_000)]
    threads_before = threading.active_count()
    server = Server(address, config)
    thread, failures = acting(config, address, scripts)
    wait_until(lambda: server.replay.info()["replay/inserted"] > 100)
    server.stop(finished=False)
    assert thread.is_alive()
    with Server(address, config) as second:
        wait_until(lambda: second.replay.info()["replay/inserted"] > 100)
        assert [script.resets for script in scripts] == [2, 2]
        unrolls = second.unrolls()
        assert {unroll.timestep.observation[0, 1] for unroll in unrolls[:8]} == {0.0}  # fresh episodes
    thread.join(60)
    assert not thread.is_alive()
    assert failures == []
    wait_until(lambda: threading.active_count() <= threads_before)  # nothing is left of either connection


def test_an_actor_gives_up_on_a_server_that_never_comes(tmp_path):
    config = make_config(actors=1)
    config = type(config)(**{**vars(config), "actor": type(config.actor)(give_up_s=0.3)})
    started = time.monotonic()
    thread, failures = acting(config, f"unix:{tmp_path}/nobody", [Script(VECTOR, [i]) for i in range(2)])
    thread.join(60)
    assert time.monotonic() - started > 0.3
    assert isinstance(failures[0], ServerLostError)
    assert "gave up after 0.3 s" in str(failures[0])


def test_the_end_of_training_ends_streams_normally(tmp_path):
    config = make_config(actors=1, groups=1)
    for finished, error in ((True, Finished), (False, ServerLostError)):
        server = Server(f"unix:{tmp_path}/s", config)
        connection = server.connect(0)
        stream = connection.open_stream(0)
        play(None, [Script(VECTOR, [1, 2])], 3, [stream])
        server.stop(finished=finished)
        with pytest.raises(error):
            stream.receive()
        connection.close()


@pytest.mark.parametrize(("finished", "error"), [(True, Finished), (False, ServerLostError)])
def test_the_end_of_training_reaches_those_that_are_not_admitted_yet(tmp_path, finished, error):
    config = make_config(actors=1, groups=1)
    server = Server(f"unix:{tmp_path}/s", config)
    connection = server.connect(0)
    # A call that has sent nothing yet, and a hello that waits for a second server to be ready.
    pending: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
    call = connection._channel.stream_stream(wire.ACT)(iter(pending.get, None))
    wait_until(lambda: server.front_end._opening)
    server.stop(finished=finished)
    if finished:
        assert list(call) == []
    else:
        with pytest.raises(grpc.RpcError, match="may come back"):
            list(call)
    pending.put(None)
    connection.close()

    second = FrontEnd(f"unix:{tmp_path}/t", config.inference, Streams(8, 8), lambda error: None)
    second.start()
    errors = []

    def connect():
        try:
            Connection(second.address, config.inference, 0, VECTOR, 1, 2, evaluation=False, timeout_s=60.0)
        except Exception as raised:
            errors.append(raised)

    thread = threading.Thread(target=connect)
    thread.start()
    second.first_spec.result(60)
    second.stop(finished=finished)
    thread.join(60)
    assert [type(raised) for raised in errors] == [error]

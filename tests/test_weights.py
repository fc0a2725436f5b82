"""Versions of the weights: readers keep what they hold while the learner goes on, and versions only grow."""

import threading
import time

import jax
import numpy as np
import pytest
from fakes import Regression, random_unroll

from seedx import sharding
from seedx.config import LearnerConfig
from seedx.learner.learner import initial_state
from seedx.learner.update import make_update
from seedx.weights import WeightStore


def test_nothing_is_there_before_the_first_version():
    store = WeightStore()
    with pytest.raises(LookupError, match="no weights were published yet"):
        store.latest()
    assert store.wait_for(0, 0.01) is None


def test_versions_grow():
    store = WeightStore()
    store.publish(3, "c")
    for version in (3, 2):
        with pytest.raises(ValueError, match=rf"version \({version}\) must be greater than the latest \(3\)"):
            store.publish(version, "x")
    assert store.latest() == (3, "c")
    store.publish(5, "e")
    assert store.latest() == (5, "e")


def test_waiting_for_a_version():
    store, got = WeightStore(), []
    waiting = threading.Thread(target=lambda: got.append(store.wait_for(2, 60.0)), daemon=True)
    waiting.start()
    store.publish(1, "a")
    time.sleep(0.02)
    assert not got
    store.publish(4, "d")
    waiting.join(60)
    assert got == [(4, "d")]
    assert store.wait_for(2, 0.0) == (4, "d")
    started = time.monotonic()
    assert store.wait_for(5, 0.05) is None
    assert time.monotonic() - started >= 0.05


def test_readers_on_other_devices_get_their_own_copy():
    config = LearnerConfig(batch_size=4, devices=4, inference_devices=2)
    meshes = sharding.build_meshes(config)
    store = WeightStore(sharding.mover(meshes.learner, meshes.inference))
    params = initial_state(Regression(), config, meshes.learner, 0).params
    store.publish(0, params)
    for there, here in zip(jax.tree.leaves(store.latest().params), jax.tree.leaves(params), strict=True):
        assert there.devices() == set(meshes.inference.devices.flat)
        assert not there.devices() & here.devices()
        np.testing.assert_array_equal(there, here)
    assert sharding.mover(meshes.learner, meshes.learner) is None


def test_readers_keep_the_last_two_versions_through_a_thousand_updates():
    config = LearnerConfig(batch_size=8, unroll_length=3, devices=1, optimizer="adam")
    mesh = sharding.build_meshes(config).learner
    update = make_update(Regression(), config, mesh, 0)
    batch, weights = jax.device_put((random_unroll(8, 3), np.ones(8, np.float32)))
    state = initial_state(Regression(), config, mesh, 0)
    store, truth, failures = WeightStore(), {0: np.array(state.params["w"])}, []
    store.publish(0, state.params)
    done = threading.Event()
    read = jax.jit(lambda params: params["w"] + 0.0)
    read(state.params)

    def reader():
        before = store.latest()
        while not done.is_set():
            now = store.latest()
            for version, params in (before, now):  # v-1 may still be in a forward pass when v arrives
                values = np.array(read(params))
                if not np.array_equal(values, truth[version]):
                    failures.append(f"version {version} changed under its reader")
            before = now

    def guarded():
        try:
            reader()
        except Exception as error:
            failures.append(repr(error))

    readers = [threading.Thread(target=guarded, daemon=True) for _ in range(2)]
    for thread in readers:
        thread.start()
    params, opt_state = state.params, state.opt_state
    for i in range(1, 1001):
        result = update(params, None, opt_state, batch, weights, np.float32(0), np.int32(i), None)
        params, opt_state = result.params, result.opt_state
        truth[i] = np.array(params["w"])
        store.publish(i, params)
    done.set()
    for thread in readers:
        thread.join(60)
    assert failures == []
    assert store.latest().version == 1000
    assert not np.array_equal(truth[0], truth[1000])

"""New weights while requests run: what each policy does, what is refused, and when old buffers go."""

import collections
import dataclasses
import gc
import threading
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decode_harness import CONFIG, Serving, full_logits, greedy, make_params, near_misses, warm_engine
from server_harness import wait_until

from seedx.inference.engine import Engine
from seedx.inference.live_weights import LiveWeights
from seedx.inference.memory_plan import plan_memory
from seedx.inference.requests import Request
from seedx.inference.scheduler import Scheduler
from seedx.networks import transformer
from seedx.weights import Weights

PROMPT = (5, 9, 2, 33)
TOKENS = 40


@pytest.fixture(scope="module")
def versions():
    return [make_params(seed) for seed in range(4)]


@pytest.fixture(scope="module")
def engine():
    return warm_engine()


class Publisher:
    """A listener that publishes versions when its request has so many tokens; the scheduler waits meanwhile."""

    def __init__(self, scheduler, *plan):
        self.scheduler, self.plan, self.count, self.restarts = scheduler, list(plan), 0, 0

    def __call__(self, delta):
        self.count += len(delta.tokens)
        self.restarts += delta.restarted
        while self.plan and self.count >= self.plan[0][0]:
            _, version, params = self.plan.pop(0)
            thread = threading.Thread(target=self.scheduler.publish, args=(version, params))
            thread.start()
            thread.join(60)


def test_continue_goes_on_with_new_weights_at_the_next_dispatch(engine, versions):
    with Serving(engine, versions[0]) as scheduler:
        publisher = Publisher(scheduler, (10, 7, versions[1]))
        (done,) = scheduler.submit(greedy(PROMPT, TOKENS), publisher).result(60)
        assert scheduler.version == 7
    changes = np.flatnonzero(np.diff(done.versions))
    assert done.versions[[0, -1]].tolist() == [0, 7]
    assert len(changes) == 1
    # Seen after 10 tokens, when one more dispatch of 2 had been launched: the next one is on the new weights.
    assert changes[0] + 1 <= 10 + 2 * engine.steps_per_dispatch
    first = changes[0] + 1
    assert near_misses(versions[0], PROMPT, done.tokens[:first]) <= 1
    assert len(done.tokens) == TOKENS
    assert engine.compilations == 0


def test_finish_stays_on_old_weights_while_others_go_on(engine, versions):
    with Serving(engine, versions[0]) as scheduler:
        publisher = Publisher(scheduler, (6, 1, versions[1]), (16, 2, versions[2]), (18, 3, versions[3]))
        submitted = threading.Event()
        finishing = scheduler.submit(
            greedy(PROMPT, TOKENS, on_swap="finish"), lambda delta: submitted.wait(60) and publisher(delta)
        )
        other = scheduler.submit(greedy(PROMPT, 50))
        submitted.set()
        (going_on,) = other.result(60)
        (finished,) = finishing.result(60)
        (later,) = scheduler.submit(greedy(PROMPT, 6)).result(60)
    assert set(finished.versions.tolist()) == {0}
    assert near_misses(versions[0], PROMPT, finished.tokens) <= 1
    # 2 waited for the end of what finished on 0, and 3 took its place.
    assert set(going_on.versions.tolist()) == {0, 1, 3}
    assert (np.diff(going_on.versions) >= 0).all()
    assert set(later.versions.tolist()) == {3}
    assert near_misses(versions[3], PROMPT, later.tokens) <= 1
    assert engine.compilations == 0


def test_a_version_that_waits_comes_when_what_finishes_ends_early(engine, versions):
    submitted, seen = threading.Event(), []
    with Serving(engine, versions[0]) as scheduler:
        publisher = Publisher(scheduler, (4, 1, versions[1]), (8, 2, versions[2]))

        def listener(delta):
            publisher(delta)
            if publisher.count >= 8 and not seen:
                seen.append(scheduler.version)
                submitted.wait(60)
                handle.cancel()

        handle = scheduler.submit(greedy(PROMPT, 50, on_swap="finish"), listener)
        submitted.set()
        (done,) = handle.result(60)
        wait_until(lambda: scheduler.version == 2)
    assert (done.finish_reason, seen) == ("cancelled", [1])


def test_restart_begins_anew(engine, versions):
    with Serving(engine, versions[0]) as scheduler:
        publisher = Publisher(scheduler, (10, 1, versions[1]))
        request = Request(PROMPT, TOKENS, seed=5, on_swap="restart")
        (done,) = scheduler.submit(request, publisher).result(60)
        (fresh,) = scheduler.submit(Request(PROMPT, TOKENS, seed=5)).result(60)
    assert publisher.restarts == 1
    assert set(done.versions.tolist()) == {1}
    np.testing.assert_array_equal(done.tokens, fresh.tokens)
    assert publisher.count >= TOKENS + 10


def test_a_listener_that_raises_at_a_restart_fails_its_request_alone(engine, versions):
    def raises(delta):
        publisher(delta)
        assert not delta.restarted

    with Serving(engine, versions[0]) as scheduler:
        publisher = Publisher(scheduler, (10, 1, versions[1]))
        bad = scheduler.submit(Request(PROMPT, TOKENS, num_samples=3, on_swap="restart"), raises)
        with pytest.raises(RuntimeError, match="failed"):
            bad.result(60)
        (sample,) = scheduler.submit(greedy(PROMPT, 6)).result(60)
        assert set(sample.versions.tolist()) == {1}
        wait_until(lambda: engine.busy == 0)


def test_logprobs_after_a_swap_are_those_of_the_new_weights(engine, versions):
    """The cache keeps what the old weights wrote, so only requests that start later can be compared."""
    with Serving(engine, versions[0]) as scheduler:
        scheduler.submit(greedy(range(40), 2)).result(60)
        assert len(engine.prefixes) > 0
        scheduler.publish(1, versions[1])
        (done,) = scheduler.submit(greedy(range(40), 5)).result(60)
    text = [*range(40), *done.tokens.tolist()]
    logits = full_logits(versions[1], [text])[0, 39 : len(text) - 1]
    oracle = np.asarray(jax.nn.log_softmax(logits))[np.arange(5), done.tokens]
    np.testing.assert_allclose(done.raw_logprobs, oracle, atol=1e-4)


def test_weights_that_cannot_be_used_are_refused_and_the_old_ones_stay(engine, versions):
    good = versions[0]
    nan = {**good, "norm": {"weight": good["norm"]["weight"].at[3].set(jnp.nan)}}
    short = {**good, "embedding": good["embedding"][:5], "extra": good["embedding"]}
    del short["norm"]
    half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), good)
    with Serving(engine, good, version=3) as scheduler:
        with pytest.raises(ValueError, match="NaN"):
            scheduler.publish(4, nan)
        with pytest.raises(
            ValueError, match=r"embedding.* float32\[5, 32\], not float32\[64, 32\].*extra.*norm.*missing"
        ):
            scheduler.publish(4, short)
        with pytest.raises(ValueError, match="bfloat16"):
            scheduler.publish(4, half)
        for version, said in (
            (3, "greater than"),
            (2**31, r"\(2147483648\) must be from 0 to 2147483647"),
            (-1, "from 0"),
        ):
            with pytest.raises(ValueError, match=said):
                scheduler.publish(version, versions[1])
        (done,) = scheduler.submit(greedy(PROMPT, 6)).result(60)
        assert set(done.versions.tolist()) == {3}
        assert near_misses(good, PROMPT, done.tokens) <= 1
        scheduler.publish(2**31 - 1, versions[1])
        (done,) = scheduler.submit(greedy(PROMPT, 6)).result(60)
        assert set(done.versions.tolist()) == {2**31 - 1}
    for version, params, said in ((0, nan, "NaN"), (-1, good, "from 0"), (2**31, good, "from 0")):
        with pytest.raises(ValueError, match=said):
            Scheduler(engine, Weights(version, params))


@pytest.mark.parametrize("on_swap", ["continue", "finish"])
def test_old_weights_are_freed_after_their_last_step(engine, versions, on_swap):
    old = jax.tree.map(jnp.copy, versions[0])
    gone = weakref.ref(old["embedding"])
    with Serving(engine, old) as scheduler:
        del old
        publisher = Publisher(scheduler, (6, 1, versions[1]))
        scheduler.submit(greedy(PROMPT, 20, on_swap=on_swap), publisher).result(60)
        scheduler.submit(greedy(PROMPT, 4)).result(60)

        def freed():
            gc.collect()
            return gone() is None

        wait_until(freed)


# ---- how many versions are held

LONE = dataclasses.replace(CONFIG, vocab_size=72, num_layers=1)  # no other test's arrays have its embedding's shape


class Counting(Engine):
    """An engine that notes how many versions are on the device whenever it has made one more."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.most, self._counting = collections.Counter(), threading.Lock()

    def place(self, params):
        return self._counted(super().place(params))

    def quantize(self, params):
        return self._counted(super().quantize(params))

    def _counted(self, params):
        shape = (LONE.vocab_size, LONE.width)
        with self._counting:  # the list itself keeps what it has alive
            self.most |= collections.Counter(str(a.dtype) for a in jax.live_arrays() if a.shape == shape)
        return params


@pytest.fixture(scope="module")
def lone():
    """Versions on the host, so that what is on the device was made by the engine."""
    made = [jax.tree.map(np.array, make_params(seed, LONE)) for seed in range(5)]
    return lambda version: Weights(version, made[version % 5])


def counting_engine(int8):
    gc.collect()
    shapes = transformer.abstract_params(LONE)
    return Counting(LONE, plan_memory(LONE, shapes, 10**9, max_slots=2, chunk=16, quantize=int8), steps_per_dispatch=2)


def assert_within_plan(engine):
    published, waiting = engine.most["float32"], engine.most["int8"]
    if engine.plan.int8:
        assert (published, waiting) == (1, engine.plan.versions)
    else:
        assert (published, waiting) == (engine.plan.versions, 0)


@pytest.mark.parametrize("int8", [False, True])
def test_no_more_versions_are_held_than_planned(lone, int8):
    """A second one replaces the first that waits, also while requests finish on the version before."""
    engine = counting_engine(int8)
    weights = LiveWeights(engine, lone(0))
    for version in (1, 2):
        weights.publish(lone(version))
    assert weights.swap()
    assert (weights.finishing.version, weights.current.version) == (0, 2)
    for version in (3, 4):
        weights.publish(lone(version))
    assert not weights.swap()
    assert not weights.settled
    made = sum(engine.most.values())
    weights.release()
    assert weights.swap()
    assert (weights.finishing.version, weights.current.version) == (2, 4)
    assert sum(engine.most.values()) == made
    weights.release()
    assert weights.settled
    assert_within_plan(engine)


@pytest.mark.parametrize("int8", [False, True])
def test_publishers_and_swaps_at_once_hold_no_more_versions_than_planned(lone, int8):
    engine = counting_engine(int8)
    weights = LiveWeights(engine, lone(0))
    refused = []

    def publish(first):
        for version in range(first, 40, 2):
            try:
                weights.publish(lone(version))
            except ValueError as error:
                refused.append(str(error))

    publishers = [threading.Thread(target=publish, args=(first,)) for first in (1, 2)]
    for thread in publishers:
        thread.start()
    seen = [0]
    while any(thread.is_alive() for thread in publishers) or not weights.settled:
        if weights.swap():
            seen.append(weights.current.version)
        else:
            weights.release()
    assert seen == sorted(set(seen))
    assert seen[-1] == 39
    assert all("greater than the newest" in message for message in refused)
    assert engine.most <= collections.Counter({"float32": 1, "int8": 3} if int8 else {"float32": 2})


def test_a_stale_version_is_refused_before_any_device_work(engine, versions):
    """Its weights are never looked at."""
    weights = LiveWeights(engine, Weights(5, versions[0]))
    with pytest.raises(ValueError, match=r"version \(5\) must be greater than the newest \(5\)"):
        weights.publish(Weights(5, jax.tree.map(lambda leaf: leaf * jnp.nan, versions[0])))

"""The scheduler on a real engine: what comes back, in whatever order and company requests are served."""

import gc
import threading
import time
import types
import weakref

import jax
import numpy as np
import pytest
from decode_harness import (
    CONFIG,
    Serving,
    full_logits,
    greedy,
    logprob_bound,
    make_engine,
    make_params,
    near_misses,
    random_prompts,
    warm_engine,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from server_harness import wait_until

from seedx.inference import waiting
from seedx.inference.engine import Engine
from seedx.inference.requests import QueueFullError, Request
from seedx.inference.scheduler import Limits, Scheduler
from seedx.threads import Crew
from seedx.weights import Weights

LONG = 10_000  # max_tokens of a completion that ends with the context


class Letters:
    """Token n is one byte: letters, and the three bytes of a euro sign as 61, 62, 63."""

    vocab_size, bos_id, eos_ids, pad_id = 64, None, (), 0

    def encode(self, text, add_bos=True, parse_special=False):
        return [ord(letter) - 64 for letter in text]

    def literal(self, text):
        return text

    def decode(self, tokens):
        return b"".join(map(self.token_bytes, tokens)).decode("utf-8", "replace")

    def token_bytes(self, token):
        return {61: b"\xe2", 62: b"\x82", 63: b"\xac"}.get(token, bytes([64 + token]))


@pytest.fixture(scope="module")
def params():
    return make_params(0)


@pytest.fixture(scope="module")
def engine():
    return warm_engine()


@pytest.fixture
def scheduler(engine, params):
    with Serving(engine, params) as scheduler:
        yield scheduler


def complete(scheduler, requests):
    handles = [scheduler.submit(request) for request in requests]
    return [handle.result(60) for handle in handles]


def test_greedy_tokens_are_those_of_full_forward_passes(scheduler, params):
    """Prompts of one token, of a bucket, of exactly and of more than a chunk."""
    prompts = [
        *random_prompts(10, 1, 40),
        *random_prompts(3, 1, 1),
        *random_prompts(2, 17, 17),
        *random_prompts(2, 33, 33),
    ]
    results = complete(scheduler, [greedy(prompt, 12) for prompt in prompts])
    misses = 0
    for prompt, (completion,) in zip(prompts, results, strict=True):
        assert completion.finish_reason == "length"
        assert len(completion.tokens) == 12
        misses += near_misses(params, prompt, completion.tokens)
    assert misses <= 2


def test_logprobs_are_those_of_a_full_forward_pass(scheduler, params):
    prompts = random_prompts(6, 2, 30, seed=1)
    requests = [
        Request(prompt, 10, temperature=t, seed=3) for prompt, t in zip(prompts, (1.0, 0.7, 1.5) * 2, strict=True)
    ]
    for request, (done,) in zip(requests, complete(scheduler, requests), strict=True):
        text = [*request.prompt, *done.tokens.tolist()]
        logits = full_logits(params, [text])[0, len(request.prompt) - 1 : len(text) - 1]
        for temperature, logprobs in ((1.0, done.raw_logprobs), (request.temperature, done.logprobs)):
            oracle = np.asarray(jax.nn.log_softmax(logits / temperature))[np.arange(10), done.tokens]
            assert np.abs(oracle - logprobs).max() <= logprob_bound(logits) / min(temperature, 1.0)


def test_a_sampled_completion_depends_on_its_seed_alone(scheduler):
    prompts = random_prompts(9, 1, 40, seed=2)
    requests = [Request(prompt, 8, seed=i, top_k=(0, 5)[i % 2]) for i, prompt in enumerate(prompts)]
    together = complete(scheduler, requests)
    backwards = complete(scheduler, requests[::-1])[::-1]
    for (first,), (second,) in zip(together, backwards, strict=True):
        np.testing.assert_array_equal(first.tokens, second.tokens)
    (other,) = complete(scheduler, [Request(prompts[0], 8, seed=99)])[0]
    assert other.tokens.tolist() != together[0][0].tokens.tolist()


def test_samples_of_a_prompt_share_its_prefill_and_differ(scheduler, engine, monkeypatch):
    computed = []
    monkeypatch.setattr(engine, "extend", lambda *args: (computed.append(args[1].done), Engine.extend(engine, *args)))
    engine.prefixes.clear()
    prompt = random_prompts(1, 40, 40, seed=5)[0]
    samples = scheduler.submit(Request(prompt, 6, seed=7, num_samples=10)).result(60)
    assert computed == [0, 16, 32]  # ten samples on four slots, one prefill
    assert len({tuple(sample.tokens.tolist()) for sample in samples}) > 5
    again = scheduler.submit(Request(prompt, 6, seed=7)).result(60)[0]
    assert computed == [0, 16, 32, 32]  # two chunks were known
    np.testing.assert_array_equal(samples[0].tokens, again.tokens)


def test_prefixes_in_common_give_the_same_tokens(scheduler, engine, params):
    stem = random_prompts(1, 34, 34, seed=6)[0]
    prompts = [(*stem, tail) for tail in range(5)]
    engine.prefixes.clear()
    before = engine.prefixes.hits
    for prompt, (completion,) in zip(prompts, complete(scheduler, [greedy(p) for p in prompts]), strict=True):
        near_misses(params, prompt, completion.tokens)
    assert engine.prefixes.hits - before == 2 * 4


def test_a_completion_ends_with_the_context(scheduler):
    prompt = random_prompts(1, 60, 60)[0]
    (completion,) = scheduler.submit(greedy(prompt, LONG)).result(60)
    assert (len(completion.tokens), completion.finish_reason) == (4, "length")


def test_stop_tokens_end_a_completion_and_are_its_last_token(scheduler):
    prompt = random_prompts(1, 5, 5)[0]
    (free,) = scheduler.submit(Request(prompt, 30, seed=1)).result(60)
    stop = int(free.tokens[11])
    first = free.tokens.tolist().index(stop)
    (stopped,) = scheduler.submit(Request(prompt, 30, seed=1, stop_tokens=(stop, 1000 % 64))).result(60)
    cut = min(first, *[i for i, token in enumerate(free.tokens.tolist()) if token == 1000 % 64] or [99])
    assert (stopped.tokens.tolist(), stopped.finish_reason) == (free.tokens[: cut + 1].tolist(), "stop")


def test_stop_texts_across_tokens_are_never_shown(engine, params):
    prompt = random_prompts(1, 5, 5)[0]
    with Serving(engine, params, tokenizer=Letters()) as scheduler:
        (free,) = scheduler.submit(Request(prompt, 30, seed=1)).result(60)
        assert free.text == Letters().decode(free.tokens.tolist())
        stop = free.text[9:12]
        assert free.text.index(stop) == 9
        deltas = []
        handle = scheduler.submit(Request(prompt, 30, seed=1, stop=("absent" + stop, stop)), deltas.append)
        (stopped,) = handle.result(60)
        assert (stopped.text, stopped.finish_reason) == (free.text[:9], "stop")
        assert stopped.tokens.tolist() == free.tokens[: len(stopped.tokens)].tolist()
        assert "".join(delta.text for delta in deltas) == free.text[:9]
        assert np.concatenate([delta.tokens for delta in deltas]).tolist() == stopped.tokens.tolist()
        assert [delta.finish_reason for delta in deltas] == [None] * (len(deltas) - 1) + ["stop"]


def test_deltas_joined_are_the_completion(scheduler):
    deltas = []
    samples = scheduler.submit(Request((1, 2, 3), 9, seed=2, num_samples=3), deltas.append).result(60)
    for i, sample in enumerate(samples):
        mine = [delta for delta in deltas if delta.index == i]
        for column in ("tokens", "logprobs", "raw_logprobs", "versions"):
            joined = np.concatenate([getattr(delta, column) for delta in mine])
            np.testing.assert_array_equal(joined, getattr(sample, column))
        assert mine[-1].finish_reason == "length"


def test_a_cancelled_request_frees_its_slots_before_the_next_dispatch(engine, params):
    launched = []
    with Serving(engine, params) as scheduler:
        cancelled_at, submitted = [], threading.Event()

        def listener(delta):
            assert submitted.wait(60)
            if not cancelled_at:
                handle.cancel()
                cancelled_at.append(len(launched))

        original = engine.generate
        engine.generate = lambda weights, members: (launched.append(engine.busy), original(weights, members))[1]
        try:
            handle = scheduler.submit(Request((1, 2), LONG, seed=0, num_samples=4), listener)
            other = scheduler.submit(Request((3,), 4, seed=0))
            submitted.set()
            results = handle.result(60)
            assert other.result(60)[0].finish_reason == "length"
        finally:
            del engine.generate
    assert [result.finish_reason for result in results] == ["cancelled"] * 4
    assert all(0 < len(result.tokens) < 10 for result in results[:1])
    assert launched[cancelled_at[0]] == 1  # only the other request's


def test_cancelling_what_waits_and_what_is_done(scheduler):
    cancelled = threading.Event()
    busy = scheduler.submit(Request((1,), LONG, num_samples=4), lambda delta: cancelled.wait(60))
    waiting = scheduler.submit(Request((2,), 5))
    waiting.cancel()
    cancelled.set()
    (completion,) = waiting.result(60)
    assert (len(completion.tokens), completion.finish_reason) == (0, "cancelled")
    busy.cancel()
    busy.result(60)
    busy.cancel()
    assert scheduler.submit(Request((2,), 5)).result(60)[0].finish_reason == "length"


def test_what_is_cancelled_waits_no_more_though_a_turn_goes_on(engine, params, monkeypatch):
    launched, go_on = threading.Event(), threading.Event()
    original = engine.generate

    def generate(*arguments):
        launched.set()
        assert go_on.wait(60)
        return original(*arguments)

    monkeypatch.setattr(engine, "generate", generate)
    with Serving(engine, params) as scheduler:
        handles = [scheduler.submit(Request((1,), LONG, num_samples=engine.plan.num_slots + 3))]
        assert launched.wait(60)
        assert scheduler.figures()["decode/waiting"] == 3
        handles.append(scheduler.submit(Request((2,), LONG, num_samples=2)))
        assert scheduler.figures()["decode/waiting"] == 5
        for handle in handles:
            handle.cancel()
            handle.cancel()
        assert scheduler.figures()["decode/waiting"] == 0
        go_on.set()
        for handle in handles:
            handle.result(60)
        assert scheduler.figures()["decode/waiting"] == 0


def test_a_listener_may_cancel_what_it_submits(scheduler):
    """It runs while cancelled requests are taken, and what it asks for then comes a turn later."""
    submitted, cancelled = [], threading.Event()

    def listener(delta):
        assert cancelled.wait(60)
        if delta.finish_reason == "cancelled":
            submitted.append(scheduler.submit(Request((2,), LONG)))
            submitted[0].cancel()

    handle = scheduler.submit(Request((1,), LONG), listener)
    handle.cancel()
    cancelled.set()
    handle.result(60)
    (completion,) = submitted[0].result(60)
    assert completion.finish_reason == "cancelled"


def test_what_is_done_is_forgotten_behind_what_goes_on(scheduler):
    """One request stays at the top of the queue and of the deadlines while others come and are cancelled."""
    handles, alive = [], []

    def listener(delta):
        if delta.index == 0 and delta.finish_reason is None:
            handle = scheduler.submit(Request((2,), 1, deadline_s=200.0))
            handle.cancel()
            handles.append(weakref.ref(handle))
        elif delta.index == 0:
            gc.collect()
            alive.append(sum(handle() is not None for handle in handles))

    scheduler.submit(Request((1,), LONG, num_samples=8, priority=1, deadline_s=100.0), listener).result(60)
    assert len(handles) > 25
    assert alive[0] < 15


def test_a_deadline_ends_what_runs_and_what_waits(scheduler):
    running = scheduler.submit(Request((1,), LONG, num_samples=8, deadline_s=1e-6))
    results = running.result(60)
    assert {result.finish_reason for result in results} == {"deadline"}
    assert scheduler.submit(Request((1,), 3, deadline_s=100.0)).result(60)[0].finish_reason == "length"


def test_higher_priorities_go_first(scheduler):
    order = []

    def note(name):
        return lambda delta: order.append(name) if delta.finish_reason else None

    holding = threading.Event()
    blocker = scheduler.submit(Request((1,), 30, num_samples=4, priority=9), lambda delta: holding.wait(60))
    handles = [scheduler.submit(Request((2,), 2, num_samples=4, priority=p), note(p)) for p in (0, 1, 5, 1)]
    holding.set()
    blocker.result(60)
    for handle in handles:
        handle.result(60)
    assert order == [5] * 4 + [1] * 8 + [0] * 4


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (Request((), 1), "prompt has 0"),
        (Request((1,) * 64, 1), "prompt has 64"),
        (Request((1, 64), 1), "prompt has token id"),
        (Request((-1,), 1), "prompt has token id"),
        (Request((2**70,), 1), "prompt has token id"),
        (Request((1,), 0), "max_tokens"),
        (Request((1,), 1, temperature=-1.0), "temperature"),
        (Request((1,), 1, temperature=float("nan")), "temperature"),
        (Request((1,), 1, top_k=-1), "top_k"),
        (Request((1,), 1, top_p=0.0), "top_p"),
        (Request((1,), 1, seed=-1), "seed"),
        (Request((1,), 1, stop_tokens=(64,)), "stop_tokens"),
        (Request((1,), 1, stop=("x",)), "stop needs"),
        (Request((1,), 1, stop=("",)), "stop has"),
        (Request((1,), 1, num_samples=0), "num_samples"),
        (Request((1,), 1, num_samples=100_000), "num_samples"),
        (Request((1,), 1, deadline_s=0.0), "deadline_s"),
        (Request((1,), 1, on_swap="pause"), "on_swap"),
    ],
)
def test_bad_requests_are_named(engine, params, request_, field):
    with pytest.raises(ValueError, match=field):
        Scheduler(engine, Weights(0, params)).submit(request_)


def test_a_full_queue_says_when_to_come_back(engine, params):
    scheduler = Scheduler(engine, Weights(0, params), limits=Limits(max_waiting=5, max_waiting_tokens=30))
    handles = [scheduler.submit(greedy((1,) * 10, num_samples=2)) for _ in range(2)]
    with pytest.raises(QueueFullError, match="4 completions") as full:
        scheduler.submit(greedy((1,), num_samples=2))
    assert 0 < full.value.retry_after_s <= 60
    with pytest.raises(QueueFullError, match="20 prompt tokens"):
        scheduler.submit(greedy((1,) * 11))
    scheduler.start()
    for handle in handles:
        handle.result(60)
    wait_until(lambda: scheduler.submit(greedy((1,), num_samples=5)).result(60))
    scheduler.close()


def test_closing_drains_or_interrupts_and_then_refuses(engine, params):
    for drain, reason in ((True, "length"), (False, "interrupted")):
        scheduler = Scheduler(engine, Weights(0, params))
        scheduler.start()
        # What it brings first is held until the scheduler is told to close.
        closing = lambda delta, it=scheduler: wait_until(lambda: it._closing)  # noqa: E731
        handle = scheduler.submit(greedy((1, 2), LONG, num_samples=20), closing)
        scheduler.close(drain=drain, timeout_s=60)
        assert {completion.finish_reason for completion in handle.result(0)} >= {reason}
        with pytest.raises(RuntimeError, match="closed"):
            scheduler.submit(greedy((1,)))
        with pytest.raises(RuntimeError, match="closed"):
            scheduler.publish(1, params)
        assert scheduler.version == 0


def test_an_idle_hour_is_no_reason_to_come_back_later(engine, params, monkeypatch):
    hours = [0.0]
    clock = time.monotonic
    monkeypatch.setattr(waiting, "time", types.SimpleNamespace(monotonic=lambda: clock() + 3600 * hours[0]))
    with Serving(engine, params, limits=Limits(max_waiting=2)) as scheduler:
        for hours[0] in range(3):
            scheduler.submit(greedy((1, 2), num_samples=2)).result(60)
        go_on = threading.Event()
        scheduler.submit(greedy((1,)), lambda _: go_on.wait(60))
        full = None
        while full is None:
            try:
                scheduler.submit(greedy((1,), num_samples=2))
            except QueueFullError as error:
                full = error
        go_on.set()
    assert 0 < full.retry_after_s < 10


def test_closing_before_the_start_interrupts(engine, params):
    scheduler = Scheduler(engine, Weights(0, params))
    handle = scheduler.submit(greedy((1,)))
    scheduler.close()
    assert handle.result(0)[0].finish_reason == "interrupted"


def test_a_failure_of_the_thread_reaches_handles_and_owner(engine, params, monkeypatch):
    crew = Crew()
    scheduler = Scheduler(engine, Weights(0, params), crew=crew)
    monkeypatch.setattr(engine, "generate", lambda *_: 1 / 0)
    scheduler.start()
    handle = scheduler.submit(greedy((1,)))
    with pytest.raises(RuntimeError) as failed:
        handle.result(60)
    assert isinstance(failed.value.__cause__, ZeroDivisionError)
    assert isinstance(crew.failure, ZeroDivisionError)
    with pytest.raises(RuntimeError, match="failed"):
        scheduler.submit(greedy((1,)))
    with pytest.raises(RuntimeError, match="failed"):
        scheduler.publish(1, params)
    monkeypatch.undo()
    engine.free(range(4))


def test_a_listener_that_raises_fails_its_request_alone(scheduler):
    def raises(delta):
        raise KeyError("listener")

    bad = scheduler.submit(Request((1,), LONG, num_samples=3), raises)
    good = scheduler.submit(greedy((2,), 20))
    with pytest.raises(RuntimeError) as failed:
        bad.result(60)
    assert isinstance(failed.value.__cause__, KeyError)
    assert len(good.result(60)[0].tokens) == 20


TRAFFIC = st.lists(
    st.builds(
        dict,
        prompt=st.lists(st.integers(0, CONFIG.vocab_size - 1), min_size=1, max_size=63).map(tuple),
        max_tokens=st.integers(1, 40),
        temperature=st.sampled_from([0.0, 0.5, 1.0]),
        top_k=st.sampled_from([0, 1, 7]),
        top_p=st.sampled_from([1.0, 0.9]),
        seed=st.integers(0, 5),
        stop_tokens=st.lists(st.integers(0, 63), max_size=3).map(tuple),
        num_samples=st.integers(1, 6),
        priority=st.integers(-1, 1),
    ),
    min_size=1,
    max_size=8,
)


@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(requests=TRAFFIC)
def test_whatever_arrives_nothing_is_compiled_and_all_is_served(scheduler, engine, requests):
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, *_, **__: compiled.append(event) if "backend_compile" in event else None
    )
    requests = [Request(**fields) for fields in requests]
    for request, samples in zip(requests, complete(scheduler, requests), strict=True):
        assert len(samples) == request.num_samples
        for sample in samples:
            limit = min(request.max_tokens, CONFIG.max_length - len(request.prompt))
            stops = [i for i, token in enumerate(sample.tokens.tolist()) if token in request.stop_tokens]
            if sample.finish_reason == "stop":
                assert stops == [len(sample.tokens) - 1]
            else:
                assert (sample.finish_reason, len(sample.tokens), stops) == ("length", limit, [])
    jax.monitoring.clear_event_listeners()
    assert engine.compilations == 0
    assert compiled == []


@pytest.mark.slow
def test_sixty_four_prompts_in_twenty_mixes_give_equal_tokens(params):
    engine = make_engine(slots=16, steps=4)
    engine.warm_up(Weights(0, params))
    prompts = random_prompts(64, 1, 30, seed=8)
    rng = np.random.default_rng(0)
    reference, differing, misses = None, 0, 0
    with Serving(engine, params) as scheduler:
        for _ in range(20):
            order = rng.permutation(64)
            handles = {}
            for i in order.tolist():
                handles[i] = scheduler.submit(greedy(prompts[i], 32))
                if rng.random() < 0.2:
                    time.sleep(0.002)
            tokens = np.stack([handles[i].result(60)[0].tokens for i in range(64)])
            if reference is None:
                reference = tokens
                misses = sum(near_misses(params, p, t) for p, t in zip(prompts, tokens, strict=True))
            differing += int((tokens != reference).sum())
    assert misses <= 2
    assert differing <= 0.001 * 20 * reference.size
    assert engine.compilations == 0

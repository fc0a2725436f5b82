"""Our engine as google-jetstream 0.2.2 calls it; greedy tokens are those of full forward passes."""

import inspect
import logging
import sys

import jax
import numpy as np
import pytest
from decode_harness import Serving, greedy, make_params, near_misses, random_prompts, warm_engine
from jetstream_harness import generate, make_jetstream, prefill

from seedx.inference.jetstream_engine import JetStreamEngine
from seedx.inference.jetstream_shims import engine_api, orchestrator, token_utils
from seedx.inference.jetstream_tokenizer import JetStreamTokenizer
from seedx.inference.requests import Request
from seedx.networks.model_source import open_model

pytestmark = pytest.mark.external


@pytest.fixture(scope="module")
def params():
    return make_params(0)


@pytest.fixture
def engine():
    return make_jetstream()


def test_it_is_a_jetstream_engine():
    assert issubclass(JetStreamEngine, engine_api.Engine)
    assert len(engine_api.Engine.__abstractmethods__) == 12
    assert not JetStreamEngine.__abstractmethods__
    for name in ("prefill", "insert", "generate", "load_params", "init_decode_state", "build_tokenizer"):
        theirs, ours = (
            inspect.signature(getattr(kind, name)).parameters for kind in (engine_api.Engine, JetStreamEngine)
        )
        assert [(p.name, p.kind) for p in ours.values()] == [(p.name, p.kind) for p in theirs.values()]
    assert JetStreamEngine.build_tokenizer is not engine_api.Engine.build_tokenizer


def test_the_shims_leave_nothing_behind():
    assert not {"seqio", "seqio.vocabularies", "tensorflow"} & sys.modules.keys()
    assert not any(
        handler.stream is sys.stdout for handler in logging.getLogger().handlers if hasattr(handler, "stream")
    )
    assert logging.getLogger().level == logging.WARNING


def test_results_are_one_array(engine):
    state = engine.insert(prefill(engine, [5, 6, 7]), engine.init_decode_state(), slot=2)
    for step in range(1, 4):
        state, results = engine.generate(engine.params, state)
        assert isinstance(results.data, jax.Array)
        assert results.data.dtype == np.int32
        slot = results.convert_to_numpy().get_result_at_slot(2)
        assert (slot.tokens.shape, slot.valid.tolist(), slot.lengths.tolist()) == ((1, 1), [[1]], [step])


def test_idle_slots_and_the_time_of_insertion_change_nothing(engine, params):
    first, second, third = random_prompts(3, 3, 20, seed=5)
    state = engine.insert(prefill(engine, first), engine.init_decode_state(), slot=1)
    alone = generate(engine, state, 12)[0][:, 1]
    assert near_misses(params, first, alone) == 0
    state = engine.insert(prefill(engine, second), engine.init_decode_state(), slot=0)
    generate(engine, state, 3)
    state = engine.insert(prefill(engine, third), state, slot=3)
    generate(engine, state, 2)
    state = engine.insert(prefill(engine, first), state, slot=1)
    np.testing.assert_array_equal(generate(engine, state, 12)[0][:, 1], alone)


def test_a_prefix_may_be_deleted_once_it_is_inserted(engine, params):
    for prompt in ([9], *random_prompts(1, 10, 10), *random_prompts(1, 40, 40)):  # no prefill, one chunk, several
        prefix = prefill(engine, prompt)
        state = engine.insert(prefix, engine.init_decode_state(), slot=0)
        orchestrator.delete_pytree(prefix)
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(prefix.rows))
        assert near_misses(params, prompt, generate(engine, state, 8)[0][:, 0]) == 0


def test_an_existing_prefix_goes_before(engine, params):
    head, tail = random_prompts(2, 12, 20, seed=6)
    prefix = engine.prefill(
        params=engine.params,
        existing_prefix=prefill(engine, head),
        padded_tokens=np.asarray(tail, np.int32),
        true_length=len(tail),
    )
    state = engine.insert(prefix, engine.init_decode_state(), slot=0)
    assert near_misses(params, [*head, *tail], generate(engine, state, 8)[0][:, 0]) == 0


def test_a_slot_that_is_full_is_not_valid(engine):
    state = engine.insert(prefill(engine, range(62)), engine.init_decode_state(), slot=0)
    valid = [engine.generate(engine.params, state)[1].convert_to_numpy().get_result_at_slot(0).valid for _ in range(4)]
    assert np.ravel(valid).tolist() == [1, 1, 0, 0]


def test_what_cannot_be_done_is_refused(engine):
    with pytest.raises(ValueError, match="true_length"):
        engine.prefill(params=engine.params, padded_tokens=np.zeros(32, np.int32), true_length=41)
    with pytest.raises(ValueError, match="64 tokens; 1 to 63"):
        prefill(engine, range(64))
    state = engine.init_decode_state()
    engine.init_decode_state()
    with pytest.raises(ValueError, match="void"):
        engine.generate(engine.params, state)


def test_samples_of_a_slot_are_drawn_apart_and_again_the_same():
    engine = make_jetstream(samples_per_slot=2, sampling=Request((0,), 1, seed=3))
    runs = []
    for _ in range(2):
        state = engine.insert(prefill(engine, [4, 5, 6]), engine.init_decode_state(), slot=1)
        runs.append(generate(engine, state, 20)[0][:, 2:])
    np.testing.assert_array_equal(*runs)
    assert (runs[0][:, 0] != runs[0][:, 1]).any()


def test_weights_are_swapped_between_steps(engine, params):
    """Each token has its version; keys and values stay, as when our engine goes on with new weights."""
    after = make_params(1)
    prompt = random_prompts(1, 10, 10)[0]
    state = engine.insert(prefill(engine, prompt), engine.init_decode_state(), slot=0)
    before, stamps = generate(engine, state, 5)
    assert (stamps == 0).all()
    with pytest.raises(ValueError, match="NaN"):
        engine.params.publish(1, jax.tree.map(lambda leaf: leaf * np.float32("nan"), after))
    engine.params.publish(1, after)
    later, stamps = generate(engine, state, 5)
    assert (stamps == 1).all()
    with Serving(warm_engine(), params) as scheduler:
        old = scheduler.submit(greedy(prompt, 10)).result(60)[0].tokens
    np.testing.assert_array_equal(before[:, 0], old[:5])
    assert (later[:, 0] != old[5:]).any()
    state = engine.insert(prefill(engine, prompt), state, slot=1)
    assert near_misses(after, prompt, generate(engine, state, 8)[0][:, 1]) == 0


def test_bytes_of_a_character_are_joined_by_jetstream():
    tokenizer = JetStreamTokenizer(open_model("tiny").tokenizer)
    tokens, length = tokenizer.encode("né€", is_bos=False, jax_padding=False, max_prefill_length=16)
    assert tokens.shape == (16,)
    pieces = [tokenizer.decode([token]) for token in tokens[:length].tolist()]
    assert pieces[:3] == ["n", "<0xC3>", "<0xA9>"]
    assert token_utils.text_tokens_to_str(pieces) == "né€"

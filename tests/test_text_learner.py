"""The learner of an LLM run: what it counts and publishes, what it keeps of a bad batch, and that it compiles once."""

import dataclasses
from functools import partial

import jax
import numpy as np
import pytest
from bits import assert_bit_equal
from decode_harness import CONFIG
from hypothesis import given
from hypothesis import strategies as st
from text_fakes import Bigram, random_items, spoilt_items

from seedx import sharding
from seedx.agents.grpo import grpo_loss
from seedx.grpo_config import GrpoConfig, TextLearnerConfig
from seedx.learner.learner import NonFiniteError
from seedx.learner.packing import pack
from seedx.learner.text_batch import pack_batch, sequences_of
from seedx.learner.text_learner import Shapes, TextLearner, means, shapes_of
from seedx.learner.trainable import Trainable
from seedx.metrics import Metrics
from seedx.replay.items import choose

pytestmark = pytest.mark.slow  # many compilations, or whole pipelines

ITEMS = random_items(0, num_groups=6, vocab=64)  # 24 sequences of up to 12 tokens
TOKENS = 16  # L


@given(
    groups=st.integers(1, 12),
    group_size=st.integers(1, 5),
    parts=st.integers(1, 5),
    row_tokens=st.integers(0, 250),
    most=st.tuples(st.integers(1, 40), st.integers(1, 20)),  # of a prompt, of a completion
    row_groups=st.sampled_from([1, 2, 8]),
    seed=st.integers(0, 100),
)
def test_any_batch_fits_the_parts(groups, group_size, parts, row_tokens, most, row_groups, seed):
    config = TextLearnerConfig(batch_size=groups, microbatches=parts, row_tokens=row_tokens)
    shapes = shapes_of(config, group_size, *most, row_groups)
    assert shapes.rows % row_groups == 0
    assert shapes.row_tokens >= max(row_tokens, sum(most))
    rng = np.random.default_rng(seed)
    least = rng.integers(1, np.array(most) + 1)  # from any lengths to all as long as they may be
    prompts = rng.integers(least[0], most[0] + 1, groups)
    lengths = np.repeat(prompts, group_size) + rng.integers(least[1], most[1] + 1, groups * group_size)
    packing = pack(lengths, shapes.row_tokens, shapes.rows, prompts=prompts)
    assert packing.num_rows <= parts * shapes.rows


def test_shapes_worked_by_hand():
    """Rows of two prompts of 64, which hold four completions of 16, or what was asked for."""
    config = TextLearnerConfig(batch_size=4, microbatches=2)
    assert shapes_of(config, 8, 64, 16, 1) == Shapes(16, 128, 4)
    assert shapes_of(config, 8, 64, 16, 8) == Shapes(16, 128, 8)
    assert shapes_of(config, 2, 64, 16, 1) == Shapes(16, 96, 2)  # no group is longer
    assert shapes_of(config, 8, 16, 64, 1) == Shapes(64, 80, 16)  # one text, whose prompt is short
    assert shapes_of(dataclasses.replace(config, row_tokens=200), 8, 64, 16, 1) == Shapes(16, 208, 2)
    assert shapes_of(dataclasses.replace(config, row_tokens=400), 8, 64, 16, 1) == Shapes(16, 400, 1)


def test_figures_are_means_over_tokens():
    sums = {"tokens": 4.0, "loss": 0.5, "ratio": 6.0, "ratio_max": 3.0, "gap": 1.0, "gap_max": 0.75, "entropy": 8.0}
    sums |= {"engine_gap_max": 0.5}
    sums |= {"weight": 3.0, "weight_squared": 2.5, "clipped_low": 1.0, "clipped_high": 2.0, "clipped_dual": 0.0}
    assert means(sums) == {
        "tokens": 4.0,
        "loss": 0.5,
        "ratio": 1.5,
        "ratio_max": 3.0,
        "gap": 0.25,
        "gap_max": 0.75,
        "engine_gap_max": 0.5,
        "entropy": 2.0,
        "weight": 0.75,
        "clipped_low": 0.25,
        "clipped_high": 0.5,
        "clipped_dual": 0.0,
        "clip_fraction": 0.75,
        "effective_tokens": 3.6,  # (sum of weights)^2 / sum of squares
    }
    nothing = means(dict.fromkeys(sums, 0.0))
    assert set(nothing.values()) == {0.0}


BIGRAM = Bigram(CONFIG)
TABLE = np.random.default_rng(2).normal(size=(64, 64)).astype(np.float32)


class Bench:
    """A learner of a bigram model, and what it published."""

    def __init__(self, run_dir, settings=None, devices=1, **changes):
        self.settings = settings or GrpoConfig(group_size=4)
        config = TextLearnerConfig(**{"batch_size": 6, "microbatches": 2, "learning_rate": 0.01, **changes})
        mesh = sharding.serve_mesh(data=devices)
        params = jax.device_put({"table": TABLE}, sharding.replicated(mesh))
        self.published, self.metrics = [], Metrics()
        self.learner = TextLearner(
            BIGRAM,
            partial(grpo_loss, BIGRAM, self.settings),
            Trainable(CONFIG, mesh),
            self.settings,
            config,
            mesh,
            params,
            shapes_of(config, 4, 4, 8, devices),
            lambda version, params: self.published.append((version, params)),
            self.metrics,
            run_dir,
        )
        self.learner.state = self.learner.begin(params)._replace(updates=7, env_steps=100, tokens=1000, position=3)


def cache_sizes(learner):
    """Of those that could compile again; the others take one shape alone."""
    programs = (*learner._programs, learner._before)
    return [program._cache_size() for program in programs if hasattr(program, "_cache_size")]


@pytest.mark.parametrize(("old", "devices"), [("behaviour", 1), ("recomputed", 1), ("recomputed", 8)])
def test_a_learner_counts_and_publishes_and_never_compiles_again(tmp_path, old, devices):
    importance = "truncate" if old == "recomputed" else "none"
    bench = Bench(tmp_path, GrpoConfig(group_size=4, old=old, importance=importance), devices)
    learner = bench.learner
    needs = learner.compile()
    table_bytes = TABLE.nbytes  # on each device
    assert (needs.weights, needs.frozen, needs.gradients) == (table_bytes, 0, 2 * table_bytes)
    assert needs.optimizer == 2 * table_bytes + 4  # both moments, and a counter
    assert needs.temporary > 0
    assert learner.state.updates == 7
    assert bench.published == []
    first, sizes = learner.state.params, cache_sizes(learner)
    completions = tokens = 0
    for i in range(1, 4):
        items = random_items(i, num_groups=6 if i < 3 else 2, vocab=64)  # the last takes fewer parts
        items.state["position"] += 10 * i
        learner.step(items)
        completions += items.state["reward"].size
        tokens += int(items.rows["sampled"].sum())
        state = learner.state
        assert (state.updates, state.env_steps, state.tokens) == (7 + i, 100 + completions, 1000 + tokens)
        assert state.position == 10 * i + (6 if i < 3 else 2)
        assert bench.published[-1][0] == 7 + i
        assert bench.published[-1][1] is state.params
        assert len(state.params["table"].devices()) == devices
    assert cache_sizes(learner) == sizes
    np.testing.assert_array_equal(first["table"], TABLE)  # not donated
    row = bench.metrics.snapshot()
    assert row["updates"] == 3
    assert row["env_steps"] == completions
    assert row["completion_tokens"] == tokens
    assert row["learner/lag_updates_max"] == 9  # all tokens are of version 0
    assert learner.lag_sum == 7 + 8 + 9
    assert row["learner/grad_norm"] > 0
    if old == "recomputed":  # by another program of the same function
        assert row["learner/ratio_max"] == pytest.approx(1.0, abs=1e-5)
        assert row["learner/clip_fraction"] == 0.0
        assert row["learner/gap"] > 0.1
        assert row["learner/weight"] < 2.0


def test_the_rate_rises_over_the_warmup(tmp_path):
    """From its first update on Adam goes as far in each direction as the rate says."""
    moved = []
    for warmup in (0, 3):
        bench = Bench(tmp_path, learning_rate=0.1, warmup_updates=warmup)
        bench.learner.state = bench.learner.state._replace(updates=0)
        rates = []
        for i in range(5):
            bench.learner.step(ITEMS)
            rates.append(bench.metrics.snapshot()["learner/learning_rate"])
            if i == 0:
                moved.append(np.asarray(bench.learner.state.params["table"]) - TABLE)
        want = [0.1] * 5 if warmup == 0 else [0.025, 0.05, 0.075, 0.1, 0.1]
        np.testing.assert_allclose(rates, want)
    assert np.abs(moved[0]).max() == pytest.approx(0.1, rel=1e-3)
    np.testing.assert_allclose(moved[1], moved[0] / 4, atol=1e-6)


@pytest.mark.parametrize("old", ["behaviour", "recomputed"])
def test_a_batch_that_is_not_finite_is_saved_and_changes_nothing(tmp_path, old):
    bench = Bench(tmp_path, GrpoConfig(group_size=4, old=old, importance="none" if old == "behaviour" else "truncate"))
    learner = bench.learner
    learner.step(random_items(3, num_groups=6, vocab=64))
    before = jax.tree.map(np.array, learner.state)
    bad = spoilt_items(4, num_groups=6, vocab=64)
    with pytest.raises(NonFiniteError, match=r"update 9 is not finite.*learning-rate") as failure:
        learner.step(bad)
    (path,) = tmp_path.glob("*.npz")
    assert str(path) in str(failure.value)
    batch, _ = pack_batch(
        sequences_of(bad, bench.settings), bench.settings, version=8, max_tokens=8, row_tokens=TOKENS, rows_multiple=12
    )
    if old == "recomputed":  # as the loss had them
        batch = batch._replace(**learner._before(learner.state.params, None, batch))
    with np.load(path) as saved:
        assert set(saved.files) == set(batch._fields)
        for name in batch._fields:
            np.testing.assert_array_equal(saved[name], getattr(batch, name), err_msg=name)
    assert [version for version, _ in bench.published] == [8]
    for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(learner.state), strict=True):
        np.testing.assert_array_equal(a, b)
    learner.step(choose(ITEMS, slice(0, 3)))  # and it could go on
    assert [version for version, _ in bench.published] == [8, 9]
    assert np.isfinite(learner.state.params["table"]).all()


def test_two_learners_are_alike_bit_for_bit(tmp_path):
    results = []
    for _ in range(2):
        learner = Bench(tmp_path).learner
        for seed in range(2):
            learner.step(random_items(seed, num_groups=6, vocab=64))
        results.append(jax.tree.map(np.array, (learner.state.params, learner.state.opt_state)))
    assert_bit_equal(*results)

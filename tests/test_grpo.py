"""The loss of an LLM run against a transcription, sequence by sequence; what has no gradient; and the decode engine."""

import dataclasses
import functools
from typing import get_args, get_type_hints

import jax
import numpy as np
import pytest
from decode_harness import CONFIG, Serving, full_logits, logprob_bound, make_params, random_prompts, warm_engine
from text_fakes import Given, parts_of, random_items, take

from seedx.agents.grpo import grpo_loss
from seedx.envs.text.group import Group, Sample, to_item
from seedx.grpo_config import GrpoConfig
from seedx.inference.engine_config import EngineConfig
from seedx.inference.load_engine import load_engine
from seedx.inference.requests import Request
from seedx.learner.text_batch import pack_batch, sequences_of
from seedx.learner.token_logprobs import Model
from seedx.replay.items import join
from seedx.weights import Weights

pytestmark = pytest.mark.slow  # many compilations, or whole pipelines

MAX_TOKENS, STEP = 8, 1e-6
SHAPES = {"version": 0, "max_tokens": MAX_TOKENS, "row_tokens": 24, "rows_multiple": 1}
CHOICES = {name: get_args(hint) for name, hint in get_type_hints(GrpoConfig).items() if get_args(hint)}
CHOICES["advantage"] = tuple(name for name in CHOICES["advantage"] if name != "gae")  # of tokens: test_value_head.py


def config_of(**changes):
    return GrpoConfig(**{"group_size": 4, "dual_clip": 1.5, "clip_high": 0.28, "importance_bound": 1.3, **changes})


# ---- the transcription, in float64


def advantages(config, rewards, lengths):
    """Of each completion; rewards `[P, G]`, NaN where there is none; lengths `[P, G]`, tokens that count."""
    out = np.zeros(rewards.shape)
    everything = [r for r in rewards.ravel() if not np.isnan(r)]
    for p, g in np.ndindex(*rewards.shape):
        group = [r for r in rewards[p] if not np.isnan(r)]
        if np.isnan(rewards[p, g]) or len(group) == 1:
            continue
        centred = rewards[p, g] - np.mean(group)
        match config.advantage:
            case "group_std":
                out[p, g] = centred / (np.std(group, ddof=1) + 1e-4)
            case "batch_std":
                out[p, g] = centred / (np.std(everything, ddof=1) + 1e-4)
            case "leave_one_out":
                out[p, g] = rewards[p, g] - (np.sum(group) - rewards[p, g]) / (len(group) - 1)
            case "group_mean" | "whitened":
                out[p, g] = centred
    if config.advantage == "whitened":
        tokens = [out[place] for place in np.ndindex(*rewards.shape) for _ in range(lengths[place])]
        out = (out - np.mean(tokens)) / np.sqrt(np.var(tokens, ddof=1) + 1e-8)
    return out.ravel()


def kl(kind, lp, stopped, ref, old):
    """The term of one token: its value at lp = stopped, its slope in lp."""
    d, at = lp - ref, stopped - ref
    match kind:
        case "k1":
            return d * np.exp(lp - old)
        case "k2":
            return d**2 / 2 * np.exp(stopped - old)
        case "k3":
            return (np.exp(-d) - 1 + d) * np.exp(lp - old)
        case "k3+":
            return (np.exp(-at) - 1 + at + d**2 / 2 - at**2 / 2) * np.exp(stopped - old)


def token_loss(config, lp, stopped, old, behaviour, ref, entropy, advantage, mean_ratio):
    """The loss of one token, and what it adds to metrics."""
    low, high = 1 - config.clip_low, 1 + config.clip_high
    ratio, held = np.exp(lp - old), np.exp(stopped - old)
    if config.loss == "gspo":
        ratio, held = mean_ratio * np.exp(lp - stopped), mean_ratio
    if config.loss == "cispo":
        loss = -min(held, high) * advantage * lp
    else:
        loss = max(-advantage * ratio, -advantage * np.clip(ratio, low, high))
        if advantage < 0 and config.dual_clip:
            loss = min(loss, -advantage * config.dual_clip)
    weight = np.exp(old - behaviour)
    bounded = config.importance != "none" and weight > config.importance_bound
    match config.importance:
        case "none":
            weight = 1.0
        case "truncate":
            weight = min(weight, config.importance_bound)
        case "mask":
            weight = 0.0 if bounded else weight
    loss = weight * loss - config.entropy_cost * entropy
    if config.kl_cost:
        loss += config.kl_cost * kl(config.kl, lp, stopped, ref, behaviour)
    clips, away = config.loss != "cispo", stopped - ref
    return loss, {
        **({"kl_reference": np.exp(-away) - 1 + away} if config.kl_cost else {}),
        "tokens": 1,
        "ratio": held,
        "weight": weight,
        "weight_squared": weight**2,
        "weight_bounded": bounded,
        "gap": abs(old - behaviour),
        "entropy": entropy,
        "kl_k1": old - stopped,
        "kl_k3": np.exp(stopped - old) - 1 - (stopped - old),
        "clipped_low": clips and advantage < 0 and held < low,
        "clipped_high": held > high and (advantage > 0 or not clips),
        "clipped_dual": clips and advantage < 0 and bool(config.dual_clip) and held > config.dual_clip,
    }


def transcription(config, items, values, shift):
    """Weighted loss of each token, and sums of metrics; `shift` is added to log pi where that has a gradient."""
    sequences = sequences_of(items, config)  # only for where sequences begin and end
    rewards = np.float64(items.state["reward"])
    if config.mask_truncated:
        rewards = np.where(items.state["truncated"], np.nan, rewards)
    sampled = parts_of(sequences, sequences.sampled)
    counted = np.array([0 if np.isnan(r) else s.sum() for r, s in zip(rewards.ravel(), sampled, strict=True)])
    wanted = advantages(config, rewards, counted.reshape(rewards.shape))
    filled = np.count_nonzero(counted)
    split = {name: parts_of(sequences, np.float64(leaf)) for name, leaf in values.items()}
    fresh = parts_of(sequences, sequences.versions == SHAPES["version"])
    losses, sums, largest = [], {}, {"ratio_max": 0.0, "gap_max": 0.0, "engine_gap_max": 0.0}
    for i, scored in enumerate(counted):
        own = {name: leaf[i] for name, leaf in split.items()}
        places = np.flatnonzero(sampled[i]) if scored else []
        logs = own["lp"] - own["old"]
        mean_ratio = np.exp(np.mean(logs[places])) if scored else 1.0
        divisor = {
            "token-mean": counted.sum(),
            "seq-mean-token-mean": filled * scored,
            "seq-mean-token-sum": filled,
            "fixed-length": filled * MAX_TOKENS,
            "fixed-length-sum": MAX_TOKENS,
        }[config.aggregation]
        of_tokens = np.zeros(len(logs))
        for t in places:
            token = {name: leaf[t] for name, leaf in own.items()}
            loss, metrics = token_loss(
                config,
                token["lp"] + shift,
                token["lp"],
                *(token[name] for name in ("old", "behaviour", "ref", "entropy")),
                wanted[i],
                mean_ratio,
            )
            of_tokens[t] = loss / divisor
            sums = {name: sums.get(name, 0.0) + value for name, value in metrics.items()}
            largest["ratio_max"] = max(largest["ratio_max"], metrics["ratio"])
            largest["gap_max"] = max(largest["gap_max"], metrics["gap"])
            engine_gap = abs(token["lp"] - token["behaviour"]) if fresh[i][t] else 0.0
            largest["engine_gap_max"] = max(largest["engine_gap_max"], engine_gap)
        losses.append(of_tokens)
    return np.concatenate(losses), sums | largest


# ---- the loss itself, of given log-probabilities


@functools.cache
def program(config):
    """Loss, sums, and the gradient in log-probabilities and entropies."""
    loss = functools.partial(grpo_loss, Given(CONFIG), config)
    return jax.jit(jax.value_and_grad(loss, has_aux=True))


def compiled(config):
    """What only advantages and weights depend on makes no program of its own."""
    return program(dataclasses.replace(config, advantage="group_std", aggregation="token-mean", mask_truncated=False))


def values_of(config, sequences, seed):
    """Of each token: of the policy, of the reference and, where it is recomputed, old."""
    rng = np.random.default_rng(seed)
    behaviour = sequences.logprobs
    old = behaviour if config.old == "behaviour" else behaviour + rng.normal(0, 0.3, len(behaviour))
    lp, ref = old + rng.normal(0, 0.3, len(old)), old + rng.normal(0, 0.5, len(old))
    entropy = rng.uniform(1, 3, len(old))
    named = {"lp": lp, "old": old, "behaviour": behaviour, "ref": ref, "entropy": entropy}
    return {name: leaf.astype(np.float32) for name, leaf in named.items()}


def run(config, items, values, garbage=None):
    """Loss, sums and gradients of tokens; `garbage` goes wherever nothing is to be trained on."""
    batch, packing = pack_batch(sequences_of(items, config), config, **SHAPES)

    def rows(name):
        out = np.zeros(batch.tokens.shape, np.float32)
        out.ravel()[packing.places] = values[name]
        return out if garbage is None else np.where(batch.trained, out, np.float32(garbage))

    batch = batch._replace(old=rows("old"), behaviour=rows("behaviour"))
    if garbage is not None:
        spoilt = {name: np.where(batch.trained, getattr(batch, name), garbage) for name in ("advantage", "weight")}
        batch = batch._replace(**{name: leaf.astype(np.float32) for name, leaf in spoilt.items()})
    params, reference = (rows("lp"), rows("entropy")), (rows("ref"), rows("entropy"))
    (loss, sums), gradients = compiled(config)(params, reference if config.kl_cost else None, batch)
    elsewhere = [np.asarray(gradient)[~batch.trained] for gradient in gradients]
    return loss, sums, [take(packing, np.asarray(gradient)) for gradient in gradients], elsewhere


def combinations():
    """Every loss with every kind of importance weight; the other settings take turns."""
    turns = {name: CHOICES[name] for name in ("advantage", "aggregation")}
    turns["kl"] = (None, *CHOICES["kl"])
    for i, (loss, importance) in enumerate(np.ndindex(len(CHOICES["loss"]), 4)):
        kind = turns["kl"][2 * i % 5]
        yield config_of(
            loss=CHOICES["loss"][loss],
            old="behaviour" if importance == 3 else "recomputed",
            importance=CHOICES["importance"][importance % 3],
            advantage=turns["advantage"][i % 5],
            aggregation=turns["aggregation"][(i + 2 * (i // 5)) % 5],
            mask_truncated=i % 2 == 1,
            **({"kl_cost": 0.1, "kl": kind} if kind else {}),
            **({"entropy_cost": 0.05} if i % 3 == 0 else {}),
            **({"dual_clip": 0.0} if i % 4 == 2 else {}),
        )


def name_of(config):
    return "-".join([config.loss, config.old, config.importance, config.kl if config.kl_cost else "none"])


COMBINATIONS = list(combinations())


def test_the_combinations_have_every_choice():
    for name, choices in CHOICES.items():
        assert {getattr(config, name) for config in COMBINATIONS} == set(choices)
    assert {config.kl for config in COMBINATIONS if config.kl_cost} == set(CHOICES["kl"])


@pytest.mark.parametrize("config", COMBINATIONS, ids=name_of)
def test_loss_gradient_and_sums_are_the_transcription(config):
    for seed in range(4):
        items = random_items(seed)
        values = values_of(config, sequences_of(items, config), seed)
        loss, sums, (gradient, entropy_gradient), elsewhere = run(config, items, values)
        want, want_sums = transcription(config, items, values, 0.0)
        up, down = (transcription(config, items, values, shift)[0] for shift in (STEP, -STEP))
        np.testing.assert_allclose(loss, want.sum(), rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(gradient, (up - down) / (2 * STEP), rtol=1e-3, atol=1e-6)
        assert sums.keys() == want_sums.keys()
        for name, value in want_sums.items():
            np.testing.assert_allclose(sums[name], value, rtol=1e-4, atol=1e-5, err_msg=name)
        batch, packing = pack_batch(sequences_of(items, config), config, **SHAPES)
        np.testing.assert_allclose(entropy_gradient, -config.entropy_cost * take(packing, batch.weight), rtol=1e-6)
        for leaf in elsewhere:
            np.testing.assert_array_equal(leaf, 0.0)


@pytest.mark.parametrize("config", [c for c in COMBINATIONS if c.entropy_cost or c.kl_cost], ids=name_of)
@pytest.mark.parametrize("garbage", [np.nan, -np.inf])
def test_prompts_environment_unscored_tokens_and_padding_have_no_part_in_it(config, garbage):
    items = random_items(5)
    sequences = sequences_of(items, config)
    assert (sequences.counted == 0).any()
    values = values_of(config, sequences, 5)
    loss, sums, gradients, _ = run(config, items, values)
    spoilt_loss, spoilt_sums, spoilt_gradients, elsewhere = run(config, items, values, garbage)
    assert float(loss) == float(spoilt_loss)
    assert {name: float(value) for name, value in sums.items()} == {
        name: float(value) for name, value in spoilt_sums.items()
    }
    for a, b in zip(gradients, spoilt_gradients, strict=True):
        np.testing.assert_array_equal(a, b)
    for leaf in elsewhere:
        np.testing.assert_array_equal(leaf, 0.0)


@pytest.mark.parametrize("config", [COMBINATIONS[0], COMBINATIONS[5], COMBINATIONS[10]], ids=name_of)
def test_nothing_to_train_on_is_no_loss(config):
    items = random_items(6)
    items.state["reward"][:] = np.nan
    loss, sums, gradients, _ = run(config, items, values_of(config, sequences_of(items, config), 6))
    assert float(loss) == 0.0
    assert not any(float(value) for value in sums.values())
    for gradient in gradients:
        np.testing.assert_array_equal(gradient, 0.0)


# ---- with a model


SMALL = dataclasses.replace(CONFIG, num_layers=1, width=16, num_heads=2, num_kv_heads=1, ffn_width=16)


@functools.cache
def on_policy(loss):
    """Loss, sums and gradient where old are the log-probabilities of this very program."""
    config = config_of(loss=loss, kl_cost=0.1)
    model = Model(SMALL)

    def total(params, reference, batch):
        logprobs, _ = model.logprobs(params, batch)
        return grpo_loss(model, config, params, reference, batch._replace(old=jax.lax.stop_gradient(logprobs)))

    return config, jax.jit(jax.value_and_grad(total, has_aux=True))


@pytest.mark.parametrize("loss", CHOICES["loss"])
def test_a_program_that_compares_with_itself_has_ratios_of_1(loss):
    config, program = on_policy(loss)
    batch, _ = pack_batch(sequences_of(random_items(7), config), config, **SHAPES)
    params = make_params(0, SMALL)
    (_, sums), _ = program(params, params, batch)
    assert float(sums["tokens"]) == batch.trained.sum() > 0
    assert float(sums["ratio"]) == float(sums["tokens"])
    assert float(sums["ratio_max"]) == 1.0
    for name in ("clipped_low", "clipped_high", "clipped_dual", "kl_k1", "kl_k3", "kl_reference"):
        assert float(sums[name]) == 0.0, name


@pytest.mark.parametrize("loss", CHOICES["loss"])
def test_what_is_not_trained_on_has_no_part_in_the_gradient_of_a_model(loss):
    """Bit for bit: garbage beside the tokens, other tokens in the padding, other completions without a score."""
    config, program = on_policy(loss)
    items = random_items(8)
    batch, _ = pack_batch(sequences_of(items, config), config, **SHAPES)
    assert (batch.segments == 0).any()
    spoilt = batch._replace(
        tokens=np.where(batch.segments > 0, batch.tokens, 9).astype(np.int32),
        **{
            name: np.where(batch.trained, getattr(batch, name), np.float32(np.nan))
            for name in ("advantage", "behaviour", "old", "weight")
        },
    )
    completions = batch.segments != batch.parents
    unscored = completions & ~np.isin(_row_and_segment(batch), np.unique(_row_and_segment(batch)[batch.trained]))
    assert unscored.any()
    spoilt.tokens[unscored] += 1
    want, got = (program(make_params(0, SMALL), make_params(1, SMALL), which) for which in (batch, spoilt))
    for a, b in zip(jax.tree.leaves(want), jax.tree.leaves(got), strict=True):
        np.testing.assert_array_equal(a, b)
    assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(got[1]))


def _row_and_segment(batch):
    return np.arange(len(batch.segments))[:, None] * 1000 + batch.segments


def drawn(scheduler, prompts, temperature, row_tokens):
    """Four completions of each prompt as the engine draws them; sequences, and packed rows."""
    groups = []
    for i, prompt in enumerate(prompts):
        request = Request(tuple(prompt), MAX_TOKENS, temperature=temperature, seed=i, num_samples=4)
        samples = [
            Sample(
                np.asarray(found.tokens, np.int32),
                np.ones(len(found.tokens), bool),
                np.asarray(found.logprobs, np.float32),
                np.zeros(len(found.tokens), np.int32),
                found.finish_reason,
                "",
                {},
                float(j),
            )
            for j, found in enumerate(scheduler.submit(request).result(600))
        ]
        groups.append(to_item(Group(i, np.array(prompt, np.int32), samples)))
    config = GrpoConfig(group_size=4)
    sequences = sequences_of(join(groups), config)
    options = {"version": 0, "max_tokens": MAX_TOKENS, "row_tokens": row_tokens, "rows_multiple": 1}
    return sequences, pack_batch(sequences, config, **options)[0]


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_the_engine_draws_with_the_learners_probabilities(temperature):
    """Prefill and cached decode in slots against packed rows, by design decision 15."""
    params = jax.tree.map(lambda leaf: leaf / 2, make_params(0))  # less sharp: rounding stays below the bound
    with Serving(warm_engine(), params) as scheduler:
        sequences, batch = drawn(scheduler, random_prompts(3, 1, 20, seed=9), temperature, row_tokens=48)
    logprobs, _ = jax.jit(Model(CONFIG, temperature).logprobs)(params, batch)
    gap = np.abs(np.asarray(logprobs) - batch.behaviour)[batch.trained]
    assert len(gap) == 3 * 4 * MAX_TOKENS
    logits = full_logits(params, [part.tolist() for part in parts_of(sequences, sequences.tokens)])
    assert gap.max() <= logprob_bound(logits) / min(temperature, 1.0)
    on_rows = (np.asarray(logprobs), np.zeros_like(batch.old))
    _, sums = jax.jit(functools.partial(grpo_loss, Given(CONFIG), GrpoConfig(group_size=4)))(on_rows, None, batch)
    np.testing.assert_allclose(sums["gap_max"], 0.0)  # old is behaviour
    np.testing.assert_allclose(sums["ratio_max"], np.exp(gap.max()), rtol=1e-4)


@pytest.mark.external
def test_the_engine_draws_with_the_learners_probabilities_from_smollm2():
    """The same with real weights, within the 2e-4 of design decision 15."""
    model, engine = load_engine(EngineConfig("smollm2", max_concurrent=8, context=64), 4, print)
    engine.warm_up(Weights(0, model.params))
    texts = ("The capital of France is", "def add(a, b):", "2 + 2 =", "Once upon a time")
    with Serving(engine, model.params) as scheduler:
        _, batch = drawn(scheduler, [model.tokenizer.encode(text) for text in texts], 1.0, row_tokens=64)
    logprobs, _ = jax.jit(Model(model.config).logprobs)(model.params, batch)
    gap = np.abs(np.asarray(logprobs) - batch.behaviour)[batch.trained]
    assert 0 < gap.max() <= 2e-4
    assert len(gap) > 4 * 4

"""Scores on prompts that are not trained on: the statistics, and how they are come by."""

import threading

import numpy as np
import pytest
from rollout_harness import HandPool, S, Words, generating, length

from seedx.envs.text import held_out as held_out_module
from seedx.envs.text.generation import seed_of
from seedx.envs.text.held_out import HeldOut, bootstrap, held_out, summary_of

NAN = float("nan")


def found(rewards):
    return HeldOut([], [], np.array(rewards, np.float64))


def test_the_mean_is_over_prompts_of_what_could_be_scored():
    result = found([[1.0, 0.0], [NAN, 1.0], [NAN, NAN], [0.0, 0.0]])
    np.testing.assert_equal(result.by_prompt, [0.5, 1.0, NAN, 0.0])
    assert result.mean == 0.5
    assert result.solved == 2 / 5  # of the completions


def test_only_rewards_of_at_least_1_are_solved():
    assert found([[0.999, 1.0, 2.0, -1.0]]).solved == 0.5


def test_what_could_not_be_scored_at_all_has_no_figures():
    for rewards in (np.full((3, 2), NAN), np.zeros((0, 2))):
        result = found(rewards)
        assert np.isnan([result.mean, *result.interval, result.solved]).all()


def test_the_interval_is_that_of_the_normal_approximation_and_the_same_each_time():
    rng = np.random.default_rng(3)
    rewards = (rng.random((400, 1)) < 0.3).astype(np.float64)
    result = found(rewards)
    low, high = result.interval
    half = 1.96 * np.sqrt(result.mean * (1 - result.mean) / 400)
    assert result.mean - low == pytest.approx(half, rel=0.15)
    assert high - result.mean == pytest.approx(half, rel=0.15)
    assert found(rewards).interval == (low, high)
    assert found(np.full((5, 3), 0.25)).interval == (0.25, 0.25)


def test_samples_of_one_prompt_are_no_further_evidence():
    """The interval is over prompts: the same completion a hundred times tells no more than once."""
    once = found([[0.0], [1.0], [1.0], [0.0], [1.0]])
    often = found([[reward] * 100 for (reward,) in once.rewards.tolist()])
    assert once.interval == often.interval


def test_the_gain_is_paired_by_prompt():
    """Prompts that differ much hide a gain from two intervals, not from the interval of the differences."""
    rng = np.random.default_rng(5)
    before = rng.random(200)
    after = before + 0.02 + 0.01 * rng.standard_normal(200)
    found_before, found_after = (bootstrap(scores) for scores in (before, after))
    assert found_before.high > found_after.low
    said = summary_of(before, after)
    gain, (low, high) = said["held_out_gain"], said["held_out_gain_interval"]
    assert gain == pytest.approx(said["held_out_reward_after"] - said["held_out_reward_before"])
    half = 1.96 * (after - before).std() / np.sqrt(200)
    assert (low, high) == pytest.approx((gain - half, gain + half), rel=0.05)
    assert low > 0


def test_prompts_without_a_score_on_either_side_are_not_in_the_gain():
    said = summary_of(np.array([0.0, NAN, 0.5, 0.25]), np.array([0.5, 1.0, NAN, 0.25]))
    assert said["held_out_gain"] == 0.25
    assert said["held_out_reward_before"] == 0.25


@pytest.mark.parametrize(
    ("before", "after", "known"),
    [([], [], set()), ([0.5], [], {"before"}), ([], [0.5], {"after"}), ([NAN, 1.0], [1.0, NAN], {"before", "after"})],
)
def test_there_is_no_gain_without_both_scores(before, after, known):
    said = summary_of(np.array(before), np.array(after))
    assert said["held_out_gain"] is said["held_out_gain_interval"] is None
    assert {when for when in ("before", "after") if said[f"held_out_reward_{when}"] is not None} == known


TEXTS = ["AB", "CCCCCCCCC", "D", "EFG", "H"]


def evaluate(at, stop=lambda: False, num_samples=2, seed=1, progress=lambda _: None):
    def encode(prompt):
        return tuple(ord(letter) - 64 for letter in prompt.text) if len(prompt.text) < 9 else None

    prompts = Words(*TEXTS).prompts("test")
    return held_out(
        at.generation, at.scheduler, prompts, encode, num_samples=num_samples, seed=seed, stop=stop, progress=progress
    )


def test_all_prompts_that_are_not_too_long_are_asked_once_with_seeds_of_their_own(monkeypatch):
    told = []
    with generating(temperature=50.0) as at:
        whole = evaluate(at, progress=told.append)
        monkeypatch.setattr(held_out_module, "AT_A_TIME", 3)  # one prompt after the other
        parts = evaluate(at, progress=told.append)
        many = evaluate(at, num_samples=7)
        other = evaluate(at, seed=2)
    assert told == [f"held-out: {n} of 4 prompts are done" for n in (1, 2, 3)]  # nothing of the first: it is one piece
    assert [prompt.text for prompt in whole.prompts] == ["AB", "D", "EFG", "H"]
    assert [group.prompt.tolist() for group in whole.groups] == [[1, 2], [4], [5, 6, 7], [8]]
    np.testing.assert_array_equal(
        whole.rewards, [[sample.reward for sample in group.samples] for group in whole.groups]
    )
    texts = [[sample.text for sample in group.samples] for group in whole.groups]
    assert [[sample.text for sample in group.samples] for group in parts.groups] == texts
    assert [[sample.text for sample in group.samples] for group in other.groups] != texts
    assert many.rewards.shape == (4, 7)
    seeds = {request.seed for request in at.requests[:4]}
    assert len(seeds) == 4
    assert not seeds & {seed_of(1, position) for position in range(100)}  # none of training


def test_what_has_no_score_is_nan():
    with generating(pool=HandPool(lambda prompt, text: None if prompt.text == "D" else length(prompt, text))) as at:
        result = evaluate(at)
    np.testing.assert_array_equal(np.isnan(result.rewards), [[False] * 2, [True] * 2, [False] * 2, [False] * 2])
    np.testing.assert_array_equal(np.isnan(result.by_prompt), [False, True, False, False])


def test_an_evaluation_that_is_stopped_gives_nothing():
    stop = threading.Event()
    with generating(start=False) as at:  # an engine that never answers
        thread = threading.Timer(0.0, stop.set)
        thread.start()
        assert evaluate(at, stop.is_set) is None
        thread.join(S)


def test_without_prompts_there_are_no_groups():
    with generating() as at:
        result = held_out(
            at.generation, at.scheduler, [], lambda _: None, num_samples=3, seed=0, stop=lambda: False, progress=print
        )
    assert result.rewards.shape == (0, 3)

"""Which prompts are passed over: by closed forms, a slow transcription, and whatever the timing or a kill."""

import json
from collections import Counter, deque

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seedx.checks import ConfigError
from seedx.envs.text.curriculum import MOST_PROMPTS, Curriculum, check_num_prompts, drawn, probability
from seedx.envs.text.prompts import PromptSource
from seedx.envs.text.task import Prompt
from seedx.grpo_config import CurriculumConfig

SEED = 5


def source_of(count):
    return PromptSource([Prompt(str(i)) for i in range(count)], SEED)


def curriculum_of(source, floor=0.1, *, behind=1, weight=0.5, saved=None):
    config = CurriculumConfig(floor, weight)
    return Curriculum(config, seed=SEED, behind=behind, saved=saved)


def walk(source, curriculum, rewards, count, *, start=0, late=0, learned=()):
    """The positions of the next groups, each answered when `late` others were begun after it, and where that ended.

    Args:
        rewards: Of a group, by its position and uid.
        learned: Numbers of groups at whose begin all were learned from that are not under way.
    """
    under_way, taken, position = deque(), [], start
    while len(taken) < count:
        uid = source.at(position).uid
        if curriculum.takes(position, uid):
            curriculum.begin(position, uid)
            under_way.append((position, uid))
            taken.append(position)
            if len(taken) in learned:
                curriculum.learned(under_way[0][0])
        position += 1
        while len(under_way) > late:
            curriculum.answered(np.array(rewards(*under_way.popleft())))
    while under_way:
        curriculum.answered(np.array(rewards(*under_way.popleft())))
    return taken


def transcription(source, floor, weight, behind, rewards, count):
    """The same from the first group on, each rate made anew of all groups that it may go by."""
    taken, position = [], 0
    while len(taken) < count:
        uid, rate = source.at(position).uid, None
        for before in taken[: max(len(taken) - behind + 1, 0)]:
            scores = rewards(before, source.at(before).uid)
            if source.at(before).uid == uid and len(scores):
                success = min(max(sum(scores) / len(scores), 0.0), 1.0)
                rate = success if rate is None else rate + weight * (success - rate)
        draw = drawn(np.uint64(SEED | 0x43555252 << 32), position)
        if rate is None or draw < floor + (1 - floor) * 4 * rate * (1 - rate):
            taken.append(position)
        position += 1
    return taken


def some_rewards(position, uid):
    """Some are always right, some never, others now and then; one cannot be scored, one has rewards out of bounds."""
    kinds = [[1.0, 1.0], [0.0, 0.0], [0.0, 1.0], [float(position % 2)] * 2, [], [3.0, 2.0], [-2.0, 0.5]]
    return kinds[uid % len(kinds)]


RUNS = {
    "num_prompts": st.integers(1, 9),
    "behind": st.integers(1, 12),
    "floor": st.sampled_from([0.1, 0.7]),
    "weight": st.sampled_from([0.25, 1.0]),
}


@pytest.mark.slow
@given(**RUNS)
@settings(max_examples=30)
def test_choices_are_those_of_the_transcription(num_prompts, behind, floor, weight):
    source = source_of(num_prompts)
    taken = walk(source, curriculum_of(source, floor, behind=behind, weight=weight), some_rewards, 20)
    assert taken == transcription(source, floor, weight, behind, some_rewards, 20)


@pytest.mark.slow
@settings(max_examples=30)
@given(late=st.integers(0, 11), learned=st.sets(st.integers(1, 25)), **RUNS)
def test_choices_do_not_depend_on_when_groups_are_done_or_learned_from(
    num_prompts, behind, floor, weight, late, learned
):
    source = source_of(num_prompts)
    at_once = curriculum_of(source, floor, behind=behind, weight=weight)
    other = curriculum_of(source, floor, behind=behind, weight=weight)
    taken = walk(source, at_once, some_rewards, 25)
    assert walk(source, other, some_rewards, 25, late=min(late, behind - 1), learned=learned) == taken


@settings(max_examples=30)
@given(kill=st.integers(0, 20), ahead=st.integers(0, 11), **RUNS)
def test_a_run_that_goes_on_from_what_was_saved_makes_the_same_choices(num_prompts, behind, floor, weight, kill, ahead):
    """Though others were answered and chosen by after the last group that was learned from."""
    source = source_of(num_prompts)
    options = {"behind": behind, "weight": weight}
    whole = walk(source, curriculum_of(source, floor, **options), some_rewards, 30)
    killed = curriculum_of(source, floor, **options)
    walk(source, killed, some_rewards, kill + min(ahead, behind))
    position = whole[kill - 1] + 1 if kill else 0
    saved = json.loads(json.dumps(killed.saved(position)))
    assert len(saved["recent"]) <= behind - 1
    resumed = curriculum_of(source, floor, saved=saved, **options)
    assert json.loads(json.dumps(resumed.saved(position))) == saved
    after = walk(source, resumed, some_rewards, 30 - kill, start=position)
    assert whole[:kill] + after == whole
    pairs = Counter((source.at(i).uid, source.at(i).epoch) for i in whole[:kill] + after)
    assert pairs == Counter((source.at(i).uid, source.at(i).epoch) for i in whole)
    assert set(pairs.values()) == {1}


@given(num_prompts=st.integers(1, 9), behind=st.integers(1, 12), weight=st.sampled_from([0.25, 1.0]))
def test_with_a_floor_of_1_no_prompt_is_passed_over(num_prompts, behind, weight):
    source = source_of(num_prompts)
    taken = walk(source, curriculum_of(source, 1.0, behind=behind, weight=weight), some_rewards, 40)
    assert taken == list(range(40))


@pytest.mark.parametrize("rate", [0.0, 0.05, 0.25, 0.5, 0.8, 1.0])
@pytest.mark.parametrize("floor", [0.01, 0.3])
def test_prompts_are_taken_as_often_as_their_success_rate_says(rate, floor):
    """Within four standard deviations of a binomial; the draws are always the same."""
    source, count = source_of(1), 4000
    curriculum = curriculum_of(source, floor, saved={"rates": [[0, rate]], "recent": []})
    wanted = floor + (1 - floor) * 4 * rate * (1 - rate)
    assert probability(rate, floor) == wanted
    taken = sum(curriculum.takes(position, 0) for position in range(count))
    assert abs(taken - count * wanted) <= 4 * np.sqrt(count * wanted * (1 - wanted))


def test_no_prompt_starves_and_those_in_the_middle_come_in_each_epoch():
    source = source_of(6)
    taken = walk(source, curriculum_of(source, 0.2), lambda _, uid: [[0.0, 0.0], [0.0, 1.0], [1.0, 1.0]][uid % 3], 1500)
    epochs = source.at(taken[-1]).epoch
    counts = Counter(source.at(position).uid for position in taken)
    for uid in range(6):
        wanted = epochs * (1.0 if uid % 3 == 1 else 0.2)
        assert abs(counts[uid] - wanted) <= 4 * np.sqrt(epochs * 0.2 * 0.8) * (uid % 3 != 1) + 1


def test_draws_are_the_same_in_every_version_and_uniform():
    seed = np.uint64(7)
    assert [round(drawn(seed, position), 6) for position in range(3)] == [0.677221, 0.648754, 0.594481]
    values = np.array([drawn(seed, position) for position in range(5000)])
    counts = np.histogram(values, 10, (0.0, 1.0))[0]
    assert np.square(counts - 500).sum() / 500 < 27.9  # chi-square of 9 degrees: p > 0.001
    assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 4 / np.sqrt(5000)


def test_what_is_kept_is_bounded_by_what_is_under_way():
    source = source_of(9)
    curriculum = curriculum_of(source, 0.5, behind=4)
    taken = walk(source, curriculum, some_rewards, 500, late=3)
    curriculum.learned(taken[-1] + 1)
    assert len(curriculum._answered) == 3
    assert len(curriculum.saved(taken[-1] + 1)["rates"]) == 8  # one prompt is never scored


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"floor": 0.0}, r"curriculum\.floor \(0\.0\) must lie in \[0\.01, 1\]"),
        ({"floor": 1.5}, r"curriculum\.floor \(1\.5\) must lie in \[0\.01, 1\]"),
        ({"weight": 0.0}, r"curriculum\.weight \(0\.0\) must be above 0 and at most 1"),
    ],
)
def test_settings_that_make_no_sense_are_refused(wrong, words):
    with pytest.raises(ConfigError, match=words):
        CurriculumConfig(**wrong)


def test_a_task_of_endless_prompts_is_refused():
    check_num_prompts(MOST_PROMPTS)
    with pytest.raises(ConfigError, match=r"has 200,001 prompts to train on.* at most 200,000.*floor at 1"):
        check_num_prompts(MOST_PROMPTS + 1)

"""Each warning of an LLM run: on past its line, off before it."""

import pytest

from seedx.llm_warnings import Warnings

FINE = {
    "learner/clip_fraction": 0.1,
    "learner/engine_gap_max": 1e-6,
    "learner/entropy": 1.0,
    "learner/kl_reference": 0.01,
    "learner/wait_batch_share": 0.5,
    "rollout/zero_spread": 0.3,
    "rollout/scored_groups": 20,
    "reward/unscored": 1,
    "env_steps": 1000,
    "decode/occupancy": 0.8,
    "reward_mean": 0.5,
}


def warnings_of(exact=True, compared=True):
    return Warnings(exact, compared, under_way=64, slots=64)


def warned(exact=True, **changes):
    row = FINE | {name.replace("__", "/"): value for name, value in changes.items()}
    return warnings_of(exact)(row)


def test_a_run_that_is_well_warns_of_nothing_nor_does_one_of_which_nothing_is_known():
    assert warned() == {}
    warnings = warnings_of()
    for _ in range(100):
        assert warnings({}) == {}
        assert warnings(FINE) == {}


def test_equal_rewards_are_no_matter_where_completions_are_not_compared():
    assert warnings_of(compared=False)(FINE | {"rollout/zero_spread": 1.0}) == {}
    assert set(warnings_of()(FINE | {"rollout/zero_spread": 1.0})) == {"no spread"}


@pytest.mark.parametrize(
    ("kind", "name", "on", "off", "words"),
    [
        ("clip fraction", "learner__clip_fraction", 0.51, 0.5, "51% of the tokens are clipped"),
        ("engine gap", "learner__engine_gap_max", 0.0011, 0.001, "differ by 0.0011 in a token's log-probability"),
        ("no spread", "rollout__zero_spread", 0.9, 0.89, "in 90% of the last 20 groups all rewards are equal"),
        ("unscored", "reward__unscored", 50, 49, "50 completions could not be scored"),
    ],
)
def test_one_figure_past_its_line_is_one_warning(kind, name, on, off, words):
    found = warned(**{name: on})
    assert set(found) == {kind}
    assert words in found[kind]
    assert warned(**{name: off}) == {}


def test_a_few_equal_groups_are_none_and_old_ones_do_not_count():
    warnings, groups = warnings_of(), 0

    def row(new, fraction):
        nonlocal groups
        groups += new
        return set(warnings(FINE | {"rollout/scored_groups": groups, "rollout/zero_spread": fraction}))

    assert [row(9, 1.0), row(0, 1.0), row(10, 1.0)] == [set()] * 3
    assert row(1, 1.0) == {"no spread"}
    assert row(18, 0.5) == set()
    assert row(20, 1.0) == {"no spread"}  # these alone are enough
    assert row(20, 0.0) == set()
    assert row(0, 0.0) == set()


def test_completions_without_a_score_count_before_the_first_update_too():
    assert set(warned(reward__unscored=1, env_steps=0)) == {"unscored"}
    assert warned(reward__unscored=0, env_steps=0) == {}


def test_completions_that_others_replaced_are_not_left_out():
    assert warned(reward__unscored=80, rollout__redundant_used=40) == {}
    assert set(warned(reward__unscored=100, rollout__redundant_used=40)) == {"unscored"}


def test_in_lower_precision_engine_and_learner_may_differ():
    assert warned(exact=False, learner__engine_gap_max=0.1) == {}


@pytest.mark.parametrize(
    ("occupancy", "waiting", "on"), [(0.3, 0.9, True), (0.49, 0.31, True), (0.5, 0.9, False), (0.3, 0.3, False)]
)
def test_an_engine_and_a_learner_that_take_turns_are_warned_of(occupancy, waiting, on):
    found = warned(decode__occupancy=occupancy, learner__wait_batch_share=waiting)
    assert set(found) == ({"idle"} if on else set())
    assert (
        not on
        or f"{1 - occupancy:.0%} of the decode engine's slots are empty, and the learner waits {waiting:.0%} of the "
        "time: they take turns. Raise --max-staleness."
        in found["idle"]
    )


@pytest.mark.parametrize(("occupancy", "on"), [(0.06, True), (0.0625, False), (0.12, False)])
def test_slots_that_small_batches_never_fill_are_not_idle(occupancy, on):
    few = Warnings(True, under_way=8, slots=64)
    found = few(FINE | {"decode/occupancy": occupancy, "learner/wait_batch_share": 0.9})
    assert set(found) == ({"idle"} if on else set())


def test_a_learner_that_waits_for_rewards_is_not_told_to_work_ahead():
    found = warned(decode__occupancy=0.1, learner__wait_batch_share=0.9, reward__open=33)
    assert "33 of 64 completions under way wait for their rewards. Raise --reward.workers" in found["idle"]
    found = warned(decode__occupancy=0.1, learner__wait_batch_share=0.9, reward__open=32)
    assert "Raise --max-staleness" in found["idle"]


def rows(warnings, count=1, **changes):
    """What the last of so many equal rows warns of."""
    for _ in range(count):
        found = warnings(FINE | {name.replace("__", "/"): value for name, value in changes.items()})
    return found


def test_entropy_that_collapses_is_warned_of_unless_the_task_is_solved():
    warnings = warnings_of()
    assert rows(warnings, learner__entropy=2.0) == {}
    assert rows(warnings, learner__entropy=0.11) == {}
    found = rows(warnings, learner__entropy=0.09)
    assert set(found) == {"entropy"}
    assert "from 2 to 0.09 nats" in found["entropy"]
    assert rows(warnings, learner__entropy=0.09, reward_mean=0.9) == {}
    assert rows(warnings_of(), learner__entropy=0.01) == {}  # it began so


def test_a_divergence_that_grows_without_reward_is_warned_of():
    for reward_after, divergence_after, on in ((0.505, 0.2, True), (0.52, 0.2, False), (0.5, 0.015, False)):
        warnings = warnings_of()
        assert rows(warnings, 59) == {}
        late = {"reward_mean": reward_after, "learner__kl_reference": divergence_after}
        assert rows(warnings, 1, **late) == {}  # not before there are 60 rows
        found = rows(warnings, 1, **late)
        assert set(found) == ({"divergence"} if on else set())
        if on:
            assert "grew from 0.01 to 0.2 while the reward stayed at 0.505" in found["divergence"]
            assert rows(warnings, 60, **late) == {}  # it grows no more


def test_a_tiny_divergence_may_grow():
    warnings = warnings_of()
    rows(warnings, 60, learner__kl_reference=1e-6)
    assert rows(warnings, learner__kl_reference=1.9e-3) == {}
    assert set(rows(warnings, learner__kl_reference=2.1e-3)) == {"divergence"}

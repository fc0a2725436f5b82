"""The rollout loop: how far it goes ahead, in which order groups leave it, and what it does without a signal."""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import Future
from types import SimpleNamespace

import numpy as np
import pytest
from decode_harness import make_params
from hypothesis import given, settings
from hypothesis import strategies as st
from processes import until
from rollout_harness import Ending, HandPool, S, Words, failure, generating

from seedx.checks import ConfigError
from seedx.envs.text.curriculum import Curriculum
from seedx.envs.text.generation import Generation, seed_of
from seedx.envs.text.group import Group, Sample
from seedx.envs.text.group_queue import GroupQueue
from seedx.envs.text.prompts import PromptSource
from seedx.envs.text.rollouts import Pace, Rollouts
from seedx.grpo_config import CurriculumConfig, GrpoConfig
from seedx.inference.scheduler import Scheduler
from seedx.metrics import Metrics
from seedx.replay.fifo import Fifo
from seedx.threads import Crew

pytestmark = pytest.mark.slow  # many compilations, or whole pipelines


class HandGeneration(Generation):
    """Groups whose rewards the test gives.

    Attributes:
        begun: Position, seed and future of each, in their order.
    """

    def __init__(self):
        self.begun, self._added = [], threading.Condition()

    def begin(self, position, prompt, tokens, seed, group_size=None):
        with self._added:
            self.begun.append((position, seed, Future()))
            self._added.notify_all()
        return self.begun[-1][2]

    def wait_for(self, count):
        with self._added:
            assert self._added.wait_for(lambda: len(self.begun) >= count, S), f"{len(self.begun)} of {count} begun"

    def score(self, number, *rewards):
        """Completes a group."""
        position, _, future = self.begun[number]
        one = np.ones(1, np.int32)
        samples = [Sample(one, one > 0, one.astype(np.float32), one, "stop", "", None, reward) for reward in rewards]
        future.set_result(Group(position, one, samples))


class Alone(Scheduler):
    """Nothing but `together`."""

    num_slots = 1

    def __init__(self):
        self._changed = threading.Condition()


@contextlib.contextmanager
def rolling(pace, texts=("A", "B", "C"), *, generation=None, scheduler=None, crew=None, encode=None, **options):
    """A rollout loop at work into a queue. Gives what belongs to it."""
    own, crew, metrics = crew is None, crew or Crew(), Metrics()
    generation, told = generation or HandGeneration(), []
    replay = Fifo(options.pop("max_items", 1000))
    start = {"position": 0, "updates": 0, "rewards": (), "window": 100, "seed": 5} | options
    config = start.pop("config", GrpoConfig(group_size=2))
    rollouts = Rollouts(
        generation,
        scheduler or Alone(),
        PromptSource(Words(*texts).prompts("train"), 1),
        encode or (lambda prompt: tuple(ord(letter) - 64 for letter in prompt.text)),
        pace=pace,
        config=config,
        told=told.append,
        metrics=metrics,
        crew=crew,
        **start,
    )
    groups = GroupQueue(replay, start["updates"] * pace.batch_size, metrics)
    rollouts.start(groups)
    try:
        yield SimpleNamespace(**locals())
    finally:
        if own:
            assert not crew.join(S)


def positions(items):
    return items.state["position"].tolist()


def idle(at, begun):
    """Waits for so many groups to be begun, and that the loop has gone round since without beginning more."""
    at.generation.wait_for(begun)
    rounds = 0

    def count():
        nonlocal rounds
        rounds += 1

    admit = at.rollouts._admit
    at.rollouts._admit = lambda: (admit(), count())
    until(lambda: rounds >= 2, "a round of the loop", S)
    at.rollouts._admit = admit
    assert len(at.generation.begun) == begun


# ---- pace and order


@given(
    batch_size=st.integers(1, 3),
    max_staleness=st.integers(0, 3),
    updates=st.integers(0, 5),
    order=st.randoms(use_true_random=False),
)
@settings(max_examples=15)
def test_groups_are_begun_no_further_ahead_than_allowed_and_learned_from_in_order(
    batch_size, max_staleness, updates, order
):
    """Whatever order they finish in."""
    pace = Pace(batch_size, max_staleness)
    with rolling(pace, position=batch_size * updates, updates=updates) as at:
        done = 0
        for update in range(updates, updates + 4):
            ahead = pace.allowed(update) - batch_size * updates
            at.generation.wait_for(ahead)
            assert len(at.generation.begun) == ahead
            left = list(range(done, ahead))
            order.shuffle(left)
            for number in left:
                at.generation.score(number, 0.0, 1.0)
            done = ahead
            items = at.groups.take(batch_size, S)
            assert positions(items) == list(range(batch_size * update, batch_size * (update + 1)))
            at.rollouts.advance(update + 1)
        idle(at, pace.allowed(updates + 4) - batch_size * updates)
        seeds = [seed for _, seed, _ in at.generation.begun]
        assert seeds[:3] == [seed_of(5, batch_size * updates + i) for i in range(len(seeds[:3]))]
        assert len(set(seeds)) == len(seeds)


def test_a_slow_group_holds_up_those_behind_it_and_none_is_dropped():
    with rolling(Pace(2, 1)) as at:
        idle(at, 4)
        for number in (3, 2, 1):
            at.generation.score(number, 0.0, 1.0)
        assert at.replay.info()["replay/inserted"] == 0
        at.generation.score(0, 0.0, 1.0)
        assert positions(at.groups.take(4, S)) == [0, 1, 2, 3]
        assert [group.position for group in at.told] == [0, 1, 2, 3]


def test_groups_wait_for_room_in_the_replay(capsys):
    with rolling(Pace(2, 1), max_items=1) as at:
        at.generation.wait_for(4)
        for number in range(4):
            at.generation.score(number, 0.0, 1.0)
        until(lambda: len(at.told) == 4, "the groups", S)
        assert [positions(at.groups.take(1, S)) for _ in range(4)] == [[0], [1], [2], [3]]


@pytest.mark.parametrize("max_staleness", [0, 1, 2])
def test_every_token_is_as_new_as_allowed_and_long_ones_are_learned_from_too(max_staleness):
    """Field reports 13: what waits is trained on late, not dropped, so that lengths are as they were sampled."""
    batch, updates = 2, 6
    texts = [letter * count for letter, count in zip("ABCDEF", (1, 2, 3, 40, 5, 6), strict=True)]
    sampled, params = {}, make_params(0)
    slow = []  # rewards of one prompt come late

    def score(prompt, completion):
        return {"length": float(len(completion) + len(sampled))}

    class Slow(HandPool):
        def submit(self, prompt, completion):
            future = Future()
            if prompt.text[0] == "D":
                slow.append((future, score(prompt, completion)))
            else:
                future.set_result(score(prompt, completion))
            return future

    with generating(pool=Slow(), tokenizer=Ending(), max_tokens=20, temperature=50.0) as made:
        with rolling(
            Pace(batch, max_staleness), texts, generation=made.generation, scheduler=made.scheduler, crew=made.crew
        ) as at:
            trained, lags, begun_at = [], [], []
            for update in range(updates):

                def batch_of(count=batch):
                    while slow:
                        future, scores = slow.pop()
                        future.set_result(scores)
                    with contextlib.suppress(TimeoutError):
                        return at.groups.take(count, 0.01)
                    return None

                items = until(batch_of, "a batch", S)
                trained += positions(items)
                of_sampled = items.rows["version"][items.rows["sampled"]]
                lags += (update - of_sampled).tolist()
                for position, lengths in zip(positions(items), items.state["lengths"].tolist(), strict=True):
                    sampled[position] = lengths[1:]
                made.scheduler.publish(update + 1, params)
                at.rollouts.advance(update + 1)
                begun_at.append(at.metrics.snapshot().get("rollout/begun_groups", 0))
            told = {group.position: [len(sample.tokens) for sample in group.samples] for group in at.told}
        assert trained == list(range(batch * updates))
        assert min(lags) >= 0
        assert max(lags) <= max_staleness
        assert all(count <= (max_staleness + update + 2) * batch for update, count in enumerate(begun_at))
        assert {position: told[position] for position in trained} == sampled  # nothing was cut or passed over
        assert len({length for lengths in sampled.values() for length in lengths}) > 4


# ---- prompts


def test_a_single_prompt_is_taken_again_and_again_with_other_seeds():
    with rolling(Pace(3, 1), ["AB"]) as at:
        idle(at, 6)
        assert [position for position, _, _ in at.generation.begun] == [0, 1, 2, 3, 4, 5]
        assert len({seed for _, seed, _ in at.generation.begun}) == 6


def test_prompts_that_are_too_long_are_passed_over_and_counted():
    texts = ["A" * 9, "B", "C" * 9, "D"]
    source = PromptSource(Words(*texts).prompts("train"), 1)
    with rolling(Pace(4, 1), texts, encode=lambda prompt: (1,) if len(prompt.text) < 9 else None) as at:
        idle(at, 8)
        taken = [position for position, _, _ in at.generation.begun]
        assert taken == [i for i in range(16) if len(source.at(i).prompt.text) < 9]
        assert at.metrics.snapshot()["rollout/too_long_prompts"] == taken[-1] + 1 - 8
        for number in range(4):
            at.generation.score(number, 0.0, 1.0)
        assert positions(at.groups.take(4, S)) == taken[:4]


def test_one_short_prompt_among_long_ones_is_found_in_every_epoch():
    """It may be first in one epoch and last in the next."""
    texts = ["A", *["B" * 9] * 5]
    with rolling(Pace(20, 0), texts, encode=lambda prompt: (1,) if len(prompt.text) < 9 else None) as at:
        idle(at, 20)
        assert [position // 6 for position, _, _ in at.generation.begun] == list(range(20))


def test_a_run_whose_prompts_are_all_too_long_ends():
    with rolling(Pace(2, 1), encode=lambda _: None) as at:
        error = failure(at.crew)
        assert isinstance(error, ConfigError)
        assert "all 3 prompts are longer than --rollout.max-prompt-tokens" in str(error)


# ---- signal


def test_groups_without_spread_make_room_for_others_up_to_a_bound():
    config = GrpoConfig(group_size=2, dynamic_sampling=True, max_discarded=3)
    with rolling(Pace(2, 1), config=config) as at:
        idle(at, 4)
        for number, rewards in enumerate([(0.0, 1.0), (1.0, 1.0), (0.5, 0.25), (0.0, 0.0)]):
            at.generation.score(number, *rewards)
        at.generation.wait_for(6)
        assert positions(at.groups.take(2, S)) == [0, 2]
        at.rollouts.advance(1)
        idle(at, 8)
        for number in range(4, 8):
            at.generation.score(number, 0.0, 1.0)
        assert positions(at.groups.take(2, S)) == [4, 5]
        at.rollouts.advance(2)
        at.generation.wait_for(10)
        for number in range(8, 13):
            at.generation.wait_for(number + 1)
            at.generation.score(number, 1.0, 1.0)
        idle(at, 15)
        assert at.crew.failure is None
        assert at.metrics.snapshot()["rollout/discarded_groups"] == 7
        at.generation.score(13, 1.0, 1.0)
        error = failure(at.crew)
    assert isinstance(error, ConfigError)
    for words in ("no signal is left: the last 6 groups were left out", "all rewards of each were equal"):
        assert words in str(error)


def test_without_staleness_what_replaces_others_begins_together():
    """However late each of them is known, so that two runs decode the same batches."""
    config = GrpoConfig(group_size=2, dynamic_sampling=True)
    with rolling(Pace(4, 0), config=config) as at:
        idle(at, 4)
        for number in range(3):
            at.generation.score(number, 1.0, 1.0)
        until(lambda: len(at.told) == 3, "the groups", S)
        idle(at, 4)
        at.generation.score(3, 0.0, 1.0)
        idle(at, 7)


def test_without_dynamic_sampling_equal_rewards_go_on_and_are_counted():
    with rolling(Pace(2, 1)) as at:
        idle(at, 4)
        for number in range(4):
            at.generation.score(number, 1.0, 1.0)
        assert positions(at.groups.take(2, S)) == [0, 1]
        until(lambda: len(at.told) == 4, "the groups", S)
        row = at.metrics.snapshot()
        assert row["rollout/zero_spread"] == 1.0
        assert row["reward_interval_mean"] == 1.0
        assert "rollout/discarded_groups" not in row


def test_a_group_of_which_some_are_scored_is_used_and_one_of_which_none_is_not():
    nan = float("nan")
    with rolling(Pace(2, 0), config=GrpoConfig(group_size=3)) as at:
        idle(at, 2)
        at.generation.score(0, nan, 0.0, 1.0)
        at.generation.score(1, nan, nan, nan)
        idle(at, 3)
        at.generation.score(2, 1.0, nan, 1.0)
        items = at.groups.take(2, S)
        assert positions(items) == [0, 2]
        np.testing.assert_array_equal(items.state["reward"], np.float32([[nan, 0, 1], [1, nan, 1]]))
        row = at.metrics.snapshot()
        assert row["rollout/discarded_groups"] == 1
        assert row["reward_interval_mean"] == (0.5 + 1.0) / 2
        assert at.rollouts.mean_reward() == (0.75, 4)  # those that have none are left out


def test_a_run_in_which_nothing_can_be_scored_ends():
    nan = float("nan")
    with rolling(Pace(1, 1), config=GrpoConfig(group_size=2, max_discarded=4)) as at:
        for number in range(4):
            at.generation.wait_for(number + 1)
            at.generation.score(number, nan, nan)
        error = failure(at.crew)
    assert isinstance(error, ConfigError)
    assert "the last 4 groups were left out, no reward could be computed" in str(error)


def test_the_mean_reward_is_over_the_newest_completions_those_before_a_resume_too():
    with rolling(Pace(1, 0), rewards=[5.0, 7.0], window=3) as at:
        assert at.rollouts.mean_reward() == (6.0, 2)
        at.generation.wait_for(1)
        at.generation.score(0, 1.0, 3.0)
        at.groups.take(1, S)
        assert at.rollouts.rewards() == [7.0, 1.0, 3.0]
        assert at.rollouts.rewards(before=1) == [7.0, 1.0, 3.0]
        assert at.rollouts.rewards(before=0) == [7.0]  # a resume from there generates the others anew
    with rolling(Pace(1, 0)) as at:
        mean, count = at.rollouts.mean_reward()
    assert np.isnan(mean)
    assert count == 0


# ---- resume


def trained_until(updates, kills, max_staleness, rewards, config, floor=None):
    """The positions of each update of a run that was killed at some of them, with its checkpoint one update before."""
    position = update = 0
    trained, saved = {}, {0: None}
    for stop in (*kills, updates):
        curriculum = None
        if floor is not None:
            settings, behind = CurriculumConfig(floor), Pace(2, max_staleness).allowed(0)
            curriculum = Curriculum(settings, seed=5, behind=behind, saved=saved[update])
        options = {"position": position, "updates": update, "config": config, "curriculum": curriculum}
        with rolling(Pace(2, max_staleness), **options) as at:
            scored = 0
            while update < stop:
                while scored < len(at.generation.begun):
                    at.generation.score(scored, *rewards(at.generation.begun[scored][0]))
                    scored += 1
                with contextlib.suppress(TimeoutError):
                    trained[update] = positions(at.groups.take(2, 0.01))
                    update += 1
                    if curriculum is not None:
                        saved[update] = curriculum.saved(trained[update - 1][-1] + 1)
                    at.rollouts.advance(update)
        update = max(stop - 1, 0)
        position = trained[update - 1][-1] + 1 if update else 0
    return trained


@pytest.mark.parametrize("dynamic", [False, True])
def test_what_a_killed_run_learns_from_is_what_one_that_was_not_learns_from(dynamic):
    """Whatever was generated ahead: work that was in flight at the kill is begun anew."""
    config = GrpoConfig(group_size=2, dynamic_sampling=dynamic)
    outcomes = (1.0, 0.0, 1.0, 1.0, 0.0) if dynamic else (1.0,)

    def rewards(position):
        return 0.0, outcomes[position % len(outcomes)]

    for max_staleness in (0, 2):
        whole = trained_until(12, (), max_staleness, rewards, config)
        killed = trained_until(12, (1, 2, 7, 9), max_staleness, rewards, config)
        assert killed == whole
        flat = [position for positions in whole.values() for position in positions]
        assert flat == sorted(set(flat))
        assert len(flat) == 24


SOURCE = PromptSource(Words("A", "B", "C").prompts("train"), 1)


def known(position):
    """One prompt is always answered right, one never, one now and then, which comes in another place each epoch."""
    return [(1.0, 1.0), (0.0, 1.0 if position % 4 else 0.0), (0.0, 0.0)][SOURCE.at(position).uid]


@pytest.mark.parametrize("dynamic", [False, True])
def test_so_it_is_where_prompts_are_passed_over(dynamic):
    config = GrpoConfig(group_size=2, dynamic_sampling=dynamic)
    for max_staleness in (0, 2):
        whole = trained_until(12, (), max_staleness, known, config, floor=0.1)
        killed = trained_until(12, (1, 2, 7, 9), max_staleness, known, config, floor=0.1)
        assert killed == whole
        taken = [SOURCE.at(position) for positions in whole.values() for position in positions]
        assert len({(prompt.uid, prompt.epoch) for prompt in taken}) == 24
        assert sum(prompt.uid == 1 for prompt in taken) > 12
        assert taken[-1].epoch > 12  # without a curriculum 8


def test_with_a_floor_of_1_groups_are_what_they_are_without_a_curriculum():
    config = GrpoConfig(group_size=2)
    assert trained_until(12, (7,), 1, known, config, floor=1.0) == trained_until(12, (7,), 1, known, config)


@given(order=st.randoms(use_true_random=False))
@settings(max_examples=10)
def test_prompts_are_passed_over_alike_in_whatever_order_groups_are_done(order):
    """And counted."""
    seen = []
    for shuffled in (False, True):
        curriculum = Curriculum(CurriculumConfig(0.2), seed=5, behind=6)
        with rolling(Pace(2, 2), curriculum=curriculum) as at:
            done = 0
            for update in range(9):
                at.generation.wait_for(2 * update + 6)
                left = list(range(done, 2 * update + 6))
                if shuffled:
                    order.shuffle(left)
                for number in left:
                    at.generation.score(number, *known(at.generation.begun[number][0]))
                done = 2 * update + 6
                at.groups.take(2, S)
                at.rollouts.advance(update + 1)
            idle(at, 24)
            seen.append([position for position, _, _ in at.generation.begun])
            assert at.metrics.snapshot()["rollout/skipped_prompts"] == seen[-1][-1] + 1 - 24
    assert seen[0] == seen[1]


def test_prompts_that_are_passed_over_do_not_count_as_too_long():
    """One that fits among long ones, which is always answered right."""
    texts = ["A", *["B" * 9] * 5]
    curriculum = Curriculum(CurriculumConfig(0.01), seed=5, behind=1)

    def encode(prompt):
        return (1,) if len(prompt.text) < 9 else None

    with rolling(Pace(1, 0), texts, encode=encode, curriculum=curriculum) as at:
        for number in range(5):
            at.generation.wait_for(number + 1)
            at.generation.score(number, 1.0, 1.0)
            at.groups.take(1, S)
            at.rollouts.advance(number + 1)
        at.generation.wait_for(6)
        assert at.generation.begun[-1][0] > 6 * 12  # more epochs than would do to find that all are too long
        assert at.crew.failure is None

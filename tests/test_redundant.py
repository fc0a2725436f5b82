"""Redundant completions: what they replace, and how long the completions are that are trained on.

Most tests have a scheduler and a clock by hand: a completion takes as many ticks as it has tokens.
"""

import math
import threading
from concurrent.futures import Future
from types import SimpleNamespace

import numpy as np
import pytest
from processes import until
from rollout_harness import Alphabet, Ending, HandPool, S, Talk, Words, generating, length

from seedx.checks import ConfigError
from seedx.envs.text import generation as module
from seedx.envs.text.generation import Generation, Settings
from seedx.envs.text.rewards import Reply
from seedx.envs.text.task import Prompt
from seedx.grpo_config import RolloutConfig
from seedx.inference.requests import Completion, Handle, QueueFullError
from seedx.inference.scheduler import Scheduler
from seedx.llm_config import LlmConfig
from seedx.metrics import Metrics
from seedx.threads import Crew

AB = Prompt("AB"), (1, 2)
MOST = 16  # tokens of a completion
G, K = 4, 2
PMF = np.array([*(0.85 ** np.arange(MOST - 1) * 0.15), 0.85 ** (MOST - 1)])  # of the lengths 1 to MOST
CDF = np.concatenate([[0.0], np.cumsum(PMF)])  # at 0 to MOST


def length_of(request, index):
    """A draw from `PMF`, of this sample's own seed."""
    return int(np.searchsorted(CDF[1:-1], np.random.default_rng(request.sample_seed(index)).random(), "right")) + 1


class Clocked(Scheduler):
    """Has all the slots in the world, and loses completions by chance, whatever their length.

    Attributes:
        now: Ticks so far.
        asked: Each request, when it came, its handle and the lengths of its samples.
        room: Requests that are taken; then it is full.
        dawdles: Ticks until a request that is cancelled ends.
    """

    num_slots = 1 << 30

    def __init__(self, loses=0.0):
        self._changed, self.now, self.asked, self.room = threading.Condition(), 0.0, [], math.inf
        self.dawdles, self._leaving = 0.0, {}
        self._loses, self._rng, self._open = loses, np.random.default_rng(0), {}

    def submit(self, request, listener=None):
        if self.room <= 0:
            raise QueueFullError("full", 1.0)
        self.room -= 1
        handle = Handle(self._cancel)
        lengths = [length_of(request, i) for i in range(request.num_samples)]
        lost = self._rng.random(request.num_samples) < self._loses
        self._open[handle] = SimpleNamespace(request=request, since=self.now, handle=handle, lengths=lengths, lost=lost)
        self.asked.append(self._open[handle])
        return handle

    def tick(self):
        self.now += 1
        for handle in [handle for handle, when in self._leaving.items() if when < self.now]:
            del self._leaving[handle]
            self._end(handle)
        for handle, work in list(self._open.items()):
            handle.num_done = sum(length <= self.now - work.since for length in work.lengths)
            if handle.num_done == len(work.lengths):
                self._end(handle)

    def _cancel(self, handle):
        if self.dawdles:
            self._leaving[handle] = self.now + self.dawdles
        else:
            self._end(handle)

    def _end(self, handle):
        work = self._open.pop(handle, None)
        if work is not None:
            handle.finish([self._completion(work, i) for i in range(len(work.lengths))])

    def _completion(self, work, i):
        length, age = work.lengths[i], self.now - work.since
        count, reason = length, "length" if length == MOST else "stop"
        if age < length or work.lost[i]:
            count, reason = min(int(age), length), "cancelled"
        tokens = np.full(count, i + 1, np.int32)
        nothing = np.zeros(count, np.float32)
        return Completion(tokens, nothing, nothing, tokens * 0, reason, "A" * count)


class Hand(SimpleNamespace):
    """A generation whose thread is the test."""

    def begin(self, position, **options):
        return self.generation.begin(position, *AB, 1000 + position, **options)

    def drain(self):
        while not self.generation._events.empty():
            self.generation._events.get()()

    def tick(self):
        self.scheduler.tick()
        self.drain()
        self.generation._ask_postponed()
        self.generation._expire()
        self.drain()

    def group(self, position, **options):
        future = self.begin(position, **options)
        for _ in range(20 * MOST):
            if future.done():
                return future.result(0.0)
            self.tick()
        raise AssertionError("the group is not complete")


@pytest.fixture
def by_hand(monkeypatch):
    def make(task=None, pool=None, loses=0.0, **settings):
        scheduler, metrics = Clocked(loses), Metrics()
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: scheduler.now))
        settings = Settings(**{"group_size": G, "redundant": K, "max_tokens": MOST, "timeout_s": 1e9} | settings)
        pool, task = pool or HandPool(length), task or Words("AB")
        pool.replies = lambda prompt, turns: Reply(task.reply(prompt, turns))
        generation = Generation(scheduler, task, Alphabet(), pool, settings, metrics, Crew())
        return Hand(scheduler=scheduler, metrics=metrics, generation=generation, pool=pool)

    return make


def lengths_of(group):
    return [len(sample.tokens) for sample in group.samples]


def histogram(lengths):
    return np.bincount(lengths, minlength=MOST + 1)[1:]


def chi_square(counts, expected):
    """Over its degrees of freedom."""
    return float(np.sum((counts - expected) ** 2 / expected) / (len(counts) - 1))


# Of 15 degrees of freedom p < 0.001 beyond this. Seeds are fixed, so it is either always so or never.
LIMIT = 37.7 / 15


def late_pmf(late):
    """Of what is trained where completions are late from a tick on, exactly.

    Then those that are done are taken, the first G by index, as soon as there are G: at the stop d of the N are done, c
    of them before its tick. By symmetry each of the d is taken with probability G / d.
    """
    number, expected = G + K, np.zeros(MOST)
    for stop in range(late, MOST + 1):
        before = CDF[stop - 1] if stop > late else 0.0
        now = CDF[stop] - before
        for done in range(G, number + 1):
            for earlier in range(min(G, done + 1) if stop > late else 1):
                ways = math.factorial(number) / (
                    math.factorial(earlier) * math.factorial(done - earlier) * math.factorial(number - done)
                )
                chance = ways * before**earlier * now ** (done - earlier) * (1 - CDF[stop]) ** (number - done)
                if stop == late:
                    expected[:stop] += chance * G * PMF[:stop] / CDF[stop]
                    continue
                expected[stop - 1] += chance * G / done * (done - earlier)
                if earlier:
                    expected[: stop - 1] += chance * G / done * earlier * PMF[: stop - 1] / before
    return expected / G


# ---- how long what is trained is


@pytest.mark.slow
def test_what_is_trained_is_what_would_be_without_redundant_ones(by_hand):
    """Token for token, however much sooner these are done; so lengths are as they were sampled."""
    at, alone = by_hand(), by_hand(redundant=0)
    counts, sooner = np.zeros(MOST), 0
    for position in range(300):
        group = at.group(position)
        main, *spare = at.scheduler.asked[-1 - K :]
        assert lengths_of(group) == main.lengths == lengths_of(alone.group(position))
        assert [sample.tokens.tolist() for sample in group.samples] == [[i + 1] * n for i, n in enumerate(main.lengths)]
        sooner += sum(work.lengths[0] < max(main.lengths) for work in spare)
        counts += histogram(lengths_of(group))
    assert chi_square(counts, 300 * G * PMF) < LIMIT
    assert sooner > 300
    assert at.metrics.snapshot()["rollout/redundant_used"] == 0


@pytest.mark.slow
def test_lengths_are_as_they_were_sampled_where_losses_know_nothing_of_them(by_hand):
    at, counts = by_hand(loses=0.15, retries=100), np.zeros(MOST)
    for position in range(300):
        counts += histogram(lengths_of(at.group(position)))
    assert chi_square(counts, 300 * G * PMF) < LIMIT
    figures = at.metrics.snapshot()
    used = figures["rollout/redundant_used"]
    assert 0.5 < used / (300 * G * 0.15) < 1.0  # some groups lost more than there were redundant ones
    assert 0 < figures["rollout/lost_groups"] < 100


@pytest.mark.slow
@pytest.mark.parametrize("late", [1, 5, 9, MOST])
def test_lateness_prefers_short_completions_as_the_closed_form_says(by_hand, late):
    """And by no more than were replaced. From the first tick on it takes the first that are done; at the last, none."""
    groups = 600
    at, counts, sampled = by_hand(late_s=late - 0.5), np.zeros(MOST), np.zeros(MOST)
    for position in range(groups):
        counts += histogram(lengths_of(at.group(position)))
        sampled += histogram(at.scheduler.asked[-1 - K].lengths)
    expected = late_pmf(late)
    assert expected.sum() == pytest.approx(1.0)
    assert chi_square(counts[expected > 0], groups * G * expected[expected > 0]) < LIMIT
    replaced = at.metrics.snapshot()["rollout/redundant_used"] / (groups * G)
    distance = np.abs(counts - sampled).sum() / 2 / (groups * G)
    assert distance <= replaced
    if late == MOST:
        assert replaced == distance == 0
        np.testing.assert_allclose(expected, PMF)
    else:
        assert distance > 0.02
        assert chi_square(counts, groups * G * PMF) > 2 * LIMIT  # the test tells one from the other
        lengths = np.arange(1, MOST + 1)
        assert expected @ lengths < 0.9 * (PMF @ lengths)


# ---- what takes whose place


def scores_of(*bad):
    """Scores that are the length, but for some calls."""
    calls = iter(range(10**6))
    return lambda prompt, completion: None if next(calls) in bad else length(prompt, completion)


def test_a_completion_without_a_reward_makes_room_for_a_redundant_one_if_that_has_one(by_hand):
    at = by_hand(pool=HandPool(scores_of(1)))
    group = at.group(0)
    main, first, second = at.scheduler.asked
    assert lengths_of(group) == [main.lengths[0], *main.lengths[2:], *first.lengths]
    assert not np.isnan([sample.reward for sample in group.samples]).any()
    assert len(at.pool.asked) == G + 1  # the other one was not scored
    at = by_hand(pool=HandPool(scores_of(0, 2, 3, 4)))
    group = at.group(0)
    main, first, second = at.scheduler.asked
    assert lengths_of(group) == [main.lengths[0], main.lengths[1], main.lengths[2], *second.lengths]
    np.testing.assert_array_equal(np.isnan([sample.reward for sample in group.samples]), [True, False, True, False])


def test_groups_of_an_evaluation_have_no_redundant_ones(by_hand):
    at = by_hand()
    assert len(at.group(0, group_size=3).samples) == 3
    assert [work.request.num_samples for work in at.scheduler.asked] == [3]


def test_redundant_ones_go_last_and_are_cancelled_when_they_are_not_wanted(by_hand):
    at = by_hand()
    future = at.begin(0)
    main, first, second = at.scheduler.asked
    assert [work.request.priority for work in (main, first, second)] == [0, -1, -1]
    main.lengths[:], first.lengths[:], second.lengths[:] = [3, 4, 2, 5], [1], [9]
    while not future.done():
        at.tick()
    assert at.scheduler.now == 5
    assert [work.handle.result(0.0)[0].finish_reason for work in (first, second)] == ["stop", "cancelled"]
    assert not at.scheduler._open
    assert not at.generation._generating


def test_a_redundant_one_that_there_was_no_room_for_is_not_asked_for_once_its_group_is_complete(by_hand):
    at = by_hand()
    at.scheduler.room = 1
    group = at.group(0)
    at.scheduler.room = math.inf
    for _ in range(3):
        at.tick()
    assert len(group.samples) == G
    assert len(at.scheduler.asked) == 1
    assert not at.generation._postponed


def test_a_group_that_is_late_does_without_what_there_was_no_room_for(by_hand):
    at = by_hand(late_s=2.5, redundant=G + 1)
    at.scheduler.room = 1 + G
    future = at.begin(0)
    main = at.scheduler.asked[0]
    main.lengths[:] = [MOST, 1, 1, 1]
    for work in at.scheduler.asked[1:]:
        work.lengths[:] = [2]
    for _ in range(3):
        at.tick()
    at.tick()
    assert lengths_of(future.result(0.0)) == [1, 1, 1, 2]
    assert at.metrics.snapshot()["rollout/redundant_used"] == 1


def test_an_engine_that_is_silent_costs_no_group_of_which_enough_is_there(by_hand, capsys):
    at = by_hand(timeout_s=20.0)
    future = at.begin(0)
    main, first, second = at.scheduler.asked
    main.lengths[:], first.lengths[:], second.lengths[:] = [3, 10**9, 4, 5], [10**9], [6]
    while not future.done():
        at.tick()
    assert at.scheduler.now == 27  # since the redundant one that was done
    assert lengths_of(future.result(0.0)) == [3, 4, 5, 6]
    future = at.begin(1)
    main, first, second = at.scheduler.asked[-3:]
    main.lengths[:], first.lengths[:], second.lengths[:] = [3, 10**9, 10**9, 5], [10**9], [6]
    while not future.done():
        at.tick()
    assert at.metrics.snapshot()["rollout/lost_groups"] == 1
    assert lengths_of(future.result(0.0)) == at.scheduler.asked[-3].lengths  # of the same seeds
    assert "the group of prompt 1 was not complete after 20 s; it is asked for again" in capsys.readouterr().out


def test_an_engine_that_takes_its_time_to_cancel_costs_nothing_either(by_hand):
    at = by_hand(timeout_s=20.0, retries=0)
    at.scheduler.dawdles = 7.0
    future = at.begin(0)
    main, first, second = at.scheduler.asked
    main.lengths[:], first.lengths[:], second.lengths[:] = [3, 10**9, 4, 5], [10**9], [6]
    while not future.done():
        at.tick()
    assert lengths_of(future.result(0.0)) == [3, 4, 5, 6]


def test_a_late_group_whose_first_request_found_no_room_is_made_of_the_others(by_hand):
    at = by_hand(group_size=2, redundant=2, late_s=40.5)
    submit = at.scheduler.submit

    def crowded(request, listener=None):
        if request.num_samples > 1:
            raise QueueFullError("full", 1.0)
        return submit(request)

    at.scheduler.submit = crowded
    group = at.group(0)
    assert lengths_of(group) == [length for work in at.scheduler.asked for length in work.lengths]


def test_a_reward_of_an_earlier_attempt_does_not_count(by_hand):
    at = by_hand(pool=HandPool())
    future = at.begin(0)
    [job] = [job for job in (at.drain(), *at.generation._generating) if job]
    while len(at.pool.asked) < G:
        at.tick()
    at.generation._lost(job, "was lost")
    while len(at.pool.asked) < 2 * G:
        at.tick()
    before, after = at.pool.asked[:G], at.pool.asked[G:]
    for reward, asked in ((7.0, before), (1.0, after), (7.0, before)):
        for _, _, score in asked:
            if not score.done():
                score.set_result({"reward": reward})
        at.drain()
    assert [sample.reward for sample in future.result(0.0).samples] == [1.0] * G


def test_replies_that_take_long_are_no_silence_of_the_engine(by_hand):
    at, asked = by_hand(Talk("A"), timeout_s=20.0, retries=0, redundant=0, max_tokens=3 * MOST), []
    at.pool.reply = lambda prompt, turns: asked.append(Future()) or asked[-1]
    future = at.begin(0)
    [work] = at.scheduler.asked
    work.lengths[:] = [2] * G
    for _ in range(100):
        at.tick()
    for reply in asked:
        reply.set_result(Reply(None))
    at.drain()
    assert lengths_of(future.result(0.0)) == [2] * G


def test_conversations_count_as_done_when_all_turns_are_over(by_hand):
    """A late one is lost though its first turn is there."""
    at = by_hand(Talk("A"), late_s=9.5, max_tokens=3 * MOST)
    future = at.begin(0)
    for work in at.scheduler.asked:
        work.lengths[:] = [2] * len(work.lengths)
    at.tick()
    at.tick()
    second_turns = at.scheduler.asked[1 + K :]
    assert len(second_turns) == G + K
    assert [work.request.priority for work in second_turns] == [0] * G + [-1] * K
    for work, count in zip(second_turns, [3, 10**9, 3, 3, 3, 3], strict=True):
        work.lengths[:] = [count]
    while not future.done():
        at.tick()
    assert at.scheduler.now == 10
    assert lengths_of(future.result(0.0)) == [2 + 1 + 3] * G
    assert len({request.seed for request in (work.request for work in at.scheduler.asked)}) == len(at.scheduler.asked)


def test_a_completion_whose_reply_cannot_be_had_is_replaced_like_one_without_a_reward(by_hand):
    at = by_hand(Talk("A"), max_tokens=3 * MOST)
    answers = iter([None] + [Reply(None)] * (G + K - 1))  # the first completion's never comes
    at.pool.replies = lambda prompt, turns: next(answers)
    group = at.group(0)
    main, first, _ = at.scheduler.asked
    assert lengths_of(group) == [*main.lengths[1:], *first.lengths]
    assert not np.isnan([sample.reward for sample in group.samples]).any()


# ---- settings


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: RolloutConfig(redundant=-1), r"redundant.*-1"),
        (lambda: RolloutConfig(late_s=5.0), r"rollout\.late_s \(5\.0\) must be 0 without redundant completions"),
        (
            lambda: LlmConfig(max_staleness=0, rollout=RolloutConfig(redundant=2)),
            r"rollout\.redundant \(2\) must be 0 with max_staleness 0.*Raise --max-staleness",
        ),
    ],
)
def test_settings_that_do_not_fit_are_refused(make, words):
    with pytest.raises(ConfigError, match=words):
        make()


# ---- with the engine


@pytest.mark.slow
def test_groups_of_the_engine_are_the_same_with_redundant_ones():
    groups = []
    for redundant in (0, 2):
        with generating(tokenizer=Ending(), group_size=3, redundant=redundant, temperature=50.0) as at:
            futures = [at.generation.begin(position, *AB, 7 + position) for position in range(20)]
            groups.append([future.result(S) for future in futures])
            until(lambda at=at: not at.scheduler._completions.groups, "nothing to be left at work", S)
    for alone, beside in zip(*groups, strict=True):
        for one, other in zip(alone.samples, beside.samples, strict=True):
            for name in ("tokens", "logprobs", "versions"):
                np.testing.assert_array_equal(getattr(one, name), getattr(other, name))


@pytest.mark.slow
def test_redundant_ones_of_the_engine_take_the_place_of_those_that_were_cancelled():
    with generating(start=False, redundant=2) as at:
        future = at.generation.begin(0, *AB, 7)
        at.handles[0].cancel()
        at.scheduler.start()
        samples = future.result(S).samples
        for sample, handle in zip(samples, at.handles[1:], strict=True):
            np.testing.assert_array_equal(sample.tokens, handle.result(S)[0].tokens)
        figures = at.metrics.snapshot()
    assert figures["rollout/redundant_used"] == 2
    assert "rollout/lost_groups" not in figures


@pytest.mark.slow
def test_the_engine_says_how_many_samples_of_a_request_are_done():
    with generating(tokenizer=Ending(), group_size=8, max_tokens=40, temperature=50.0) as at:
        at.generation.begin(0, *AB, 7).result(S)
        [handle] = at.handles
    assert handle.num_done == 8

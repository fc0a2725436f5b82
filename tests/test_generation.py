"""Groups from prompts: which tokens count as sampled, what happens to rewards that fail, and groups that get lost."""

import itertools
import threading
from concurrent.futures import Future

import numpy as np
import pytest
from decode_harness import make_params
from processes import until
from rollout_harness import Ending, HandPool, S, Talk, Words, expire, failure, generating, length

from seedx.envs.text.group import Group, to_item
from seedx.envs.text.task import Prompt
from seedx.inference.requests import Handle, Request

pytestmark = pytest.mark.slow  # many compilations, or whole pipelines

MIXED = {"temperature": 50.0}  # a completion is a mix of all tokens
AB = Prompt("AB"), (1, 2)


def begin(at, position=0, seed=7, prompt=AB, **options):
    return at.generation.begin(position, *prompt, seed, **options)


def test_a_group_is_what_the_scheduler_said_with_each_completions_own_reward():
    pool = HandPool()
    with generating(pool=pool, group_size=3, **MIXED) as at:
        future = begin(at, position=5)
        asked = pool.wait_for(3)
        for number, (_, _, scored) in reversed(list(enumerate(asked))):
            assert not future.done()
            scored.set_result({"reward": float(number)})
        group = future.result(S)
        wanted = at.scheduler.submit(Request((1, 2), 8, seed=7, num_samples=3, stop_tokens=(0,), **MIXED)).result(S)
    assert group.position == 5
    assert group.prompt.tolist() == [1, 2]
    assert [sample.reward for sample in group.samples] == [0.0, 1.0, 2.0]
    for sample, completion, (prompt, text, _) in zip(group.samples, wanted, asked, strict=True):
        for name in ("tokens", "logprobs", "versions"):
            np.testing.assert_array_equal(getattr(sample, name), getattr(completion, name))
        assert sample.text == text == completion.text
        assert sample.sampled.all()
        assert prompt is AB[0]


def test_the_token_that_ends_a_completion_is_trained_and_one_that_was_cut_keeps_all():
    """The padding is the same token as the end."""
    with generating(tokenizer=Ending(), group_size=64, max_tokens=6, **MIXED) as at:
        samples = begin(at).result(S).samples
    assert {sample.finish_reason for sample in samples} == {"stop", "length"}
    for sample in samples:
        stops = np.isin(sample.tokens, Ending.eos_ids)
        assert sample.sampled.all()
        assert not stops[:-1].any()
        assert stops[-1] == (sample.finish_reason == "stop")
        assert stops[-1] or len(sample.tokens) == 6
    assert any(sample.tokens[-1] == 0 for sample in samples)  # so that the padding's id is among what is trained


def test_a_group_of_one_prompt_is_never_taken_for_another_of_the_same():
    pool = HandPool()
    with generating(pool=pool, **MIXED) as at:
        first, second = begin(at, 0, seed=1), begin(at, 1, seed=2)
        texts = {}
        for _, text, scored in pool.wait_for(4):
            texts.setdefault(text, scored)
        mine = at.scheduler.submit(Request((1, 2), 8, seed=2, num_samples=2, stop_tokens=(0,), **MIXED)).result(S)
        assert len(texts) == 4
        for completion in mine:
            texts.pop(completion.text).set_result({"reward": 1.0})
        assert second.result(S).position == 1
        assert not first.done()
        for scored in texts.values():
            scored.set_result({"reward": 0.0})
        assert [sample.reward for sample in first.result(S).samples] == [0.0, 0.0]
    assert [sample.reward for sample in second.result(S).samples] == [1.0, 1.0]


def test_what_could_not_be_scored_has_no_reward_which_is_not_0():
    scores = iter([None, {"reward": 0.0}])
    with generating(pool=HandPool(lambda *_: next(scores))) as at:
        group = begin(at).result(S)
    np.testing.assert_array_equal([sample.reward for sample in group.samples], [np.nan, 0.0])
    np.testing.assert_array_equal(to_item(group).state["reward"], [[np.nan, 0.0]])


def test_components_count_as_the_task_says_and_long_completions_less():
    task = Words("AB")
    task.reward_weights = {"style": 0.5, "unused": 9.0}
    pool = HandPool(lambda *_: {"right": 1.0, "style": 2.0})
    with generating(task, pool, tokenizer=Ending(), group_size=16, overlong_tokens=4, **MIXED) as at:
        samples = begin(at).result(S).samples
    for sample in samples:  # eq. 13 of 2503.14476 with 8 tokens, of which the last 4 cost
        assert sample.reward == pytest.approx(2.0 - max(len(sample.tokens) - 4, 0) / 4)
    assert len({sample.reward for sample in samples}) > 2


def test_a_reward_that_float32_cannot_hold_is_none():
    with generating(pool=HandPool(lambda *_: {"reward": 1e39})) as at:
        group = begin(at).result(S)
        assert at.metrics.snapshot()["rollout/unusable_rewards"] == 2
    assert np.isnan(to_item(group).state["reward"]).all()


# ---- several turns


def test_what_the_environment_says_is_not_trained_and_tokens_go_in_as_they_came_out():
    task = Talk("€A", "B")
    with generating(task, tokenizer=Ending(), group_size=8, max_tokens=40, **MIXED) as at:
        samples = begin(at).result(S).samples
    turns, pieces = [(1, 2)] * 8, {}
    for request, handle in zip(at.requests[1:], at.handles[1:], strict=True):
        [completion] = handle.result(S)
        pieces[request.prompt] = completion
    rewritten = 0
    for i, (sample, first) in enumerate(zip(samples, at.handles[0].result(S), strict=True)):
        assert sample.finish_reason == "stop"
        text, sampled, logprobs, spoken = [*turns[i]], [], [], ""
        completion = first
        for reply in ([60, 1], [2], None):
            text += completion.tokens.tolist()
            sampled += [True] * len(completion.tokens)
            logprobs += completion.logprobs.tolist()
            spoken += completion.text
            if reply is None:
                break
            rewritten += Ending().encode(completion.text) != completion.tokens[:-1].tolist()
            text += reply
            sampled += [False] * len(reply)
            logprobs += [0.0] * len(reply)
            spoken += Ending().decode(reply)
            completion = pieces[tuple(text)]  # exactly what was asked with
        assert sample.tokens.tolist() == text[2:]
        assert sample.sampled.tolist() == sampled
        assert sample.logprobs.tolist() == logprobs
        assert sample.text == spoken
    assert rewritten  # by decoding and encoding tokens would have changed
    assert {len(turns) for turns in task.heard} == {1, 2, 3}
    seeds = [request.seed for request in at.requests]
    assert len(set(seeds)) == len(seeds)


def test_a_conversation_that_outgrows_max_tokens_is_cut():
    long = "A" * 6
    with generating(Talk(*[long] * 9), tokenizer=Ending(), group_size=8, max_tokens=16, **MIXED) as at:
        samples = begin(at).result(S).samples
    assert {sample.finish_reason for sample in samples} == {"length"}
    for sample in samples:
        assert len(sample.tokens) <= 16
        assert sample.sampled[-1]  # nothing is said that nobody answers
    assert any(not sample.sampled.all() for sample in samples)
    assert all(request.max_tokens >= 1 for request in at.requests)


def test_a_completion_whose_reply_failed_has_no_reward_and_the_others_have_theirs():
    pool, number = HandPool(length), itertools.count()
    with generating(Talk("A", "B"), pool, tokenizer=Ending(), group_size=8, max_tokens=40, **MIXED) as at:
        reply = pool.replies
        pool.replies = lambda prompt, turns: reply(prompt, turns) if next(number) >= 3 else None
        samples = begin(at).result(S).samples
    rewards = [sample.reward for sample in samples]
    assert np.isnan(rewards).sum() == 3
    assert len(pool.asked) == 5
    for sample in samples:
        assert sample.scores in (None, {"length": float(len(sample.text))})
        assert np.isnan(sample.reward) == (sample.scores is None)
    np.testing.assert_array_equal(to_item(Group(0, np.ones(1, np.int32), samples)).state["reward"], [rewards])


def test_a_group_none_of_whose_replies_came_has_no_rewards():
    pool = HandPool(length)
    with generating(Talk("A"), pool, tokenizer=Ending(), group_size=4, max_tokens=40, **MIXED) as at:
        pool.replies = lambda prompt, turns: None
        samples = begin(at).result(S).samples
    ended = [sample.finish_reason == "stop" for sample in samples]
    assert any(ended)
    assert np.isnan([sample.reward for sample in samples]).tolist() == ended


def test_a_reply_to_an_earlier_attempt_is_ignored():
    pool, late = HandPool(length), []
    with generating(Talk("A"), pool, tokenizer=Ending(), group_size=2, max_tokens=40, **MIXED) as at:
        answers = pool.reply
        pool.reply = lambda prompt, turns: late.append((Future(), turns)) or late[-1][0]
        future = begin(at, position=5)
        until(lambda: len(late) == 2, "both turns", S)
        pool.reply = answers
        [job] = at.generation._generating
        at.generation._events.put(lambda: at.generation._lost(job, "was lost"))
        until(lambda: at.metrics.snapshot().get("rollout/lost_groups"), "the next attempt", S)
        for unanswered, _ in late:
            unanswered.set_result(None)
        samples = future.result(S).samples
    assert not np.isnan([sample.reward for sample in samples]).any()


# ---- weights


def test_tokens_have_the_version_that_made_them_across_a_swap(monkeypatch):
    with generating(max_tokens=40, group_size=2) as at:
        seen = 0

        def publish_after_some(delta, submit=at.scheduler.submit):
            nonlocal seen
            seen += len(delta.tokens)
            if seen >= 20 and at.scheduler.version == 0:
                thread = threading.Thread(target=at.scheduler.publish, args=(3, make_params(1)))
                thread.start()
                thread.join(S)

        submit = at.scheduler.submit
        at.scheduler.submit = lambda request: submit(request, publish_after_some)
        item = to_item(begin(at).result(S))
    prompt, *lengths = item.state["lengths"][0].tolist()
    versions = np.split(item.rows["version"][prompt:], np.cumsum(lengths)[:-1])
    for of_one in versions:
        assert of_one[[0, -1]].tolist() == [0, 3]
        assert (np.diff(of_one) >= 0).all()


def test_what_is_asked_for_together_is_taken_at_one_turn():
    with generating() as at:
        taken, begun = [], at.scheduler._take_requests

        def note():
            before = len(at.scheduler._submitted)
            begun()
            if before:
                taken.append(before)

        at.scheduler._take_requests = note
        with at.scheduler.together():
            futures = [begin(at, i, seed=i) for i in range(6)]
        for future in futures:
            future.result(S)
    assert taken == [6]


# ---- what gets lost


def test_a_completion_that_was_cancelled_is_asked_for_again(capsys):
    with generating(start=False) as at:
        future = begin(at, position=12)
        at.handles[0].cancel()
        at.scheduler.start()
        samples = future.result(S).samples
        assert at.metrics.snapshot()["rollout/lost_groups"] == 1
    assert len(at.requests) == 2
    assert {sample.finish_reason for sample in samples} <= {"stop", "length"}
    assert [len(sample.tokens) for sample in samples] == [8, 8]
    assert "the group of prompt 12 ended with 'cancelled'; it is asked for again (1 of 2)." in capsys.readouterr().out


def test_what_comes_of_an_earlier_attempt_is_ignored():
    with generating(start=False) as at:
        future = begin(at)
        late = at.handles[0]
        late._cancel = lambda _: None  # it is complete in the end
        expire(at.generation, 0)
        until(lambda: len(at.requests) == 2, "the next attempt", S)
        at.scheduler.start()
        late.result(S)
        group = future.result(S)
    assert len(at.handles) == 2
    assert len(at.pool.asked) == len(group.samples) == 2
    for sample, completion in zip(group.samples, at.handles[1].result(S), strict=True):
        np.testing.assert_array_equal(sample.tokens, completion.tokens)


def test_an_engine_that_never_answers_ends_the_run_with_the_prompts_name(capsys):
    with generating(start=False, retries=2, timeout_s=50.0) as at:
        begin(at, position=31)
        for attempt in range(3):
            expire(at.generation, 31)
            if attempt < 2:
                until(lambda attempt=attempt: len(at.requests) == attempt + 2, "the next attempt", S)
        error = failure(at.crew)
        assert at.metrics.snapshot()["rollout/lost_groups"] == 2
    assert isinstance(error, RuntimeError)
    for words in ("the group of prompt 31 was not complete after 50 s", "after 3 attempts", "--rollout.timeout-s"):
        assert words in str(error)
    assert capsys.readouterr().out.count("is asked for again") == 2


def test_groups_are_found_late_while_others_keep_the_thread_busy():
    pool = HandPool()
    with generating(pool=pool, retries=0) as at:
        stop = threading.Event()

        def busy():
            if not stop.is_set():
                at.generation._events.put(busy)  # there is always something to do

        at.generation._events.put(busy)
        at.scheduler.submit = lambda request: at.requests.append(request) or Handle(lambda _: None)
        begin(at)
        expire(at.generation, 0)
        assert isinstance(failure(at.crew), RuntimeError)
        stop.set()


def test_a_full_queue_delays_a_group_and_loses_nothing():
    """Others may ask the learner's engine, too: --serve-port."""
    with generating(start=False) as at:
        others = [at.scheduler.submit(Request((3,), 4, num_samples=1024)) for _ in range(4)]
        future = begin(at)
        assert not future.done()
        for handle in others:
            handle.cancel()
        at.scheduler.start()
        assert len(future.result(S).samples) == 2
        assert "rollout/lost_groups" not in at.metrics.snapshot()


def test_a_scheduler_that_failed_is_the_failure_of_the_crew():
    with generating(start=False) as at:
        begin(at)
        at.scheduler._take_requests = lambda: 1 / 0
        at.scheduler.start()
        assert isinstance(failure(at.crew), ZeroDivisionError)

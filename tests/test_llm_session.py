"""Parts of an LLM run's process: how it closes, what it lets people read, and its warm start on few prompts."""

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from decode_harness import CONFIG
from processes import ROOT
from rollout_harness import Alphabet, Words

from seedx import llm_warm_start, sharding
from seedx.checks import ConfigError
from seedx.envs.text.group import Group, Sample
from seedx.envs.text.prompts import PromptSource
from seedx.envs.text.sample_log import SampleLog
from seedx.envs.text.task import Prompt
from seedx.grpo_config import GrpoConfig, RolloutConfig, TextLearnerConfig, WarmStartConfig
from seedx.learner.token_logprobs import Model
from seedx.llm_config import LlmConfig
from seedx.llm_resume import Progress
from seedx.llm_session import LlmSession
from seedx.llm_setup import Setup, completions_ahead
from seedx.llm_view import waiting_stage
from seedx.threads import Crew

# ---- the end


def test_what_rollouts_are_still_at_is_closed_after_they_were_stopped(tmp_path):
    """Else a reward that is cancelled, or a pool that takes no more, would be a failure: of a run that ended well."""
    crew, closed = Crew(), []
    session = LlmSession(LlmConfig(), tmp_path, False, crew, [])

    def close(name):
        return lambda *_: closed.append((name, crew.stop.is_set()))

    session._checkpointer = SimpleNamespace(close=close("checkpointer"))
    session._profile = SimpleNamespace(close=close("profile"))
    session._reporter = SimpleNamespace(finish=close("reporter"))
    session._server = SimpleNamespace(stop=close("server"))
    session._pool = SimpleNamespace(close=close("pool"))
    session.replay = SimpleNamespace(close=close("replay"))
    session._finish("steps")
    assert closed == [
        ("checkpointer", False),
        ("profile", False),
        ("reporter", False),
        ("server", True),
        ("pool", True),
        ("replay", True),
    ]
    assert crew.failure is None


@pytest.mark.parametrize(("updates", "why", "fails"), [(0, "nothing", True), (0, None, False), (1, "nothing", False)])
def test_time_that_is_over_without_an_update_for_want_of_rewards_is_a_failure(tmp_path, updates, why, fails):
    crew = Crew()
    session = LlmSession(LlmConfig(seconds=5.0), tmp_path, False, crew, [])
    session._ending = SimpleNamespace(reason=lambda _: "seconds")
    session._pool = SimpleNamespace(why_nothing_scored=lambda: why)
    session.learner = SimpleNamespace(state=SimpleNamespace(updates=updates, env_steps=0))
    session._first_update = 0
    assert session._learn() == ("failed" if fails else "seconds")
    assert isinstance(crew.failure, ConfigError) == fails
    if fails:
        assert str(crew.failure) == "--seconds (5) are over without an update: nothing"


def test_a_last_checkpoint_that_cannot_be_written_is_a_failure_though_the_crew_stops(tmp_path):
    crew = Crew()
    session = LlmSession(LlmConfig(), tmp_path, False, crew, [])

    def full(**_):
        raise OSError("no space left")

    nothing = SimpleNamespace(close=lambda: None, finish=lambda _: None)
    session._checkpointer = session._profile = session._reporter = session._pool = session.replay = nothing
    session._save, session.learning = full, True
    session._finish("steps")
    assert isinstance(crew.failure, OSError)
    assert crew.stop.is_set()


def test_a_checkpoint_holds_no_rewards_of_completions_that_a_resume_generates_anew(tmp_path, monkeypatch):
    session, saved = LlmSession(LlmConfig(), tmp_path, False, Crew(), []), []
    learner = SimpleNamespace(state=SimpleNamespace(position=7), trainable=None)
    session._checkpointer, session._curriculum, session.learner = None, None, learner
    session._earlier, session._scores = Progress(0.0, []), SimpleNamespace(before=np.array([]))
    session._rollouts = SimpleNamespace(rewards=lambda before: [f"of prompts before {before}"])
    monkeypatch.setattr("seedx.llm_resume.save_llm_run", lambda *arguments: saved.append(arguments))
    session._save()
    assert saved[0][4].rewards == ["of prompts before 7"]


def test_all_completions_of_a_run_may_wait_for_a_reward_and_those_of_an_evaluation_too():
    large = LlmConfig(max_staleness=7, grpo=GrpoConfig(group_size=16), learner=TextLearnerConfig(batch_size=512))
    assert completions_ahead(large) == 8 * 512 * 16 + 256
    redundant = dataclasses.replace(large, rollout=RolloutConfig(redundant=2))
    assert completions_ahead(redundant) == 8 * 512 * 18 + 256


# ---- the console

STILL = {"env_steps": 64, "updates": 2, "decode/tokens": 900}


@pytest.mark.parametrize(
    ("now", "said"),
    [
        ({"updates": 3}, None),
        ({"decode/tokens": 901}, None),
        ({}, "rewards are being computed"),
        ({"learner/busy_s": 71.6}, "an update or a checkpoint has been under way for 72 s"),
        ({"learner/busy_s": 71.6, "decode/occupancy": 0.5}, "makes no tokens"),
        ({"decode/hosts": 0}, "no decode host takes requests"),
        ({"decode/hosts": 1}, "rewards are being computed"),
        ({"replay/gone_s": 4.0, "replay/give_up_in_s": 56.0}, "gone for 4 s; 56 s left"),
    ],
)
def test_what_is_waited_for(now, said):
    stage = waiting_stage(STILL, STILL | now)
    assert stage is None if said is None else said in stage


# ---- samples


def group_of(*texts, reward=1.0):
    one = np.ones(1, np.int32)
    return Group(
        3,
        one,
        [Sample(one, one > 0, one.astype(np.float32), one, "stop", text, {"right": 1.0}, reward) for text in texts],
    )


def test_samples_are_lines_of_json_and_a_page_that_shows_texts_as_they_are(tmp_path, monkeypatch):
    now = [100.0]
    monkeypatch.setattr("seedx.envs.text.sample_log.time.monotonic", lambda: now[0])
    log = SampleLog(tmp_path, lambda group: "<b>2+2=</b>", "a & b")
    log.add(group_of("<script>4</script>", "five\n€\ufffd"), 7)
    now[0] += 1
    log.add(group_of("too soon"), 8)
    now[0] += 5
    log.add(group_of("later", reward=float("nan")), 9)
    rows = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert [row["updates"] for row in rows] == [7, 9]
    assert rows[0]["prompt"] == "<b>2+2=</b>"
    assert rows[0]["completions"][1] == {
        "text": "five\n€\ufffd",
        "reward": 1.0,
        "scores": {"right": 1.0},
        "tokens": 1,
        "finish_reason": "stop",
    }
    assert rows[1]["completions"][0]["reward"] is None
    page = (tmp_path / "samples.html").read_text(encoding="utf-8")
    for words in ("&lt;script&gt;4&lt;/script&gt;", "&lt;b&gt;2+2=&lt;/b&gt;", "a &amp; b", "€\ufffd", "not scored"):
        assert words in page
    assert "<script>" not in page
    assert page.index("later") < page.index("five")  # the newest first


def test_samples_are_utf8_whatever_the_locale(tmp_path):
    script = f"""
import locale, sys
from pathlib import Path
sys.path.insert(0, {str(ROOT)!r})
assert locale.getpreferredencoding(False).upper() not in ("UTF-8", "UTF8")
from seedx.envs.text.group import Group
from seedx.envs.text.sample_log import SampleLog
SampleLog(Path({str(tmp_path)!r}), lambda group: "\\ufffd", "t").add(Group(0, None, []), 1)
"""
    env = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    subprocess.run([sys.executable, "-c", script], env=env, check=True, timeout=100)
    assert "\ufffd" in (tmp_path / "samples.html").read_text(encoding="utf-8")


# ---- warm start


def batches_of(monkeypatch, prompts, count):
    """What a warm start learns from in its first updates, four texts in each; prompts have up to five tokens."""
    batches = []

    def learn(model, wanted, params, shown, **_):
        batches.extend(shown(i) for i in range(count))
        return params

    monkeypatch.setattr(llm_warm_start, "warm_start", learn)
    task = Words()
    task._prompts = prompts
    setup = Setup(task, "tiny", CONFIG, Alphabet(), None, sharding.serve_mesh(), 5, 4, contextlib.nullcontext())
    config = LlmConfig(warm_start=WarmStartConfig(reward=0.5, batch_size=4))
    source = PromptSource(prompts, 1)
    llm_warm_start.warm_started(config, setup, source, Model(CONFIG), {}, lambda: None, lambda _: None)
    return batches


def test_a_warm_start_takes_few_prompts_as_often_as_it_needs(monkeypatch):
    batches = batches_of(monkeypatch, [Prompt("AB", answer="B"), Prompt("C" * 6, answer="B")], count=100)
    assert [len(batch) for batch in batches] == [4] * 100
    texts = [text for batch in batches for text in batch]
    assert all(tokens == [1, 2, 2, 0] and own == [False, False, True, True] for tokens, own in texts)


@pytest.mark.parametrize(("answer", "advised"), [("B", True), ("BC", False)])  # with its end 2 and 3 of 4 tokens
def test_a_long_warm_start_says_once_what_makes_it_long(monkeypatch, answer, advised):
    now, said = [0.0], []

    def learn(model, wanted, params, shown, *, progress, **_):
        for update in range(30):
            shown(update)
            now[0] += 1.0
            progress(update, 0.25)
        return params

    monkeypatch.setattr(llm_warm_start, "warm_start", learn)
    monkeypatch.setattr(llm_warm_start, "time", SimpleNamespace(monotonic=lambda: now[0]))
    prompts = [Prompt("AB", answer=answer)]
    setup = Setup(Words(), "tiny", CONFIG, Alphabet(), None, sharding.serve_mesh(), 5, 4, contextlib.nullcontext())
    config = LlmConfig(warm_start=WarmStartConfig(reward=0.5, batch_size=4))
    source = PromptSource(prompts, 1)
    llm_warm_start.warm_started(config, setup, source, Model(CONFIG), {}, lambda: None, said.append)
    assert "warm start: 2 updates, 25.0% right, 1 s each" in said
    advice = [
        "warm start: an update computes 4 rows of 16 tokens, 4 of them for the completion (--rollout.max-tokens), and "
        "the longest answer so far has 2. Give what suffices, and all is faster, the run too."
    ]
    assert [line for line in said if "--rollout.max-tokens" in line] == (advice if advised else [])


def test_a_warm_start_on_prompts_that_do_not_fit_says_so(monkeypatch):
    with pytest.raises(ConfigError, match="that fit"):
        batches_of(monkeypatch, [Prompt("A" * 6, answer="B"), Prompt("E", answer="F" * 9)], count=1)

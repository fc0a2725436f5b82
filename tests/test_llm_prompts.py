"""What a task's own errors are told as, and which prompts a run passes over."""

import json

import pytest

from seedx.checks import ConfigError
from seedx.envs.text.blame import blame, describe
from seedx.envs.text.load import load_task
from seedx.envs.text.prompts import PromptSource
from seedx.envs.text.task import Prompt
from seedx.llm_prompts import first_prompts, prompt_tokens, prompts_of

OWN = """\
import json
from seedx.envs.text.task import Prompt

def inside_a_library():
    json.loads("{nothing")

class Own:
    def __init__(self, prompts):
        self._prompts = prompts
    def prompts(self, split):
        if isinstance(self._prompts, Exception):
            raise self._prompts
        return self._prompts
    def reward(self, prompt, completion):
        return 0.0
"""


ODD = Prompt("a")
object.__setattr__(ODD, "answer", 5)  # tests check types, runs do not


class Lazy(list):
    def __getitem__(self, index):
        raise KeyError(index)


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A user's module, loaded anew."""
    (tmp_path / "own_errors.py").write_text(OWN)
    (tmp_path / "own_syntax.py").write_text("a = 1\nb = (\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(__import__("sys").modules, "own_errors", raising=False)
    return __import__("own_errors")


# ---- errors of a task


def test_an_error_is_told_with_the_users_own_place_and_not_the_librarys(own):
    with pytest.raises(ConfigError, match=r"^making it raised json.*: .* \(own_errors.py:5\)$"), blame("making it"):
        own.inside_a_library()


@pytest.mark.usefixtures("own")
def test_a_file_that_is_no_python_is_told_with_its_line():
    with pytest.raises(ConfigError, match=r"it raised SyntaxError: .* \(own_syntax.py:2\)$"), blame("it"):
        load_task("own_syntax:make")


def test_an_exit_is_no_way_out_and_a_clear_word_stays_as_it_is():
    with pytest.raises(ConfigError, match=r"raised SystemExit: 3 \(test_llm_prompts.py:\d+\)$"), blame("it"):
        raise SystemExit(3)
    with pytest.raises(ConfigError, match=r"^clear$"), blame("it"):
        raise ConfigError("clear")
    assert describe(ValueError("not raised")) == "ValueError: not raised"


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        (LookupError("gone"), r"task t: prompts\('test'\) raised LookupError: gone \(own_errors.py:12\)"),
        (None, r"task t: prompts\('test'\) returned NoneType; it must return a list"),
        (iter([]), r"task t: prompts\('test'\) returned list_iterator; it must return a list"),
        (["a"], r"task t: prompts\('test'\)\[0\] is 'a'; it must be a seedx.envs.text.task.Prompt"),
        ([Prompt("a"), ODD], r"prompts\('test'\)\[1\] is Prompt\(.* answer=5.*; it must be .* of type str"),
        (Lazy([Prompt("a")]), r"task t: a prompt of prompts\('test'\) raised KeyError: 0 \(test_llm_prompts.py:"),
    ],
)
def test_prompts_that_cannot_be_had_are_told_with_task_and_call(own, prompts, message):
    with pytest.raises(ConfigError, match=message):
        first_prompts(prompts_of(own.Own(prompts), "t", "test"), "t", "test", 10)


def test_a_prompt_that_cannot_be_made_later_is_told_too():
    source = PromptSource([Prompt("a")], 0)
    source._prompts = Lazy([Prompt("a")])  # whose types a test would check otherwise
    with pytest.raises(ConfigError, match=r"prompt 0 of the task raised KeyError: 0 \(test_llm_prompts.py:"):
        source.at(0)


# ---- prompts that are too long


def room_for(task, given, room):
    """The longest prompt of a run, one token for each character, and what was said."""
    said = []
    return prompt_tokens(task, "t", lambda prompt: prompt.text, given, room, said.append), said


def test_prompts_that_there_is_no_room_for_are_passed_over_with_one_warning(own):
    task = own.Own([Prompt("a" * length) for length in (3, 9, 4, 11, 5)])
    assert room_for(task, 0, 11) == (11, [])
    longest, (said,) = room_for(task, 0, 8)
    assert longest == 5
    assert said == (
        "warning: 2 of 5 prompts are passed over (numbers 2, 4): they have up to 11 tokens, more than the 8 tokens "
        "that the model has room for beside a completion; lower --rollout.max-tokens."
    )
    longest, (said,) = room_for(task, 9, 20)
    assert longest == 9
    assert "1 of 5 prompts are passed over (number 4)" in said
    assert said.endswith("more than --rollout.max-prompt-tokens (9); raise it.")


@pytest.mark.parametrize("query", ["", "?reward=task"])
def test_of_a_file_the_first_lines_are_named(tmp_path, query):
    lines = [json.dumps({"prompt": "a" * (number % 2 + 1), "answer": "", "split": "train"}) for number in range(16)]
    lines[3] = json.dumps({"prompt": "aa", "answer": "", "split": "test"})
    (tmp_path / "own.jsonl").write_text("\n" + "\n".join(lines))
    longest, (said,) = room_for(load_task(f"jsonl:{tmp_path}/own.jsonl{query}"), 0, 1)
    assert longest == 1
    assert "7 of 15 prompts are passed over (lines 3, 7, 9, 11, 13, ...)" in said


def test_a_run_is_refused_when_all_prompts_are_too_long_as_far_as_one_can_tell(own):
    task = own.Own([Prompt("a" * 7), Prompt("a" * 9)])
    with pytest.raises(ConfigError, match=r"all 2 prompts are longer than the 6 tokens .* The shortest has 7 tokens"):
        room_for(task, 0, 6)
    with pytest.raises(ConfigError, match=r"all 2 prompts are longer than --rollout.max-prompt-tokens \(6\); raise it"):
        room_for(task, 6, 9)
    many = own.Own([Prompt("a" * 7)] * 2000 + [Prompt("a")])
    assert room_for(many, 6, 9)[0] == 6  # the last one fits
    with pytest.raises(ConfigError, match="all the first 2,000 prompts are longer"):
        room_for(many, 0, 6)
    with pytest.raises(ConfigError, match=r"task t has no prompts \(0\)"):
        room_for(own.Own([]), 0, 6)

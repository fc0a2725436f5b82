"""reasoning-gym's tasks.

Most need the package; SEEDX_REQUIRE naming `tasks` makes its absence fail.
"""

import importlib.util
import json
import os
import sys
from fractions import Fraction

import pytest

from seedx.checks import ConfigError
from seedx.envs.text import reasoning_gym_task
from seedx.envs.text.load import load_task
from seedx.envs.text.reasoning_gym_task import SIZES
from seedx.envs.text.task import Prompt, Task

# Scorers of several kinds, among them some that look at tuples (rearc), Fractions (gsm_symbolic), keys that are no
# strings (graph_color) and NumPy's strings (knights_knaves). coin_flip and tower_of_hanoi have few different questions.
NAMES = ["basic_arithmetic", "gsm_symbolic", "graph_color", "knights_knaves", "rearc", "coin_flip", "tower_of_hanoi"]
NO_ANSWER = {"graph_color"}  # many are right, and the dataset names none


@pytest.fixture(scope="module")
def package():
    """The module; without it the test is skipped, or fails if SEEDX_REQUIRE names tasks."""
    if importlib.util.find_spec("reasoning_gym") is None:
        if "tasks" in os.environ.get("SEEDX_REQUIRE", "").split():
            pytest.fail("SEEDX_REQUIRE names tasks, and reasoning_gym cannot be imported")
        pytest.skip("needs reasoning-gym")
    import reasoning_gym

    return reasoning_gym


def through_json(prompt):
    return Prompt.from_json(json.loads(json.dumps(prompt.to_json(), allow_nan=False)))


@pytest.mark.external
@pytest.mark.usefixtures("package")
@pytest.mark.parametrize("name", NAMES)
def test_the_dataset_s_own_answer_is_right_and_no_question_is_in_both_splits(name):
    task = load_task(f"reasoning_gym:{name}")
    assert isinstance(task, Task)
    train, test = task.prompts("train"), task.prompts("test")
    assert (len(train), len(test)) == (SIZES["train"], SIZES["test"])
    some_train, some_test = train[:30], test[:30]
    assert not {prompt.text for prompt in some_train} & {prompt.text for prompt in some_test}
    for prompt in some_train + some_test:
        assert prompt.text.strip()
        assert task.reward(through_json(prompt), "surely not the answer") < 0.5
        if name not in NO_ANSWER:
            for completion in (
                prompt.answer,
                f" {prompt.answer}\n",
                f"<think>1</think><answer>{prompt.answer}</answer>.",
            ):
                assert task.reward(through_json(prompt), completion) == 1.0


@pytest.mark.external
@pytest.mark.parametrize("name", NAMES)
def test_scores_do_not_depend_on_the_way_through_json(package, name):
    task, dataset = load_task(f"reasoning_gym:{name}"), package.create_dataset(name, seed=0, size=10_000)
    for prompt in task.prompts("train")[:5]:
        entry = next(e for e in (dataset[i] for i in range(10_000)) if prompt.text == f"{e['question']}\n")
        for answer in (entry["answer"] or "", "1", "", "None"):
            assert task.reward(through_json(prompt), answer) == dataset.score_answer(answer.strip(), entry)


@pytest.mark.external
@pytest.mark.usefixtures("package")
def test_prompts_are_the_same_each_time():
    once, again = (load_task("reasoning_gym:chain_sum") for _ in range(2))
    for split in ("train", "test"):
        assert once.prompts(split)[:5] == again.prompts(split)[:5] == once.prompts(split)[:5]


@pytest.mark.external
@pytest.mark.usefixtures("package")
def test_an_unknown_dataset_is_refused_with_those_that_are_known():
    with pytest.raises(
        ConfigError, match=r"'reasoning_gym:chain_sums' is unknown. Did you mean 'chain_sum'.* has ab, "
    ):
        load_task("reasoning_gym:chain_sums")
    with pytest.raises(ConfigError, match=r"'reasoning_gym:' is unknown\. reasoning-gym has ab, .*, zebra_puzzles\."):
        load_task("reasoning_gym:")
    with pytest.raises(ConfigError, match="'reasoning_gym:composite' is unknown"):
        load_task("reasoning_gym:composite")


def test_without_the_package_it_is_said_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ConfigError, match=r"needs the package reasoning-gym \(.*\): pip install -e \"\.\[tasks\]\"\."):
        load_task("reasoning_gym:chain_sum")


class FewQuestions:
    """A dataset of `num_questions` questions; an entry in three cannot be made."""

    def __init__(self, num_questions):
        self.num_questions = num_questions

    def __call__(self, name, seed, size):
        return self

    def __getitem__(self, index):
        if index % 3 == 0:
            raise ZeroDivisionError("this one cannot be made")
        return {"question": f"q{index % self.num_questions}", "answer": None, "metadata": {(1, 2): [Fraction(1, 3)]}}

    def score_answer(self, answer, entry):
        return entry["metadata"] == {(1, 2): [Fraction(1, 3)]}


def few_questions(monkeypatch, num_questions):
    monkeypatch.setattr(reasoning_gym_task, "_creator", lambda name: FewQuestions(num_questions))
    return load_task("reasoning_gym:few")


def test_entries_that_cannot_be_made_are_passed_over(monkeypatch):
    task = few_questions(monkeypatch, 47)
    splits = [{prompt.text for prompt in task.prompts(split)} for split in ("train", "test")]
    assert not splits[0] & splits[1]
    assert len(splits[0] | splits[1]) > 40
    assert task.reward(through_json(task.prompts("test")[0]), "") == 1.0


def test_a_dataset_with_too_few_questions_is_refused(monkeypatch):
    with pytest.raises(ConfigError, match=r"'reasoning_gym:few' has too few .*: of 50, none is for train \(and some"):
        few_questions(monkeypatch, 1).prompts("train")


@pytest.mark.parametrize(
    "value",
    [
        *(None, True, 1, 1.5, "a", 10**30, Fraction(-1, 3), (), [], {}, (1, (2,)), [[1], (2,)], {"a": (1,)}),
        *({1: "a", "1": "b"}, {(1, 2): {}}, {"dict": [], "tuple": 1}, {"tuple": [1]}, {"fraction": "1/2"}),
    ],
    ids=repr,
)
def test_an_entry_is_the_same_after_json(value):
    plain = json.loads(json.dumps(reasoning_gym_task._to_plain(value)))
    again = reasoning_gym_task._from_plain(plain)
    assert (repr(again), type(again)) == (repr(value), type(value))


def test_an_entry_that_json_cannot_hold_is_named():
    with pytest.raises(TypeError, match=r"holds object .*, which has no form in JSON here"):
        reasoning_gym_task._to_plain({"a": [object()]})


SPELL = "spell_backward?min_word_len=3&max_word_len=3"


@pytest.mark.external
@pytest.mark.usefixtures("package")
def test_settings_of_the_dataset_and_a_conversation_that_shows_answers():
    task = load_task(f"reasoning_gym:{SPELL}&shots=2&system=Say it.")
    for prompt in (*task.prompts("train")[:20], *task.prompts("test")[:20]):
        system, *shown, asked = prompt.messages
        assert system == {"role": "system", "content": "Say it."}
        assert [message["role"] for message in (*shown, asked)] == ["user", "assistant"] * 2 + ["user"]
        assert prompt.text == ""
        assert asked["content"].endswith(f": {prompt.answer[::-1]}")
        assert len(prompt.answer) == 3
        for question, answer in zip(shown[::2], shown[1::2], strict=True):
            assert question["content"].endswith(f": {answer['content'][::-1]}")
        assert task.reward(through_json(prompt), prompt.answer) == 1.0
    shown = {message["content"] for message in task.prompts("test")[0].messages[:-1]}
    assert not shown & {prompt.messages[-1]["content"] for prompt in task.prompts("test")[:]}


@pytest.mark.external
@pytest.mark.usefixtures("package")
def test_values_are_json_or_else_texts():
    task = load_task('reasoning_gym:basic_arithmetic?operators=["+"]&min_terms=2&max_terms=2&allow_parentheses=false')
    for prompt in task.prompts("train")[:50]:
        assert prompt.text.count("+") == 1
        assert not prompt.messages


@pytest.mark.external
@pytest.mark.usefixtures("package")
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("spell_backward?min_word_len", "'min_word_len' is no setting"),
        ("spell_backward?=3", "'=3' is no setting"),
        ("spell_backward?shots=1&shots=2", "'shots=2' is no setting"),
        ("spell_backward?size=3", "'size=3' is no setting"),
        ("spell_backward?min_words=3", "refuses its settings.*min_words"),
        ("spell_backward?min_word_len=9&max_word_len=2", "refuses its settings"),
        ("spell_backward?shots=-1", r"shots \(-1\) must be"),
        ("spell_backward?shots=many", r"shots \('many'\) must be"),
        ("spell_backward?shots=true", r"shots \(True\) must be"),
        ("spell_backwards?shots=1", "Did you mean 'spell_backward'"),
    ],
)
def test_settings_that_are_none_are_refused(name, said):
    with pytest.raises(ConfigError, match=said):
        load_task(f"reasoning_gym:{name}")


@pytest.mark.external
@pytest.mark.usefixtures("package")
def test_answers_that_a_dataset_does_not_name_cannot_be_shown():
    with pytest.raises(ConfigError, match="names no answers to show"):
        load_task("reasoning_gym:graph_color?shots=1").prompts("train")


@pytest.mark.external
@pytest.mark.usefixtures("package")
def test_other_rewards_follow_the_settings(tmp_path, monkeypatch):
    (tmp_path / "letters.py").write_text("def few(prompt, completion):\n    return -len(completion)\n")
    monkeypatch.syspath_prepend(tmp_path)
    task = load_task(f"reasoning_gym:{SPELL}&shots=1&reward=task&reward=letters:few&weight=0.5")
    prompt = task.prompts("train")[0]
    assert len(prompt.messages) == 3
    assert task.reward(prompt, prompt.answer) == {"reward": 1.0, "few": -3.0}
    assert task.reward_weights["few"] == 0.5

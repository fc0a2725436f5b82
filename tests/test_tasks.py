"""The built-in tasks, and tasks by name."""

import json
import re
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seedx.bpe import byte_tokenizer
from seedx.checks import ConfigError
from seedx.envs.text.distinct_codes import distinct_codes
from seedx.envs.text.lazy_prompts import LazyPrompts
from seedx.envs.text.load import load_task
from seedx.envs.text.task import MultiTurnTask, Prompt, Task

RULES = {
    "reverse": lambda text: text.removesuffix("=")[::-1],
    "sort": lambda text: "".join(sorted(text.removesuffix("="))),
    "sums": lambda text: str(sum(map(int, text.removesuffix("=").split("+")))),
    "calculator": lambda text: str(eval(text.removesuffix("?"))),
}
SIZES = {"reverse": (20_000, 500), "sort": (20_000, 500), "sums": (9_500, 500), "calculator": (20_000, 500)}
FORMS = {
    "reverse": "[a-z]{4,6}=",
    "sort": "[a-z]{4,6}=",
    "sums": r"\d{1,2}\+\d{1,2}=",
    "calculator": r"\d\d[-+*]\d\d\?",
}
STRINGS = ["reverse", "sort", "sums"]


@pytest.mark.parametrize("name", RULES)
def test_whole_splits(name):
    task = load_task(name)
    train, test = (list(task.prompts(split)) for split in ("train", "test"))
    assert (len(train), len(test)) == SIZES[name]
    assert len({prompt.text for prompt in train + test}) == len(train) + len(test), "no prompt is twice or in both"
    for prompts in (train, test):
        answers = Counter(prompt.answer for prompt in prompts)
        assert max(answers.values()) < 0.05 * len(prompts), "who ignores the prompt is rarely right"
    assert all(re.fullmatch(FORMS[name], prompt.text) for prompt in train + test)
    assert all(prompt.answer == RULES[name](prompt.text) for prompt in train + test)
    if name in ("reverse", "sort"):
        lengths = Counter(len(prompt.answer) for prompt in train + test)
        assert sorted(lengths) == [4, 5, 6]
        assert max(lengths.values()) - min(lengths.values()) <= 1, "each length is as often"


@pytest.mark.parametrize("name", RULES)
def test_prompts_are_the_same_each_time(name):
    once, again = (load_task(name).prompts("train") for _ in range(2))
    assert once[:100] == again[:100]
    assert once[-1] == again[len(again) - 1]


def test_prompts_are_the_same_in_every_version():
    assert [load_task(name).prompts("test")[0].text for name in RULES] == ["fjjm=", "gdoz=", "22+17=", "94*36?"]


@pytest.mark.parametrize("name", STRINGS)
def test_the_answer_alone_is_rewarded(name):
    task = load_task(name)
    for prompt in task.prompts("test")[:50]:
        assert task.reward(prompt, prompt.answer) == 1.0
        assert task.reward(prompt, f" {prompt.answer}\n") == 1.0
        wrong = ["", prompt.text, prompt.answer + prompt.answer, prompt.answer[:-1], f"{prompt.answer}."]
        assert [task.reward(prompt, completion) for completion in wrong] == [0.0] * 5


@pytest.mark.parametrize("name", STRINGS)
def test_max_tokens_suffice_for_bytes_and_eos(name):
    task, tokenizer = load_task(name), byte_tokenizer()
    longest = max(len(tokenizer.encode(prompt.answer, add_bos=False)) for prompt in task.prompts("test"))
    assert longest + 1 <= task.max_tokens <= 2 * longest


def converse(task, prompt, turns):
    """What the reward sees, once the model has said these turns, or as many as it may."""
    text = ""
    for i, turn in enumerate(turns):
        text += turn
        reply = task.reply(prompt, turns[: i + 1])
        if reply is None:
            return text
        text += reply
    raise AssertionError("the conversation goes on")


def test_the_calculator_answers_a_call_and_the_answer_after_it_counts():
    task, tokenizer = load_task("calculator"), byte_tokenizer()
    for prompt in task.prompts("test")[:100]:
        turns = [f"calc:{prompt.text[:-1]};", prompt.answer]
        text = converse(task, prompt, turns)
        assert text == f"{turns[0]}={prompt.answer}\n{prompt.answer}"
        assert task.reward(prompt, text) == {"answer": 1.0, "call": 1.0}
        assert len(tokenizer.encode(text, add_bos=False)) + 2 <= task.max_tokens  # with the EOS of two turns


@pytest.mark.parametrize(
    ("turns", "answer", "call"),
    [
        (["calc:37*58;", "2147"], 0.0, 1.0),
        (["calc:37*58;", ""], 0.0, 1.0),
        (["calc:37*58;", " 2146\n"], 1.0, 1.0),
        ([" calc:37*58;\n", "2146"], 1.0, 1.0),
        (["calc:37+58;", "2146"], 1.0, 0.0),
        (["calc:37+58;", "95"], 0.0, 0.0),
        (["2146"], 0.0, 0.0),
        (["37*58=2146"], 0.0, 0.0),
        (["calc:37*58"], 0.0, 0.0),
        (["calc:37*58;2146"], 0.0, 0.0),
        (["calc:37**58;"], 0.0, 0.0),
        (["calc:99999*9;"], 0.0, 0.0),
        ([""], 0.0, 0.0),
    ],
)
def test_the_calculator_s_reward(turns, answer, call):
    task, prompt = load_task("calculator"), Prompt("37*58?", answer="2146")
    assert task.reward(prompt, converse(task, prompt, turns)) == {"answer": answer, "call": call}


def test_the_calculator_s_rewards_add_up_to_one():
    assert sum(load_task("calculator").reward_weights.values()) == 1.0


def test_kinds_of_tasks():
    assert all(isinstance(load_task(name), Task) for name in RULES)
    assert [name for name in RULES if isinstance(load_task(name), MultiTurnTask)] == ["calculator"]


@given(stream=st.integers(0, 2**31), high=st.integers(1, 300), data=st.data())
def test_codes_are_distinct_and_a_longer_list_begins_with_the_shorter(stream, high, data):
    count = data.draw(st.integers(1, high))
    codes = distinct_codes(stream, count, high).tolist()
    assert len(set(codes)) == count
    assert 0 <= min(codes) <= max(codes) < high
    assert distinct_codes(stream, high, high)[:count].tolist() == codes


def test_lazy_prompts_are_a_sequence():
    lazy = LazyPrompts(4, lambda i: Prompt(str(i)))
    assert [prompt.text for prompt in lazy] == ["0", "1", "2", "3"]
    assert (lazy[-1].text, [prompt.text for prompt in lazy[::2]]) == ("3", ["0", "2"])
    with pytest.raises(IndexError):
        lazy[4]


def test_prompts_survive_json():
    prompt = Prompt(messages=({"role": "user", "content": "é"},), answer="1", extra={"a": [1, None]})
    assert Prompt.from_json(json.loads(json.dumps(prompt.to_json()))) == prompt


OWN = """
from seedx.envs.text.task import Prompt

class Own:
    def prompts(self, split):
        return [Prompt("x")]
    def reward(self, prompt, completion):
        return 1.0

class NoReward:
    def prompts(self, split):
        return []

def with_attributes(**attributes):
    task = Own()
    vars(task).update(attributes)
    return task

make = Own
no_reward = NoReward
nothing = lambda: None
a_class = lambda: Own
tokens = lambda: with_attributes(max_tokens=0)
waits = lambda: with_attributes(reward_waits=1)
weights = lambda: with_attributes(reward_weights={"a": float("nan")})
reply = lambda: with_attributes(reply="yes")
prepare = lambda: with_attributes(prepare=True)
good = lambda: with_attributes(max_tokens=3, reward_waits=True, reward_weights={"a": 2})

def raises():
    raise OSError("no disk")
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    (tmp_path / "own_tasks.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("own")
def test_an_own_task_is_loaded():
    assert load_task("own_tasks:make").prompts("train")[0].text == "x"
    assert load_task("own_tasks:good").max_tokens == 3
    with pytest.raises(OSError, match="no disk"):
        load_task("own_tasks:raises")


@pytest.mark.usefixtures("own")
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("own_tasks:no_reward", r"own_tasks:no_reward returned NoReward; .* it lacks reward\."),
        ("own_tasks:nothing", r"returned NoneType; it must return a .*Task, .* it lacks prompts and reward\."),
        ("own_tasks:a_class", r"returned Own, a class; it must return .*, an object"),
        ("own_tasks:tokens", r"own_tasks:tokens: max_tokens \(0\) must be a positive int"),
        ("own_tasks:waits", r"reward_waits \(1\) must be True or False"),
        ("own_tasks:weights", r"reward_weights \(\{'a': nan\}\) must map names to finite numbers"),
        ("own_tasks:reply", r"reply \('yes'\) must be a method of \(prompt, turns\)"),
        ("own_tasks:prepare", r"prepare \(True\) must be a method of \(\)"),
        ("own_tasks:mak", r"no function 'mak'. Did you mean 'own_tasks:make'\? --task takes \"reverse\""),
        ("no_such_tasks:make", "task 'no_such_tasks:make' is unknown: there is no module 'no_such_tasks'"),
        ("revers", r"task 'revers' is unknown. Did you mean 'reverse'\? --task takes .*\"jsonl:PATH\""),
        ("", "task '' is unknown. --task takes"),
        (":", "task ':' is unknown: it is not of the form 'module:function'"),
        ("reverse:", "task 'reverse:' is unknown: it is not of the form 'module:function'"),
    ],
)
def test_what_is_no_task_is_refused(name, message):
    with pytest.raises(ConfigError, match=message):
        load_task(name)

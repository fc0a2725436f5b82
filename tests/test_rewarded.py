"""Tasks with other rewards than their own, by name and in Python."""

import pytest

from seedx.checks import ConfigError
from seedx.envs.text.judge import Judge
from seedx.envs.text.load import load_task
from seedx.envs.text.rewarded import Rewarded, Score
from seedx.envs.text.task import MultiTurnTask, Prompt, Task
from seedx.llm_config import LlmConfig
from seedx.llm_setup import set_up
from seedx.reward_config import RewardConfig

OWN = """
from seedx.envs.text.rewarded import Score

def brevity(prompt, completion):
    return 1 - len(completion) / 10

def echo(prompt, completion):
    return float(prompt.text in completion)
echo.version = "7"

class Learned:
    reward_waits = True
    prepared = 0
    def prepare(self):
        self.prepared += 1
    def __call__(self, prompt, completion):
        return Score(2.0, self.prepared)
learned = Learned()

def reward(prompt, completion):
    return 0.0

def answer(prompt, completion):
    return 0.0

number = 3
"""


@pytest.fixture(autouse=True)
def own(tmp_path, monkeypatch):
    (tmp_path / "own_rewards.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)


def weighted(task, prompt, completion):
    """As the rollouts count it."""
    scores = task.reward(prompt, completion)
    return sum(task.reward_weights.get(name, 1.0) * score for name, score in scores.items())


def test_a_function_by_its_path_replaces_the_reward():
    plain, task = load_task("reverse"), load_task("reverse?reward=own_rewards:brevity")
    assert task.prompts("test")[:3] == plain.prompts("test")[:3]
    assert task.max_tokens == plain.max_tokens
    assert task.reward(Prompt("ab="), "ba") == {"brevity": 0.8}
    assert (task.reward_waits, isinstance(task, Task), isinstance(task, MultiTurnTask)) == (False, True, False)


def test_rewards_are_weighed_and_versions_count_nothing():
    task = load_task(
        "reverse?reward=task&reward=own_rewards:echo&weight=0.5&reward=own_rewards:brevity&weight=-1&reward="
        "own_rewards:learned"
    )
    task.prepare()
    prompt = Prompt("ab=", answer="ba")
    assert task.reward(prompt, "ba") == {
        "reward": 1.0,
        "echo": 0.0,
        "echo_version": 7.0,
        "brevity": 0.8,
        "learned": 2.0,
        "learned_version": 1.0,
    }
    assert weighted(task, prompt, "ba") == pytest.approx(1.0 + 0.5 * 0.0 - 0.8 + 2.0)
    assert weighted(task, prompt, "ab=") == pytest.approx(0.0 + 0.5 * 1.0 - 0.7 + 2.0)
    assert task.reward_waits


def test_a_conversation_stays_one_and_the_task_weighs_its_own_components():
    plain, task = load_task("calculator"), load_task("calculator?reward=own_rewards:brevity&weight=3&reward=task")
    assert isinstance(task, MultiTurnTask)
    prompt = plain.prompts("test")[0]
    assert task.demonstrate(prompt) == plain.demonstrate(prompt)
    assert task.reply(prompt, ["calc:1+1;"]) == plain.reply(prompt, ["calc:1+1;"])
    assert dict(task.reward_weights) == {"answer": 0.8, "call": 0.2, "brevity": 3.0, "brevity_version": 0.0}
    alone = load_task("calculator?reward=own_rewards:brevity")
    assert dict(alone.reward_weights) == {"brevity": 1.0, "brevity_version": 0.0}


def test_one_that_waits_has_all_wait_and_prepare_is_each_one_s():
    prepared = []

    def waits(prompt, completion):
        return Score(1.0, 3.0)

    waits.reward_waits = True
    waits.prepare = lambda: prepared.append("waits")
    inner = load_task("reverse")
    inner.prepare = lambda: prepared.append("task")
    assert Rewarded(inner, {"a": waits}).reward_waits
    Rewarded(inner, {"a": waits}).prepare()
    assert prepared == ["waits"]
    both = Rewarded(Rewarded(inner, {"a": waits}), {"b": lambda *_: 0.0}, {"b": 2.0}, own=True)
    assert (both.reward_waits, both.reward_weights) == (True, {"a_version": 0.0, "b_version": 0.0, "b": 2.0})
    both.prepare()
    assert prepared == ["waits", "waits"]
    assert both.reward(Prompt("x"), "") == {"a": 1.0, "a_version": 3.0, "b": 0.0}


def test_components_of_one_name_are_refused():
    task = Rewarded(load_task("reverse"), {"reward": lambda prompt, completion: 0.0}, own=True)
    with pytest.raises(ValueError, match="the task's own reward has reward, and so have the others"):
        task.reward(Prompt("x"), "")


def test_a_judge_s_options_reach_it(tmp_path):
    (tmp_path / "a&b.txt").write_text("{completion}? {lowest}-{highest}")
    task = load_task(
        f"reverse?reward=judge:unix:/tmp/a,127.0.0.1:9&template={tmp_path}/a%26b.txt&lowest=1&highest=5"
        "&max_tokens=3&timeout_s=2.5&tls_ca=ca.pem&token_file=token&weight=2"
    )
    assert task.reward_waits
    assert task.reward_weights["judge"] == 2.0
    judge = task._rewards["judge"]
    assert judge._servers == ("unix:/tmp/a", "127.0.0.1:9")
    assert judge.question(Prompt("x"), "y") == "```\ny\n```? 1-5"
    assert (judge._max_tokens, judge._timeout_s) == (3, 2.5)
    assert (judge._access.tls_ca, judge._access.token_file) == ("ca.pem", "token")


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("", r"reward '' is unknown; a reward is \"judge:ADDRESS"),
        ("exact", "reward 'exact' is unknown"),
        ("own_rewards:brevty", r"no function 'brevty'. Did you mean 'own_rewards:brevity'\? A reward is \"judge"),
        ("own_rewards:number", "own_rewards has no function 'number'"),
        ("no_such:f", "there is no module 'no_such'"),
        ("own_rewards:brevity&weight=much", r"weight \('much'\) must be a finite number"),
        ("own_rewards:brevity&weight=inf", r"weight \('inf'\) must be a finite number"),
        ("own_rewards:brevity&weight=1&weight=2", "'weight=2' must be OPTION=VALUE, and each option be there once"),
        ("own_rewards:brevity&weight", "'weight' must be OPTION=VALUE"),
        ("own_rewards:brevity&template=x", "has the option 'template'; it takes weight"),
        ("task&weight=2", "has the option 'weight'; it takes none"),
        ("own_rewards:brevity&reward=own_rewards:brevity", "two rewards are called 'brevity'"),
        ("task&reward=own_rewards:reward", "called 'reward', as a task's own is"),
        ("judge:somewhere", "address 'somewhere' is neither unix:/path nor host:port"),
        ("judge:", "address '' is neither"),
        ("judge:127.0.0.1:9&max_tokens=2.5", r"max_tokens \('2.5'\) must be a whole number"),
        ("judge:127.0.0.1:9&max_tokens=0", r"max_tokens \(0\) must be positive"),
        ("judge:127.0.0.1:9&lowest=10", r"lowest grade \(10.0\) must be below the highest \(10.0\)"),
        ("judge:127.0.0.1:9&timeout_s=0", r"timeout_s \(0.0\) must be positive and at most 600"),
        ("judge:127.0.0.1:9&template=no.txt", "the template 'no.txt' cannot be read: No such file"),
    ],
)
def test_what_is_no_reward_is_refused(query, message):
    with pytest.raises(ConfigError, match=message):
        load_task(f"reverse?reward={query}")


def test_a_judge_must_be_done_before_its_process_is_killed():
    task = load_task("reverse?reward=task&reward=judge:127.0.0.1:9&timeout_s=12")
    with pytest.raises(ConfigError, match=r"timeout_s \(12\) must be less than --reward.timeout-s \(10\)"):
        task.check_config(RewardConfig())
    with pytest.raises(ConfigError, match=r"must be less than --reward.timeout-s \(12\)"):
        task.check_config(RewardConfig(timeout_s=12))
    task.check_config(RewardConfig(timeout_s=12.5))
    load_task("reverse?reward=judge:127.0.0.1:9").check_config(RewardConfig())


def test_a_run_has_its_rewards_look_at_its_settings_before_it_opens_its_model():
    config = LlmConfig(task="reverse?reward=judge:127.0.0.1:9", model="/nowhere", reward=RewardConfig(timeout_s=3))
    with pytest.raises(ConfigError, match=r"must be less than --reward.timeout-s"):
        set_up(config, lambda _: None)


class Talker:
    """A task whose replies need something loaded, and wait."""

    reward_waits, loaded = True, False

    def prompts(self, split):
        return [Prompt("1+1=", answer="2")]

    def prepare(self):
        self.loaded = True

    def reply(self, prompt, turns):
        assert self.loaded
        return

    def reward(self, prompt, completion):
        return 0.0


def test_a_task_that_replies_is_prepared_though_others_give_the_reward():
    task = Rewarded(Talker(), {"zero": lambda prompt, completion: 0.0})
    task.prepare()
    assert task.reply(task.prompts("train")[0], ["2"]) is None
    assert task.reward_waits
    assert task.reward(Prompt("1+1="), "2") == {"zero": 0.0}


def test_a_task_that_is_none_is_refused_as_ever():
    with pytest.raises(ConfigError, match=r"task 'revers' is unknown. Did you mean 'reverse'"):
        load_task("revers?reward=own_rewards:brevity")


def test_a_template_without_its_place_or_a_judge_without_servers_is_refused():
    with pytest.raises(ConfigError, match=r"template has no {completion}"):
        Judge(["127.0.0.1:9"], template="{answer}")
    with pytest.raises(ConfigError, match="at least one server"):
        Judge([])

"""Tasks from files of JSON lines."""

import json
import sys

import pytest

from seedx.checks import ConfigError
from seedx.envs.text import sandbox
from seedx.envs.text.load import load_task
from seedx.envs.text.task import Prompt

USER = [{"role": "user", "content": "Hi"}]


def write(path, *lines):
    """The file's name; a line is an object, or bytes as they are."""
    content = b"\n".join(line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines)
    (path / "data.jsonl").write_bytes(content)
    return f"jsonl:{path / 'data.jsonl'}"


def texts(task, split):
    return [prompt.text for prompt in task.prompts(split)]


def test_lines_become_prompts(tmp_path):
    task = load_task(
        write(
            tmp_path,
            {"prompt": "1+1=", "answer": "2", "verifier": "numeric", "source": ["a", None]},
            {"messages": USER, "answer": "Hé", "split": "train"},
            {"prompt": "3+3=", "answer": "6", "split": "test"},
        )
    )
    train = task.prompts("train")
    assert train[0] == Prompt("1+1=", answer="2", extra={"verifier": "numeric", "source": ["a", None]})
    assert train[1] == Prompt(messages=tuple(USER), answer="Hé", extra={"verifier": "exact"})
    assert texts(task, "test") == ["3+3="]
    assert [task.reward(train[0], text) for text in ("so 2", "3")] == [1.0, 0.0]
    assert [task.reward(train[1], text) for text in ("Hé", "so Hé")] == [1.0, 0.0]
    assert task.reward(Prompt.from_json(json.loads(json.dumps(train[0].to_json()))), "2") == 1.0


def test_byte_order_mark_blank_lines_and_line_ends_are_no_error(tmp_path):
    line = json.dumps({"prompt": "a\u2028b", "answer": "c"}, ensure_ascii=False).encode()
    task = load_task(write(tmp_path, b"\xef\xbb\xbf" + line + b"\r", b"", b"  ", line, b""))
    assert texts(task, "train") == ["a\u2028b"] * 2


BAD = [
    (b"{", r"this is no JSON \(.*\); each line must be one object"),
    (b"[" * 100_000, "this is no JSON"),
    (b'{"prompt": "a", "answer": "b", "x": NaN}', r"this is no JSON \(NaN is none of its numbers\)"),
    (b'{"prompt": "\xff", "answer": "b"}', "byte 13 is no UTF-8; save the file as UTF-8"),
    (b'{"prompt": "\\ud800", "answer": "b"}', r"half of a surrogate pair"),
    (b'["a"]', "this is a list; each line must be an object with prompt and answer"),
    (b"null", "this is null"),
    ({"answer": "b"}, "neither prompt nor messages; it must have one of them"),
    ({"prompt": "a", "messages": USER, "answer": "b"}, "both prompt and messages; it must have one of them"),
    ({"prompt": "", "answer": "b"}, r'prompt \(""\) is empty; it must be a text'),
    ({"prompt": None, "answer": "b"}, "prompt is null; it must be a string"),
    ({"prompt": ["a"], "answer": "b"}, "prompt is a list; it must be a string"),
    ({"prompt": "a"}, "it has no answer; it must be a string"),
    ({"prompt": "a", "answer": 2}, 'answer is a number; it must be a string: write "2"'),
    ({"prompt": "a", "answer": {}}, "answer is an object; it must be a string"),
    ({"messages": [], "answer": "b"}, "messages must be a list of at least one message"),
    ({"messages": [{"role": "judge", "content": ""}], "answer": "b"}, r"messages\[0\]\.role \(judge\) must be one of"),
    ({"prompt": "a", "answer": "b", "split": "val"}, r'split \("val"\) must be one of train, test, or left out'),
    ({"prompt": "a", "answer": "b", "split": None}, r"split \(null\) must be one of"),
    ({"prompt": "a", "answer": "b", "split": []}, r"split \(\[\]\) must be one of"),
    (
        {"prompt": "a", "answer": "b", "verifier": "llm"},
        r'verifier \("llm"\) must be one of exact, numeric, regex, math',
    ),
    ({"prompt": "a", "answer": "b", "verifier": "numeric"}, r'answer \("b"\) has no number'),
    ({"prompt": "a", "answer": "(", "verifier": "regex"}, r'answer \("\("\) is no regular expression: .*'),
    ({"prompt": "a", "verifier": "code"}, "tests must be a list"),
    ({"prompt": "a", "verifier": "code", "tests": "assert f()"}, "tests must be a list"),
    ({"prompt": "a", "verifier": "code", "tests": []}, "tests must be a list, .*, and not be empty"),
    ({"prompt": "a", "verifier": "code", "tests": ["assert f()", {"stdin": "", "stdout": ""}]}, "either of strings"),
    ({"prompt": "a", "verifier": "code", "tests": [{"stdin": "1"}]}, "or of objects like"),
    ({"prompt": "a", "verifier": "code", "tests": [{"stdin": 1, "stdout": "2"}]}, "or of objects like"),
    ({"prompt": "a", "verifier": "code", "tests": ["assert f()"], "answer": 1}, "answer is a number"),
    ({"prompt": "a", "answer": " ", "verifier": "math"}, r'answer \(""\) is empty; the verifier "math"'),
]


@pytest.mark.parametrize(("line", "message"), BAD, ids=range(len(BAD)))
def test_a_bad_line_is_named(tmp_path, line, message):
    name = write(tmp_path, {"prompt": "a", "answer": "b"}, line)
    with pytest.raises(ConfigError, match=rf"data\.jsonl:2: .*{message}"):
        load_task(name)


def test_all_bad_lines_are_named_at_once(tmp_path):
    good = {"prompt": "a", "answer": "b"}
    with pytest.raises(ConfigError) as caught:
        load_task(write(tmp_path, b"x", good, b"y"))
    assert [line.partition(": ")[0].rpartition(":")[2] for line in str(caught.value).splitlines()] == ["1", "3"]
    with pytest.raises(ConfigError, match=r"and 2 lines more\.$"):
        load_task(write(tmp_path, *[b"x"] * 12, good))


def test_files_without_prompts_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r'data\.jsonl is empty; each line must be like {"prompt": "1\+1="'):
        load_task(write(tmp_path, b"", b"  "))
    with pytest.raises(ConfigError, match=r'no prompt to train on: all 1 lines say "split": "test"'):
        load_task(write(tmp_path, {"prompt": "a", "answer": "b", "split": "test"}))
    with pytest.raises(ConfigError, match=r"nowhere' cannot be read: No such file or directory. The path is relative"):
        load_task(f"jsonl:{tmp_path}/nowhere")
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        load_task(f"jsonl:{tmp_path}")


def numbered(count):
    return [{"prompt": f"{i}=", "answer": str(i)} for i in range(count)]


@pytest.mark.parametrize(("count", "num_tests"), [(20, 2), (29, 2), (30, 3), (1000, 100)])
def test_a_tenth_is_set_aside_when_no_line_is_for_tests(tmp_path, count, num_tests, capsys):
    task = load_task(write(tmp_path, *numbered(count)))
    train, test = texts(task, "train"), texts(task, "test")
    assert len(test) == num_tests
    assert sorted(train + test) == sorted(line["prompt"] for line in numbered(count))
    assert train == sorted(train, key=lambda text: int(text[:-1])), "in the order of the lines"
    assert capsys.readouterr().err == ""


def test_which_prompts_are_set_aside_depends_on_no_order(tmp_path):
    forwards = texts(load_task(write(tmp_path, *numbered(40))), "test")
    backwards = texts(load_task(write(tmp_path, *numbered(40)[::-1])), "test")
    assert forwards == backwards[::-1] == ["19=", "22=", "30=", "36="]


def test_equal_prompts_stay_together_and_stay_different_prompts(tmp_path):
    task = load_task(write(tmp_path, *numbered(20), *numbered(20)))
    train, test = texts(task, "train"), texts(task, "test")
    assert not {*train} & {*test}
    assert (len(train), len(test)) == (36, 4)


def test_with_few_prompts_tests_are_those_to_train_on_and_that_is_said(tmp_path, capsys):
    task = load_task(write(tmp_path, *numbered(19)))
    assert texts(task, "train") == [line["prompt"] for line in numbered(19)]
    assert capsys.readouterr().err == ""
    assert texts(task, "test") == texts(task, "train")
    assert "with fewer than 20 different prompts none are set aside" in capsys.readouterr().err


def test_a_verifier_that_is_not_installed_is_refused_at_the_start(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(ConfigError, match="needs the package math-verify"):
        load_task(write(tmp_path, {"prompt": "a", "answer": "1", "verifier": "math"}))


def test_code_is_run_against_the_tests_of_its_line(tmp_path, monkeypatch):
    checked = []
    monkeypatch.setattr(sandbox, "check_sandbox", lambda: checked.append(True))
    monkeypatch.setattr(sandbox, "run_asserts", lambda program, tests: ran(tests == ["assert f()"]))
    monkeypatch.setattr(sandbox, "run_pairs", lambda program, pairs: ran(pairs == [("1", "2")]))
    pairs = [{"stdin": "1", "stdout": "2"}]
    lines = [{"prompt": "a", "verifier": "code", "tests": tests} for tests in (["assert f()"], pairs)]
    task = load_task(write(tmp_path, *lines))
    assert checked == [True]
    assert [task.reward(prompt, "def f(): ...") for prompt in task.prompts("train")] == [1.0, 1.0]


def ran(right):
    return sandbox.SandboxResult(float(right), 0, "ok", "", "")

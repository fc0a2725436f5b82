"""What counts as right."""

import importlib.util
import os
import sys
import threading
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seedx.checks import ConfigError
from seedx.envs.text.last_number import Number, last_number
from seedx.envs.text.sandbox import SandboxError, check_sandbox
from seedx.envs.text.verifiers import VERIFIERS, code, exact, math, numeric, regex, verify


@pytest.mark.parametrize(
    ("answer", "completion", "score"),
    [
        ("ab", "ab", 1.0),
        ("ab", " ab\n", 1.0),
        ("ab ", "ab", 1.0),
        ("ab", "a b", 0.0),
        ("ab", "Ab", 0.0),
        ("ab", "", 0.0),
    ],
)
def test_exact(answer, completion, score):
    assert exact(answer, completion) == score


RIGHT = [
    ("42", "42"),
    ("42", "The answer is 42."),
    ("42", "6 * 7 = 42"),
    ("42", "first 41, then 42!"),
    ("42", "42.0"),
    ("42", "+42"),
    ("42", "**42**"),
    ("42", "x=42"),
    ("1234", "It costs $1,234."),
    ("1234567.5", "1,234,567.50"),
    ("1,234", "1234"),
    ("-7", "5 - 12 = -7"),
    ("-7", "-7 degrees"),
    ("-7", "\u22127"),
    ("-7", "(-7)"),
    ("3", "10-7 is 3"),
    ("7", "it is 10-7"),
    ("0.5", "1/2"),
    ("1/2", "0.5"),
    ("1/2", ".5"),
    ("3/4", "\\frac{3}{4}"),
    ("-3/4", "-\\dfrac{3}{4}"),
    ("1/2", "\\frac12"),
    ("0.333333333", "1/3"),
    ("50%", "50%"),
    ("50%", "50 \\%"),
    ("0.5", "50%"),
    ("50%", "0.5"),
    ("50", "50%"),
    ("50%", "50"),
    ("42", "I say \\boxed{42}, not 43"),
    ("42", "\\boxed{41} no, \\boxed{42} it is, out of 100"),
    ("1000", "\\boxed{1{,}000}"),
    ("0.75", "\\boxed{\\frac{3}{4}}"),
    ("5", "\\boxed{5} and \\boxed{6"),
    ("2000", "2e3"),
    ("0.002", "2E-3"),
    ("0", "-0"),
    ("0", "0.0"),
    ("1" * 60, "1" * 60),
]
WRONG = [
    ("42", ""),
    ("42", "forty-two"),
    ("42", "42, or rather 43"),
    ("42", "-42"),
    ("42", "420"),
    ("42", "42.1"),
    ("10000000", "10000001"),
    ("1" * 60, "1" * 59 + "2"),
    ("1234", "1,23"),
    ("0", "0.0000001"),
    ("0.5", "5%"),
    ("50%", "5"),
    ("50", "0.5"),
    ("1/2", "1/0"),
    ("0", "1/0"),
    ("42", "\\boxed{43}, not 42"),
    ("42", "\\boxed{} 42"),
    ("42", "1e99999999999999999999"),
    ("0", "1e-99999999999999999999"),
    ("42", "9" * 100_000),
]


@pytest.mark.parametrize(("answer", "completion"), RIGHT)
def test_numeric_takes(answer, completion):
    assert numeric(answer, completion) == 1.0


@pytest.mark.parametrize(("answer", "completion"), WRONG, ids=lambda text: text[:30])
def test_numeric_refuses(answer, completion):
    assert numeric(answer, completion) == 0.0


def test_numeric_s_tolerance_is_relative():
    assert numeric("3.14159265", "3.1415926") == 1.0
    assert numeric("3.14159265", "3.1415") == 0.0
    assert numeric("3.14159265", "3.1415", tolerance=1e-4) == 1.0
    assert numeric("1e-9", "2e-9") == 0.0


def test_numeric_needs_a_number():
    with pytest.raises(ValueError, match="the answer 'none' has no number"):
        numeric("none", "1")


@given(
    whole=st.integers(-(10**12), 10**12), places=st.integers(0, 6), before=st.sampled_from(["", "so 1 + 2 is ", "$"])
)
def test_a_number_is_read_as_it_was_written(whole, places, before):
    value = Fraction(whole, 10**places)
    assert last_number(f"{before}{whole:,}/{10**places}") == Number(value, False)
    assert last_number(f"{before}{float(value):.{places}f}." if places else f"{before}{whole}.") == Number(value, False)


@given(st.text("0123456789.,-+/% {}\\boxedfrac()eE\n", max_size=60))
def test_any_text_can_be_read(text):
    found = last_number(text)
    assert found is None or isinstance(found.value, Fraction)


def test_long_texts_are_read_in_no_time():
    for part in ("1,111", "\\boxed{", "1/", "-", "\\frac{", "1e5", " 1", "{", "."):
        found = last_number(part * 20_000)
        assert found is None or isinstance(found.value, Fraction), part


@pytest.mark.parametrize(
    ("pattern", "completion", "score"),
    [("a+", "aaa", 1.0), ("a+", " aaa\n", 1.0), ("a+", "aaab", 0.0), ("a|b", "ab", 0.0), ("(?s).*7.*", "a\n7\n", 1.0)],
)
def test_regex(pattern, completion, score):
    assert regex(pattern, completion) == score


def test_a_verifier_by_its_name():
    cases = {"exact": ("7", "x 7"), "numeric": ("7", "x 7"), "regex": (".*7", "x 7")}
    assert [verify(name, *cases[name]) for name in cases] == [0.0, 1.0, 1.0]
    assert {*cases, "math", "code"} == set(VERIFIERS)
    with pytest.raises(ConfigError, match="verifier 'fuzzy' is unknown; there are exact, numeric, regex, math, code"):
        verify("fuzzy", "", "")


def test_math_without_its_package_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(ConfigError, match=r"needs the package math-verify \(.*\): pip install -e \"\.\[tasks\]\"\."):
        verify("math", "1", "1")


@pytest.fixture
def math_verify():
    """math-verify, without which the test is skipped, or fails if SEEDX_REQUIRE names tasks."""
    if importlib.util.find_spec("math_verify") is None:
        if "tasks" in os.environ.get("SEEDX_REQUIRE", "").split():
            pytest.fail("SEEDX_REQUIRE names tasks, and math_verify cannot be imported")
        pytest.skip("needs math-verify")


FORMULAS = [
    ("1/2", "The answer is $\\frac{1}{2}$.", 1.0),
    ("\\frac{1}{2}", "0.5", 1.0),
    ("$\\frac12$", "\\boxed{0.5}", 1.0),
    ("x^2+1", "It is $1+x^2$.", 1.0),
    ("(1,2)", "$(1,2)$", 1.0),
    ("\\{1,2\\}", "$\\{2,1\\}$", 1.0),
    ("\\sqrt{2}", "\\boxed{2^{1/2}}", 1.0),
    ("\\sqrt{2}", "\\boxed{2^{1/3}}", 0.0),
    ("3", "I do not know", 0.0),
    ("3", "", 0.0),
    ("3", "4", 0.0),
]


@pytest.mark.external
@pytest.mark.usefixtures("math_verify")
@pytest.mark.parametrize(("answer", "completion", "score"), FORMULAS)
def test_math(answer, completion, score):
    assert math(answer, completion) == score


@pytest.mark.external
@pytest.mark.usefixtures("math_verify")
def test_math_in_a_thread_is_as_anywhere():
    scores = []
    thread = threading.Thread(target=lambda: scores.extend(math(a, c) for a, c, _ in FORMULAS))
    thread.start()
    thread.join(120)
    assert scores == [score for *_, score in FORMULAS]


@pytest.mark.external
@pytest.mark.usefixtures("math_verify")
def test_math_says_that_an_answer_is_no_formula():
    with pytest.raises(ValueError, match="the answer '' is no formula"):
        math("", "1")


@pytest.fixture
def sandbox():
    """A sandbox, without which the test is skipped, or fails if SEEDX_REQUIRE names sandbox."""
    try:
        check_sandbox()
    except SandboxError as error:
        if "sandbox" in os.environ.get("SEEDX_REQUIRE", "").split():
            pytest.fail(f"SEEDX_REQUIRE names sandbox, and {error}")
        pytest.skip(str(error))


DOUBLE, ECHO = "def f(x):\n    return 2 * x\n", "print(2 * int(input()))\n"
ASSERTS = ["assert f(1) == 2", "assert f(-1) == -2"]
PAIRS = [{"stdin": "1", "stdout": "2"}, {"stdin": "-1", "stdout": "-2"}]


@pytest.mark.usefixtures("sandbox")
@pytest.mark.parametrize(
    ("tests", "completion", "score"),
    [
        (ASSERTS, DOUBLE, 1.0),
        (ASSERTS, f"Here:\n```python\n{DOUBLE}```\nDone.", 1.0),
        (ASSERTS, f"```\ndef f(x): return 0\n```\nNo:\n```py\n{DOUBLE}```", 1.0),
        (ASSERTS, "def f(x):\n    return 2\n", 0.0),
        (ASSERTS, "Double it.", 0.0),
        (ASSERTS, "", 0.0),
        (PAIRS, ECHO, 1.0),
        (PAIRS, f"```python\n{ECHO}```", 1.0),
        (PAIRS, "print(2)", 0.0),
        (PAIRS, DOUBLE, 0.0),
    ],
)
def test_code(tests, completion, score):
    assert code(tests, completion) == score
    assert verify("code", "", completion, tests) == score


def test_code_needs_tests():
    with pytest.raises(ValueError, match="test"):
        code([], DOUBLE)

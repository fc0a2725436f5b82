"""Whether a completion is right, 1.0 or 0.0, by comparison with the known answer."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence

from seedx.checks import ConfigError
from seedx.envs.text.last_number import last_number

VERIFIERS = ("exact", "numeric", "regex", "math", "code")
Tests = Sequence[str] | Sequence[Mapping[str, str]]
_FENCED = re.compile(r"```[^\n`]*\n(.*?)```", re.DOTALL)


def verify(verifier: str, answer: str, completion: str, tests: Tests = ()) -> float:
    """The score of a completion by one of `VERIFIERS`; `tests` are for `code`, which has no use for the answer.

    Raises:
        ConfigError, ValueError: as the verifier itself.
    """
    match verifier:
        case "exact":
            return exact(answer, completion)
        case "numeric":
            return numeric(answer, completion)
        case "regex":
            return regex(answer, completion)
        case "math":
            return math(answer, completion)
        case "code":
            return code(tests, completion)
    raise ConfigError(f"the verifier {verifier!r} is unknown; there are {', '.join(VERIFIERS)}.")


def exact(answer: str, completion: str) -> float:
    """The same text; spaces and line ends around it do not count."""
    return float(completion.strip() == answer.strip())


def numeric(answer: str, completion: str, tolerance: float = 1e-6) -> float:
    r"""The last number of the completion, or of its last \boxed{...}, is the answer.

    Whole numbers are the same or not; others may differ by `tolerance` times the answer. See `last_number` for what is
    read, and `Number.equals` for percents.

    Raises:
        ValueError: there is no number in the answer.
    """
    right, found = last_number(answer), last_number(completion)
    if right is None:
        raise ValueError(f"the answer {answer!r} has no number.")
    return float(found is not None and right.equals(found, tolerance))


def regex(pattern: str, completion: str) -> float:
    """The whole completion, without spaces around it, matches the pattern (Python's `re`).

    A pattern that takes for ever is ended by the deadline of rewards.
    """
    return float(re.fullmatch(pattern, completion.strip()) is not None)


def math(answer: str, completion: str) -> float:
    r"""The last formula of the completion equals the answer, as math-verify sees it: "\frac12" and "0.5" are equal.

    In the completion, formulas stand in "$...$" or \boxed{...}, plain numbers anywhere; the answer is LaTeX with or
    without "$". Its timeouts, which need a main thread and SIGALRM, are off: the deadline of rewards holds here too.

    Raises:
        ConfigError: math-verify is not installed.
        ValueError: the answer is no formula. Errors inside math-verify are raised as they are.
    """
    check_math()
    import math_verify

    def parse(text: str) -> list:
        return math_verify.parse(text, parsing_timeout=None, raise_on_error=True)

    right = parse(answer if "$" in answer or "\\boxed" in answer else f"${answer}$")
    if not right:
        raise ValueError(f"the answer {answer!r} is no formula to math-verify.")
    return float(math_verify.verify(right, parse(completion), timeout_seconds=None, raise_on_error=True))


def code(tests: Tests, completion: str) -> float:
    """The Python in the completion passes all tests, in a sandbox: what is in its last ```...```, or all of it.

    Args:
        tests: Statements like "assert add(1, 2) == 3", run after the code; or {"stdin": ..., "stdout": ...}: what the
            program says then, spaces at the ends of lines aside.
        completion: Of a model.

    Raises:
        SandboxError: there can be no sandbox here.
        ValueError: there is no test.
    """
    from seedx.envs.text.sandbox import run_asserts, run_pairs

    fenced = _FENCED.findall(completion)
    program = fenced[-1] if fenced else completion
    pairs = [(test["stdin"], test["stdout"]) for test in tests if isinstance(test, Mapping)]
    asserts = [test for test in tests if isinstance(test, str)]
    result = run_pairs(program, pairs) if pairs else run_asserts(program, asserts)
    return float(result.passed == 1.0)


def check_verifier(verifier: str) -> None:
    """Makes sure that what a verifier needs is there, which a task does when it is made.

    Raises:
        ConfigError: it is not; the message says what to do.
    """
    match verifier:
        case "math":
            check_math()
        case "code":
            from seedx.envs.text.sandbox import check_sandbox

            check_sandbox()


def check_math() -> None:
    """Makes sure that `math` can work.

    Raises:
        ConfigError: math-verify is not installed.
    """
    try:
        import math_verify  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"the verifier 'math' needs the package math-verify ({error}): pip install -e \".[tasks]\"."
        ) from error
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns of timeouts that are off

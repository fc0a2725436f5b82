"""Runs code that nobody has read: Python programs in namespaces of their own, with limits on all they use.

A program has no network, no file of the machine but Python's and the system's, read-only, no other process, an empty
environment, and nothing to keep: its directory is in memory and ends with it. The kernel does it
(`seedx.envs.text.sandbox_init`), for root and ordinary users alike. A bug in the kernel is not kept out, nor is code
that spoils the tests that run in its own process; `run_pairs` compares outside.
"""

from __future__ import annotations

import functools
import json
import os
import secrets
import signal
import sys
import time
from collections.abc import Sequence
from typing import Literal, NamedTuple

from seedx.envs.text.sandbox_process import MODE, Ran, SandboxError, SandboxLimits, run_program

Why = Literal["ok", "wrong", "error", "timeout", "memory", "output"]

# Runs in the sandbox: the code, then test after test in its names. What it reports counts only with the token.
_DRIVER = """\
import json, os, sys, traceback

def main():
    report, (token, [code, *tests]) = int(sys.argv.pop()), json.load(sys.stdin)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    names = {"__name__": "solution"}
    for number, source in enumerate([code, *tests]):
        try:
            exec(compile(source, "code" if number == 0 else f"test {number}", "exec"), names)
            how = "ok"
        except BaseException as error:
            traceback.print_exc()
            how = "error"
            if isinstance(error, MemoryError):
                how = "memory"
            elif isinstance(error, AssertionError) and number > 0:
                how = "wrong"
        os.write(report, f"{token} {number} {how}\\n".encode())
        if number == 0 and how != "ok":
            return 1
    return 0

code = main()
sys.stdout.flush()
os._exit(code)
"""


class SandboxResult(NamedTuple):
    """What became of a program.

    Attributes:
        passed: Share of its tests, 0 to 1.
        status: Exit code, 128 + n if signal n killed it; None if it was killed here. Of the first run that was not ok.
        why: "ok"; "wrong" (a test); "error" (it raised or ended early); "timeout"; "memory"; "output" (too much of it).
        stdout: What it said, as far as that was taken.
        stderr: The same.
    """

    passed: float
    status: int | None
    why: Why
    stdout: str
    stderr: str


def run_asserts(code: str, tests: Sequence[str], limits: SandboxLimits | None = None) -> SandboxResult:
    """Runs code, then each test in its names: one that raises has failed, the others count nevertheless.

    The tests share a process with the code. Code that just ends passes none, but code that means to can pass all.

    Args:
        code: Python; its `__name__` is "solution".
        tests: Python each, for example "assert add(1, 2) == 3".
        limits: The limits.

    Raises:
        SandboxError: there can be no sandbox here.
        ValueError: there is no test.
    """
    if not tests:
        raise ValueError("tests is empty: without a test, nothing says whether code is right.")
    limits, token = limits or SandboxLimits(), secrets.token_hex(16)
    stdin = json.dumps([token, [code, *tests]]).encode()
    ran = run_program(_DRIVER, stdin, limits, limits.timeout_s, limits.output_bytes, reports=True)
    reported = _reported(ran.report, token)
    passed = sum(reported.get(number) == "ok" for number in range(1, len(tests) + 1))
    failures = [how for how in reported.values() if how != "ok"]
    why = failures[0] if failures else "ok" if passed == len(tests) else ran.ended or _how_it_failed(ran)
    return SandboxResult(passed / len(tests), ran.status, why, _text(ran.stdout), _text(ran.stderr))


def _reported(report: bytes, token: str) -> dict[int, Why]:
    """How the code (0) and each test (from 1) went, as far as the driver came."""
    found: dict[int, Why] = {}
    for line in report.decode(errors="replace").splitlines():
        match line.split():
            case [said, number, ("ok" | "wrong" | "error" | "memory") as how] if said == token:
                found.setdefault(int(number), how)
    return found


def run_pairs(code: str, pairs: Sequence[tuple[str, str]], limits: SandboxLimits | None = None) -> SandboxResult:
    """Runs a program once for each pair of stdin and expected stdout.

    A pair passes if the program exits with 0 and says what is expected, spaces at the ends of lines and blank lines
    around it aside. Each run has a sandbox of its own; together they have `timeout_s`. stdout and stderr are those of
    the first run that was not ok, or of the last one.

    Args:
        code: Python; its `__name__` is "__main__".
        pairs: (stdin, stdout).
        limits: The limits.

    Raises:
        SandboxError: there can be no sandbox here.
        ValueError: there is no pair.
    """
    if not pairs:
        raise ValueError("pairs is empty: without a test, nothing says whether code is right.")
    limits, passed = limits or SandboxLimits(), 0
    deadline = time.monotonic() + limits.timeout_s
    failed, result = None, None
    for stdin, expected in pairs:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            failed = failed or SandboxResult(0.0, None, "timeout", "", "")
            break
        most = limits.output_bytes + len(expected.encode(errors="replace"))
        ran = run_program(code, stdin.encode(errors="replace"), limits, left_s, most)
        why: Why = ran.ended or _how_it_failed(ran)
        if ran.status == 0 and why == "error":
            why = "ok" if _lines(_text(ran.stdout)) == _lines(expected) else "wrong"
        passed += why == "ok"
        result = SandboxResult(0.0, ran.status, why, _text(ran.stdout), _text(ran.stderr))
        if why != "ok":
            failed = failed or result
    shown = failed or result
    assert shown is not None
    return shown._replace(passed=passed / len(pairs))


@functools.cache
def check_sandbox() -> None:
    """Makes sure that programs can be run here, which a task calls when it is made.

    Raises:
        SandboxError: they cannot; the message says what the system refuses and how to allow it.
    """
    if os.environ.get(MODE) == "unsafe":
        print(
            "seedx: WARNING: --reward.sandbox unsafe: programs that a model writes run with your rights, files and "
            "network",
            file=sys.stderr,
            flush=True,
        )
    ran = run_program("print('here')", b"", SandboxLimits(), 60.0, 2**16)
    if (ran.status, ran.stdout) != (0, b"here\n"):
        raise SandboxError(f"Python does not run in a sandbox: {_text(ran.stderr) or f'exit code {ran.status}'}")


def _how_it_failed(ran: Ran) -> Why:
    """Of a program that ended by itself and did not do what it was to do."""
    if ran.status == 128 + signal.SIGXCPU:
        return "timeout"
    last = _text(ran.stderr).strip().rpartition("\n")[2]
    return "memory" if ran.status and last.partition(":")[0].endswith("MemoryError") else "error"


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().splitlines()]


def _text(data: bytes) -> str:
    return data.decode(errors="replace")

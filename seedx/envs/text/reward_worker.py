"""A process that computes rewards of a task, and what it replies to turns: requests come over stdin.

    python -m seedx.envs.text.reward_worker --task TASK --memory-bytes N --concurrency N

One JSON object a line. First it says {"ready": true, "waits": whether rewards are computed at the same time}, or
{"fatal": why the task cannot be made, "final": whether another try is useless}, on stdout. Then each {"id", "prompt",
"completion"} is answered with {"id", "scores"}, each {"id", "prompt", "turns"} with {"id", "reply"}, or either with
{"id", "error"}, and "seconds", which it took.

Rewards that compute run one after another on the main thread, where signals work too; those that wait have threads.
What they print goes to stderr. No jax.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import math
import os
import resource
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

from seedx.checks import ConfigError
from seedx.envs.text.blame import describe
from seedx.envs.text.guardian import fork_under_guardian
from seedx.envs.text.task import Prompt, Scores, Task

_FIRST_FD = 10  # so that no standard stream is hit


def main(argv: Sequence[str]) -> int:
    """Answers requests until stdin ends; the exit code."""
    parser = argparse.ArgumentParser(prog="seedx.envs.text.reward_worker")
    parser.add_argument("--task", required=True)
    parser.add_argument("--memory-bytes", type=int, required=True)
    parser.add_argument("--concurrency", type=int, required=True)
    arguments = parser.parse_args(argv)
    fork_under_guardian()
    requests, replies = _take_pipes()
    _limit(arguments.memory_bytes)
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        from seedx.envs.text.load import load_task

        task = load_task(arguments.task)
        waits = bool(getattr(task, "reward_waits", False))
        if (prepare := getattr(task, "prepare", None)) is not None:
            prepare()
    except BaseException as error:
        traceback.print_exc()
        _write(replies, {"fatal": describe(error), "final": isinstance(error, ConfigError)})
        return 2
    _write(replies, {"ready": True, "waits": waits})
    if waits:
        _serve_many(task, requests, replies, arguments.concurrency)
    else:
        _serve_one_by_one(task, requests, replies)
    return 0


def _take_pipes() -> tuple[BinaryIO, BinaryIO]:
    """Moves the pipes to where user code does not look; what it prints, in C too, goes to stderr."""
    requests = os.fdopen(fcntl.fcntl(0, fcntl.F_DUPFD_CLOEXEC, _FIRST_FD), "rb")
    replies = os.fdopen(fcntl.fcntl(1, fcntl.F_DUPFD_CLOEXEC, _FIRST_FD), "wb", buffering=0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return requests, replies


def _limit(memory_bytes: int) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError):  # Where memory runs out all the same, this process goes before the learner.
        Path("/proc/self/oom_score_adj").write_text("1000")


def _serve_one_by_one(task: Task, requests: BinaryIO, replies: BinaryIO) -> None:
    for line in requests:
        _write(replies, _answer(task, json.loads(line)))


def _serve_many(task: Task, requests: BinaryIO, replies: BinaryIO, concurrency: int) -> None:
    lock = threading.Lock()

    def answer(request: Mapping[str, Any]) -> None:
        reply = _answer(task, request)
        with lock:
            _write(replies, reply)

    with ThreadPoolExecutor(concurrency) as threads:
        for line in requests:
            threads.submit(answer, json.loads(line))


def _answer(task: Task, request: Mapping[str, Any]) -> dict[str, Any]:
    process, started = os.getpid(), time.monotonic()
    try:
        prompt = Prompt.from_json(request["prompt"])
        if "turns" in request:
            result = {"reply": as_reply(task.reply(prompt, request["turns"]))}  # type: ignore[attr-defined]
        else:
            result = {"scores": as_scores(task.reward(prompt, request["completion"]))}
    except BaseException as error:  # SystemExit too: the task failed, the worker did not.
        result = {"error": describe(error)}
    if os.getpid() != process:  # A child that the task forked and that came back here: the request is its parent's.
        os._exit(0)
    return {"id": request["id"], "seconds": time.monotonic() - started, **result}


def as_scores(reward: Any) -> Scores:
    """What a task's `reward` returned, as named numbers: a single one is called "reward".

    Raises:
        TypeError: it is neither a number nor a mapping of names to numbers.
        ValueError: a number is NaN or infinite, or the mapping is empty.
    """
    named = reward if isinstance(reward, Mapping) else {"reward": reward}
    if not named:
        raise ValueError("reward returned an empty mapping; at least one component is needed.")
    scores = {}
    for name, value in named.items():
        if not isinstance(name, str) or not (hasattr(value, "__float__") or hasattr(value, "__index__")):
            raise TypeError(
                f"reward returned {_short(reward)} ({type(reward).__name__}); a number, or a mapping of names to "
                "numbers, is needed."
            )
        scores[name] = float(value)
        if not math.isfinite(scores[name]):
            raise ValueError(f"reward returned {_short(reward)}; numbers must be finite.")
    return scores


def as_reply(reply: Any) -> str | None:
    """What a task's `reply` returned.

    Raises:
        TypeError: it is neither text nor None.
        UnicodeEncodeError: it is no text that a tokenizer could read.
    """
    if reply is None:
        return None
    if not isinstance(reply, str):
        raise TypeError(
            f"reply returned {_short(reply)} ({type(reply).__name__}); text, or None where the conversation is over, "
            "is needed."
        )
    reply.encode()
    return reply


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:100]}..."


def _write(replies: BinaryIO, reply: Mapping[str, Any]) -> None:
    left = memoryview(json.dumps(reply).encode() + b"\n")
    while left:
        left = left[replies.write(left) :]


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(code)  # Without waiting for threads of the task.

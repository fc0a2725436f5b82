"""A reward worker as the pool has it: a process, its pipes, and the requests that it has. One thread."""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import subprocess
import sys
import time
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Literal

from seedx.envs.text.sandbox_process import MODE
from seedx.parent import PARENT_PID
from seedx.reward_config import RewardConfig

START_S = 300.0  # for a task's imports and data
_KILL_S = 5.0
_MAX_LINE = 2**20  # bytes of a reply
_CHUNK = 2**16
_AHEAD = 64  # requests that a worker has beside the one that runs,
_AHEAD_S = 0.02  # as long as they take no longer than this, seconds

# Workers share the machine with each other and with the learner, whose accelerator is not theirs.
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
_NO_ACCELERATOR = {"JAX_PLATFORMS": "cpu"}

State = Literal["stopped", "starting", "ready"]


@dataclass(eq=False, slots=True)
class Request:
    """A completion whose reward is wanted, or turns that are to be replied to.

    Attributes:
        id: Unique in the pool.
        kind: Which of both, for people.
        line: As the worker reads it.
        future: What comes of it, or None.
        submitted_at: By `time.monotonic`.
        attempts: That failed.
        alone: Whether it ran in a process that crashed while others ran: who is at fault shows next time.
        deadline: Of the running attempt, by `time.monotonic`; infinite while another one runs first.
    """

    id: int
    kind: Literal["reward", "reply"]
    line: bytes
    future: Future[Any]
    submitted_at: float
    attempts: int = 0
    alone: bool = False
    deadline: float = math.inf


class BrokenWorkerError(RuntimeError):
    """A worker that ended, or whose words make no sense; the message says how."""


class RewardProcess:
    """A worker's process, started and replaced as often as it takes.

    Args:
        task: Name of the task.
        config: The settings.

    Attributes:
        state: Of the process.
        requests: What it has, by id, in the order in which it was sent.
        start_at: When a stopped one may start again, by `time.monotonic`.
        start_by: When a starting one must have said that it is ready.
        failed_starts: In a row, none of which led to a reply.
    """

    def __init__(self, task: str, config: RewardConfig) -> None:
        self.state: State = "stopped"
        self.requests: dict[int, Request] = {}
        self.start_at = self.start_by = 0.0
        self.failed_starts = 0
        self._config = config
        self._waits, self._typical_s = False, math.inf
        numbers = ("--memory-bytes", str(config.memory_bytes), "--concurrency", str(config.concurrency))
        self._command = (sys.executable, "-m", "seedx.envs.text.reward_worker", "--task", task, *numbers)
        self._process: subprocess.Popen[bytes] | None = None
        self._read, self._unsent = b"", b""

    def start(self) -> None:
        """Starts a process; it dies with this thread."""
        env = {**_ONE_THREAD, **os.environ, **_NO_ACCELERATOR, MODE: self._config.sandbox}
        env[PARENT_PID] = str(os.getpid())
        self._process = subprocess.Popen(
            self._command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, start_new_session=True
        )
        os.set_blocking(self.writes_to, False)
        os.set_blocking(self.reads_from, False)
        self.state, self.start_by = "starting", time.monotonic() + START_S
        self._read, self._unsent = b"", b""

    @property
    def reads_from(self) -> int:
        """File descriptor of its replies."""
        assert self._process is not None
        assert self._process.stdout is not None
        return self._process.stdout.fileno()

    @property
    def writes_to(self) -> int:
        """File descriptor of its requests."""
        assert self._process is not None
        assert self._process.stdin is not None
        return self._process.stdin.fileno()

    @property
    def has_unsent(self) -> bool:
        """Whether requests wait for room in the pipe."""
        return bool(self._unsent)

    def become_ready(self, waits: bool) -> None:
        """Notes that the process has its task, and whether it computes rewards at the same time."""
        self.state, self._waits = "ready", waits

    def has_room(self) -> bool:
        """Whether it may get one more request.

        One that computes has the next ones ready while rewards are quick: it need not wait for the pool's thread then,
        which may wait for the interpreter's lock.
        """
        most = self._config.concurrency if self._waits else 1 + min(_AHEAD, int(_AHEAD_S / self._typical_s))
        if self.state != "ready" or len(self.requests) >= most:
            return False
        return not any(request.alone for request in self.requests.values())

    def add(self, request: Request) -> None:
        """Gives it a request; `flush` sends it."""
        self.requests[request.id] = request
        self._unsent += request.line
        self._set_deadline(request, runs=self._waits or len(self.requests) == 1)

    def pop(self, number: int, seconds: float) -> Request:
        """Takes away a request that was answered, which took some seconds."""
        request = self.requests.pop(number)
        before_s = seconds if math.isinf(self._typical_s) else self._typical_s
        self._typical_s = max(seconds, 0.9 * before_s + 0.1 * seconds, 1e-6)  # A slow one counts at once.
        if not self._waits and self.requests:
            self._set_deadline(next(iter(self.requests.values())), runs=True)
        return request

    def _set_deadline(self, request: Request, runs: bool) -> None:
        request.deadline = time.monotonic() + self._config.timeout_s if runs else math.inf

    def next_deadline(self) -> float:
        """The earliest deadline of its requests; infinite if it has none."""
        return next(iter(self.requests.values())).deadline if self.requests else math.inf

    def flush(self) -> None:
        """Sends what fits into the pipe."""
        with contextlib.suppress(BlockingIOError, BrokenPipeError):  # Of a broken pipe, the other one tells more.
            self._unsent = self._unsent[os.write(self.writes_to, self._unsent) :]

    def receive(self) -> list[Mapping[str, Any]]:
        """What it has said since the last call.

        Raises:
            BrokenWorkerError: it has ended, or said what is not a reply.
        """
        try:
            data = os.read(self.reads_from, _CHUNK)
        except BlockingIOError:
            return []
        if not data:
            raise BrokenWorkerError(self._ended())
        *lines, self._read = (self._read + data).split(b"\n")
        try:
            if len(self._read) > _MAX_LINE:
                raise ValueError(f"a line of more than {_MAX_LINE} bytes")
            return [json.loads(line) for line in lines]
        except ValueError as error:
            raise BrokenWorkerError(f"the worker said what is not a reply: {error}") from error

    def _ended(self) -> str:
        assert self._process is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self._process.wait(_KILL_S)
            number = -code if code < 0 else code - 128  # Of the guardian, or what that says of the worker.
            return f"the worker was killed by signal {number}" if number > 0 else f"the worker exited with {code}"
        return "the worker closed its pipe"

    def kill(self) -> list[Request]:
        """Kills the process and all it started, reaps it, and returns the requests that it had."""
        requests, self.requests = list(self.requests.values()), {}
        process, self._process, self.state = self._process, None, "stopped"
        if process is not None:
            process.terminate()  # The guardian kills the others.
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_KILL_S)
            if process.poll() is None:
                process.kill()  # The worker dies with it.
                process.wait()
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None
                pipe.close()
        return requests


def wait_for(workers: list[RewardProcess], wake: int, timeout_s: float) -> set[int]:
    """Waits until a worker says something or has room in its pipe, or `wake` can be read; what can be read."""
    running = [worker for worker in workers if worker.state != "stopped"]
    poll = select.poll()
    poll.register(wake, select.POLLIN)
    for worker in running:
        poll.register(worker.reads_from, select.POLLIN)
        if worker.has_unsent:
            poll.register(worker.writes_to, select.POLLOUT)
    ready = {fd for fd, _ in poll.poll(1e3 * max(timeout_s, 0.0))}
    for worker in running:
        if worker.has_unsent and worker.writes_to in ready:
            worker.flush()
    return ready

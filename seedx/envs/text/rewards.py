"""Rewards of completions and replies to turns, computed in processes: what loops, crashes or prints hurts nobody else.

Threading: any thread may submit; one thread of the crew has the workers and completes the futures.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from typing import Any, Literal, NamedTuple

from seedx.checks import ConfigError
from seedx.envs.text.reward_process import START_S, BrokenWorkerError, Request, RewardProcess, wait_for
from seedx.envs.text.task import Prompt, Scores
from seedx.metrics import Metrics
from seedx.reward_config import RewardConfig
from seedx.threads import Crew

_POLL_S = 0.2
_CLOSE_S = 30.0
_STARTS = 3  # that may fail in a row
_BACKOFF_S = 0.2
_KINDS_SAID = 10  # of failures


class RewardQueueFullError(RuntimeError):
    """More completions wait for a reward than the pool takes."""


class Reply(NamedTuple):
    """What a task replied to some turns; None: the conversation is over."""

    text: str | None


class RewardPool:
    """Computes the rewards of one task in worker processes, and its replies where it has several turns.

    A reward that raises, exceeds `config.timeout_s`, ends its process or is no finite number is computed again
    `config.retries` times; then its result is None: the completion has no score, which is not a score of 0. At the
    deadline the process is killed with all it started, and replaced. Others that it had are computed again without this
    counting against them; when a process that computes several at the same time dies by itself, each is next computed
    alone, which shows whose fault it is. All this holds for replies too.

    A task that cannot be made stops the crew with ConfigError. As soon as the crew stops, open futures are cancelled.

    Args:
        task_name: Of `seedx.envs.text.load.load_task`.
        config: The settings.
        metrics: Gets `reward/latency` (from `submit` to the result), and the counters `reward/failed` (attempts),
            `reward/timeouts` (those of them that took too long), `reward/retried`, `reward/unscored` and
            `reward/restarts` (processes).
        crew: Runs the pool's thread.
        max_waiting: Completions, and turns, that wait for a worker.
    """

    def __init__(
        self, task_name: str, config: RewardConfig, metrics: Metrics, crew: Crew, *, max_waiting: int = 16_384
    ) -> None:
        self._task, self._config, self._metrics, self._crew = task_name, config, metrics, crew
        self._max_waiting = max_waiting
        self._waiting: deque[Request] = deque()
        self._lock = threading.Lock()  # of _waiting, _awake and _closed
        self._awake, self._closed = True, False
        self._ids = itertools.count()
        self._said: set[str] = set()
        self._num_open = 0  # requests without a result; guarded by the lock
        self._num_given = self._num_failed = self._num_late = 0  # results, failed attempts, those past the deadline
        self._wake_reads, self._wake_writes = os.pipe()
        self._workers = [RewardProcess(task_name, config) for _ in range(config.workers)]
        if config.sandbox == "unsafe":
            _say("WARNING: --reward.sandbox unsafe: code that the model writes runs with your rights and network")
        self._thread = crew.spawn("rewards", self._run)

    def submit(self, prompt: Prompt, completion: str) -> Future[Scores | None]:
        """Asks for the reward of a completion; returns at once.

        Returns:
            Its components by name ("reward" if the task returns one number), or None if it could not be scored. The
            future's callbacks run on the pool's thread. It is cancelled when the pool closes.

        Raises:
            RewardQueueFullError: `max_waiting` completions wait already.
            TypeError: the prompt holds what JSON cannot.
            RuntimeError: the pool is closed.
        """
        return self._submit("reward", {"prompt": prompt.to_json(), "completion": completion})

    def reply(self, prompt: Prompt, turns: Sequence[str]) -> Future[Reply | None]:
        """Asks for what the task replies to the model's turns so far, None if it cannot be had; as `submit` does."""
        return self._submit("reply", {"prompt": prompt.to_json(), "turns": list(turns)})

    def _submit(self, kind: Literal["reward", "reply"], fields: Mapping[str, Any]) -> Future[Any]:
        number, future = next(self._ids), Future()
        line = json.dumps({"id": number, **fields}).encode() + b"\n"
        with self._lock:
            if self._closed:
                raise RuntimeError("The reward pool is closed.")
            if len(self._waiting) >= self._max_waiting:
                raise RewardQueueFullError(
                    f"{len(self._waiting)} completions wait for a {kind} of {self._task}, as many as the pool takes: "
                    "wait for results before more are submitted, or raise --reward.workers."
                )
            self._waiting.append(Request(number, kind, line, future, time.monotonic()))
            self._num_open += 1
            asleep, self._awake = not self._awake, True
            if asleep:
                os.write(self._wake_writes, b"w")
        self._metrics.gauge("reward/open", self._num_open)
        return future

    def why_nothing_scored(self) -> str | None:
        """Why there is no reward though some were tried; None: a request had a result, or no attempt has failed yet."""
        if self._num_given or not self._num_failed:
            return None
        late = (
            f", {self._num_late:,} of them because they took longer than {self._config.timeout_s:g} s; raise "
            "--reward.timeout-s, or mend the task"
            if self._num_late
            else "; see above why, and mend the task or its --reward settings"
        )
        return f"no completion of task {self._task} was scored. All {self._num_failed:,} attempts failed{late}."

    def close(self) -> None:
        """Kills the workers and cancels what is open; returns when there is no process left."""
        with self._lock:
            if not self._closed:
                self._closed = True
                os.write(self._wake_writes, b"c")
        self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        try:
            while not (self._closed or self._crew.stop.is_set()):
                self._round()
        except BaseException as error:
            self._crew.fail(error)  # before anybody sees a pool that is closed, which is no more than the consequence
            raise
        finally:
            with self._lock:
                self._closed = True
                requests = list(self._waiting)
                self._waiting.clear()
                os.close(self._wake_reads)
                os.close(self._wake_writes)
            for worker in self._workers:
                requests += worker.kill()
            for request in requests:
                request.future.cancel()

    def _round(self) -> None:
        """Hands out what waits, waits for something to happen, and deals with it."""
        self._start_workers()
        self._hand_out()
        # What a worker had said by `now` is read before it is found late, however long this thread has slept.
        now = time.monotonic()
        ready = wait_for(self._workers, self._wake_reads, self._time_to_sleep(now))
        if self._wake_reads in ready:
            os.read(self._wake_reads, 4096)
        for worker in self._workers:
            if worker.state != "stopped" and worker.reads_from in ready:
                self._hear(worker)
        for worker in self._workers:
            self._end_late(worker, now)

    def _time_to_sleep(self, now: float) -> float:
        with self._lock:
            self._awake = False
            if self._closed or (self._waiting and any(worker.has_room() for worker in self._workers)):
                return 0.0
        return min([_POLL_S, *(worker.next_deadline() - now for worker in self._workers)])

    def _start_workers(self) -> None:
        for worker in self._workers:
            if worker.state == "stopped" and time.monotonic() >= worker.start_at:
                try:
                    worker.start()
                except OSError as error:  # The machine has no process or memory left.
                    self._replace(worker, str(error))

    def _hand_out(self) -> None:
        """Gives waiting requests to the workers with the fewest."""
        with self._lock:
            self._awake = True
            while self._waiting and (free := [worker for worker in self._workers if worker.has_room()]):
                worker = min(free, key=lambda w: len(w.requests))
                if self._waiting[0].alone and worker.requests:
                    break
                request = self._waiting.popleft()
                if not request.future.cancelled():
                    worker.add(request)
        for worker in self._workers:
            if worker.state == "ready" and worker.has_unsent:
                worker.flush()

    def _hear(self, worker: RewardProcess) -> None:
        try:
            for reply in worker.receive():
                self._take(worker, reply)
        except BrokenWorkerError as error:
            self._replace(worker, str(error))

    def _take(self, worker: RewardProcess, reply: Mapping[str, Any]) -> None:
        """Deals with one line of a worker."""
        if "ready" in reply:
            worker.become_ready(reply["waits"])
            return
        if "fatal" in reply:
            if reply["final"]:
                raise ConfigError(f"task {self._task!r} cannot be made: {reply['fatal']}")
            self._replace(worker, f"making the task raised {reply['fatal']}")
            return
        worker.failed_starts = 0
        request = worker.pop(reply["id"], reply["seconds"])
        if "error" in reply:
            self._fail(request, reply["error"])
        else:
            self._settle(request, Reply(reply["reply"]) if request.kind == "reply" else reply["scores"])

    def _end_late(self, worker: RewardProcess, now: float) -> None:
        """Kills a worker one of whose requests, or whose start, took too long by `now`."""
        if worker.state == "starting" and worker.start_by <= now:
            self._replace(worker, f"it was not ready {START_S:g} s after its start")
        late = [request for request in worker.requests.values() if request.deadline <= now]
        if late:
            others = [request for request in self._kill(worker) if request not in late]
            self._metrics.count("reward/timeouts", len(late))
            self._num_late += len(late)
            self._give_back(others)
            for request in late:
                self._fail(request, f"no {request.kind} within {self._config.timeout_s:g} s (--reward.timeout-s)")

    def _replace(self, worker: RewardProcess, why: str) -> None:
        """Deals with a worker that broke: if one reward ran, it is to blame; of several, nobody yet; else its start.

        Raises:
            ConfigError: it breaks whenever it starts.
        """
        starting = worker.state == "starting"
        requests = self._kill(worker)
        ran = [request for request in requests if request.deadline < math.inf]
        to_blame = ran if len(ran) == 1 else []
        if len(ran) > 1:
            for request in ran:
                request.alone = True
        self._give_back([request for request in requests if request not in to_blame])
        for request in to_blame:
            self._fail(request, why)
        if not requests:
            worker.failed_starts += 1
            if worker.failed_starts >= _STARTS:
                when = "while it started" if starting else "before its first request"
                raise ConfigError(
                    f"a worker for the rewards of task {self._task!r} failed {_STARTS} times in a row {when}, last: "
                    f"{why}. Its output is on stderr."
                )
            worker.start_at = time.monotonic() + _BACKOFF_S * 2 ** (worker.failed_starts - 1)

    def _kill(self, worker: RewardProcess) -> list[Request]:
        self._metrics.count("reward/restarts")
        return worker.kill()

    def _give_back(self, requests: list[Request]) -> None:
        with self._lock:
            self._waiting.extendleft(reversed(requests))

    def _fail(self, request: Request, why: str) -> None:
        """Notes a failed attempt, and has it repeated or gives it up."""
        self._metrics.count("reward/failed")
        self._num_failed += 1
        if why not in self._said and len(self._said) < _KINDS_SAID:
            self._said.add(why)
            last = "; others are only counted (reward/failed)" if len(self._said) == _KINDS_SAID else ""
            _say(f"a {request.kind} of task {self._task} failed: {why}{last}")
        request.attempts += 1
        if request.attempts <= self._config.retries:
            self._metrics.count("reward/retried")
            self._give_back([request])
        else:
            self._metrics.count("reward/unscored")
            self._settle(request, None)

    def _settle(self, request: Request, result: Scores | Reply | None) -> None:
        self._metrics.time(f"{request.kind}/latency", time.monotonic() - request.submitted_at)
        self._num_given += result is not None
        with self._lock:
            self._num_open -= 1
        self._metrics.gauge("reward/open", self._num_open)
        with contextlib.suppress(InvalidStateError):  # Its owner has cancelled it.
            request.future.set_result(result)


def _say(text: str) -> None:
    with contextlib.suppress(OSError):
        print(f"seedx: {text}".encode("ascii", "backslashreplace").decode(), flush=True)

"""Real processes for the fault tests: watched with deadlines, counted by a mark in their environment, never left."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
from quick_xla import QUICK_XLA

from seedx.runlog import read_rows

ROOT = Path(__file__).parent.parent
DEADLINE_S = 100.0  # bounds hanging alone: a quiet machine needs six seconds for a start-up

# A run that starts fast: one actor with four environments, a tiny network, no TensorBoard.
TINY = (
    *("--env", "catch", "--stop-at-return", "None", "--num-actors", "1", "--envs-per-actor", "4"),
    *("--learner.batch-size", "4", "--learner.unroll-length", "5", "--network.torso", "mlp", "--network.hidden", "8"),
    *("--metrics.no-tensorboard", "--metrics.interval-s", "0.2"),
)
QUICK = {"XLA_FLAGS": QUICK_XLA}


class Started:
    """A process; its output goes to files."""

    def __init__(self, popen: subprocess.Popen, out: Path, err: Path) -> None:
        self.popen, self._out, self._err = popen, out, err

    @property
    def out(self) -> str:
        return self._out.read_text()

    @property
    def err(self) -> str:
        return self._err.read_text()

    @property
    def said(self) -> str:
        return self.out + self.err

    def wait(self, timeout_s: float = DEADLINE_S) -> int:
        """Its exit code."""
        try:
            return self.popen.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {timeout_s} s; it said: {self.said}") from None

    def send(self, number: int) -> None:
        self.popen.send_signal(number)

    def interrupt(self, number: int = signal.SIGINT) -> None:
        """What a terminal does: everyone in the foreground process group gets it."""
        os.killpg(self.popen.pid, number)

    def until(self, condition: Callable[[], Any], what: str, timeout_s: float = DEADLINE_S) -> Any:
        """Waits for something while this process has to go on."""

        def check() -> Any:
            if not (found := condition()):
                assert self.popen.poll() is None, f"ended with {self.popen.poll()} before {what}; it said: {self.said}"
            return found

        return until(check, what, timeout_s, lambda: self.said)


class Processes:
    """Starts processes in one directory; `with` kills what is left of them and of all that they started."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._mark = f"SEEDX_TEST={os.getpid()}-{secrets.token_hex(8)}"
        self._popens: list[subprocess.Popen] = []

    def __enter__(self) -> Processes:
        # Tests that run in a shell's background ignore SIGINT, and so would what they start.
        self._sigint = signal.signal(signal.SIGINT, signal.default_int_handler)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._sigint)
        while left := self.alive():
            for process in left:
                with contextlib.suppress(psutil.NoSuchProcess):  # it has died with its parent
                    process.kill()
            psutil.wait_procs(left, timeout=5)
        for popen in self._popens:
            popen.wait()

    def start(self, *command: str, stdout: int | None = None, env: dict[str, str] | None = None) -> Started:
        """Runs a command as a session leader, as a shell with job control does."""
        number = len(self._popens)
        out, err = (self.directory / f"process-{number}.{kind}" for kind in ("out", "err"))
        path = os.pathsep.join((str(ROOT), str(ROOT / "tests")))
        name, value = self._mark.split("=")
        # One device, and nothing of the test's own settings of jax.
        full_env = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
        full_env |= {"PYTHONPATH": path, name: value, "COLUMNS": "200", **(env or {})}
        with out.open("wb") as out_file, err.open("wb") as err_file:
            popen = subprocess.Popen(
                command,
                cwd=self.directory,
                env=full_env,
                stdin=subprocess.DEVNULL,
                stdout=out_file if stdout is None else stdout,
                stderr=err_file,
                start_new_session=True,
            )
        self._popens.append(popen)
        return Started(popen, out, err)

    def local(self, run_dir: Path, *flags: str, env: dict[str, str] | None = None, **kwargs: Any) -> Started:
        """`launch/local.py`, with the tiny run's flags unless it resumes; compiles quickly."""
        tiny = () if "--resume" in flags else TINY
        return self.launch("local.py", *tiny, "--run-dir", str(run_dir), *flags, env=QUICK | (env or {}), **kwargs)

    def launch(self, name: str, *flags: str, inside: Sequence[str] = (), **kwargs: Any) -> Started:
        """A launcher, behind the words that start it somewhere else."""
        return self.start(*inside, sys.executable, str(ROOT / "launch" / name), *flags, **kwargs)

    def role(
        self,
        role: str,
        run_dir: Path,
        address: str,
        *flags: str,
        env: dict[str, str] | None = None,
        inside: Sequence[str] = (),
    ) -> Started:
        """One role, started singly; compiles quickly."""
        where = "--listen" if role == "learner" else "--server"
        command = (sys.executable, "-m", "seedx.run", role, "--run-dir", str(run_dir), where, address, *flags)
        return self.start(*inside, *command, env=QUICK | (env or {}))

    def alive(self, *words: str) -> list[psutil.Process]:
        """Living processes that descend from those started here and have `words` on their command line."""
        found = []
        for pid in psutil.pids():
            try:
                environ = Path(f"/proc/{pid}/environ").read_bytes()
                process = psutil.Process(pid)
                if self._mark.encode() not in environ.split(b"\0") or process.status() == psutil.STATUS_ZOMBIE:
                    continue
                if set(words) <= set(process.cmdline()):
                    found.append(process)
            except (OSError, psutil.Error):  # gone meanwhile, or another user's
                continue
        return found

    def wait_until_gone(self) -> None:
        until(lambda: not self.alive(), "the end of every process", said=lambda: str(self.alive()))


_reserved: list[socket.socket] = []


def free_port() -> int:
    """A port on which nobody listens, and that the system gives to nobody else until this process ends.

    It stays bound here and does not listen. With SO_REUSEADDR on both sides, which gRPC and Python's servers set, a
    server that is told this very port can listen on it, as often as it is started.
    """
    reserved = socket.socket()
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind(("", 0))
    _reserved.append(reserved)
    return reserved.getsockname()[1]


def until(
    condition: Callable[[], Any], what: str, timeout_s: float = DEADLINE_S, said: Callable[[], str] = lambda: ""
) -> Any:
    """Polls until `condition` is true, and returns what it returned."""
    deadline = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < deadline, f"waited {timeout_s} s in vain for {what}. {said()}"
        time.sleep(0.05)
    return found


def is_served(address: str) -> bool:
    """Whether a server answers there; its socket's file is there a moment earlier."""
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    with grpc.insecure_channel(address) as channel:
        try:
            health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=60)
        except grpc.RpcError:
            return False
        return True


def last(run_dir: Path, name: str) -> float:
    """The newest value of a figure in metrics.jsonl; 0 before there is one."""
    rows = read_rows(run_dir / "metrics.jsonl")
    return next((row[name] for row in reversed(rows) if name in row), 0)


def make_run(run_dir: Path, *flags: str) -> None:
    """A run directory with the tiny run's config, for roles that are started singly."""
    from seedx import cli

    cli.prepare_run_dir(cli.parse([*TINY, "--run-dir", str(run_dir), *flags]))

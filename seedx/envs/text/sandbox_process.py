"""One run of one program in a sandbox, as its caller has it: the launcher's process, its pipes, its end."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple, cast

from seedx.checks import ConfigError, positive, require

MODE = "SEEDX_SANDBOX"  # the environment variable that says "strict" or "unsafe", which the reward pool sets
_INIT = Path(__file__).with_name("sandbox_init.py")
_KILLED_S = 10.0
_CHUNK = 2**16
_MAX_REPORT = 2**22
# What may refuse user namespaces: the value that does, and one that does not.
_SYSCTLS = {
    "kernel/unprivileged_userns_clone": ("0", "1"),
    "kernel/apparmor_restrict_unprivileged_userns": ("1", "0"),
    "user/max_user_namespaces": ("0", "10000"),
}


class SandboxError(ConfigError):
    """There can be no sandbox here; the message says why and what to do."""


@dataclass(frozen=True)
class SandboxLimits:
    """What a program may use.

    Attributes:
        timeout_s: Of one call with all its tests, seconds.
        memory_bytes: Address space of each of its processes.
        work_bytes: Of its directory, and of one file.
        output_bytes: Of stdout and of stderr each (beyond what `run_pairs` expects).
        processes: It may have at a time, threads too.
    """

    timeout_s: float = 5.0
    memory_bytes: int = 2**30
    work_bytes: int = 2**26
    output_bytes: int = 2**16
    processes: int = 32

    def __post_init__(self) -> None:
        positive(self, "timeout_s", "memory_bytes", "work_bytes", "output_bytes", "processes")


class Ran(NamedTuple):
    """What became of a program.

    Attributes:
        status: Exit code, 128 + n if signal n killed it; None if it was killed here.
        ended: Why it was killed here; None if it ended by itself.
        stdout: What it said, as far as that was taken.
        stderr: The same.
        report: What it reported.
    """

    status: int | None
    ended: Literal["timeout", "output"] | None
    stdout: bytes
    stderr: bytes
    report: bytes


def run_program(
    program: str, stdin: bytes, limits: SandboxLimits, timeout_s: float, most: int, *, reports: bool = False
) -> Ran:
    """Runs a program to its end.

    Args:
        program: Python.
        stdin: What it reads there.
        limits: The limits.
        timeout_s: After which it is killed, seconds.
        most: Bytes of stdout, or of stderr, beyond which it is killed.
        reports: Whether it has a pipe to report over, whose file descriptor is its last argument.

    Raises:
        SandboxError: there can be no sandbox here.
    """
    require(sys.platform == "linux", f"A sandbox needs Linux, and this is {sys.platform}.")
    deadline = time.monotonic() + timeout_s
    with contextlib.ExitStack() as stack:
        directory = None
        if os.environ.get(MODE) == "unsafe":
            directory = stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))
            (Path(directory) / "main.py").write_bytes(program.encode(errors="surrogatepass"))
        payload = {**asdict(limits), "timeout_s": timeout_s, "program": program, "directory": directory}
        process, setup, report = _start({**payload, **_python(), "reports": reports}, stdin)
        assert process.stdout is not None
        assert process.stderr is not None
        pipes = (process.stdout, process.stderr, report, setup)
        taken = dict.fromkeys(pipes, b"")
        for pipe in pipes:
            stack.enter_context(pipe)
        try:
            ended = _take(taken, {process.stdout: most, process.stderr: most}, deadline)
            if ended is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(max(deadline - time.monotonic(), 0.01))
                ended = "timeout" if process.returncode is None else None
        finally:
            _kill(process, strict=directory is None)
        if taken[setup]:
            raise SandboxError(_refusal(taken[setup].decode(errors="replace")))
        status = None if ended else process.returncode
        return Ran(status, ended, taken[process.stdout][:most], taken[process.stderr][:most], taken[report])


def _start(payload: Mapping[str, Any], stdin: bytes) -> tuple[subprocess.Popen[bytes], IO[bytes], IO[bytes]]:
    """The launcher, and the pipes over which come what went wrong with the set-up, and the program's report."""
    with contextlib.ExitStack() as ours:
        payload_file, stdin_file = (ours.enter_context(os.fdopen(os.memfd_create("seedx"), "w+b")) for _ in range(2))
        for file, content in ((payload_file, json.dumps(payload).encode()), (stdin_file, stdin)):
            file.write(content)
            file.seek(0)
        (setup_reads, setup), (report_reads, report) = os.pipe(), os.pipe()
        setup_pipe, report_pipe = os.fdopen(setup_reads, "rb"), os.fdopen(report_reads, "rb")
        ours.callback(os.close, setup)
        ours.callback(os.close, report)
        numbers = (payload_file.fileno(), setup, report)
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(_INIT), *map(str, numbers), str(os.getpid())],
            stdin=stdin_file,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            pass_fds=numbers,
            env={},
            cwd="/",
            start_new_session=True,
        )
        return process, setup_pipe, report_pipe


@functools.cache
def _python() -> dict:
    """This Python: what is executed, under which name (which says where its packages are), and what it needs to see."""
    real = os.path.realpath(sys.executable)
    needed = [sys.prefix, sys.base_prefix, os.path.dirname(sys.executable), os.path.dirname(real)]
    visible = sorted({path for name in needed for path in (os.path.abspath(name), os.path.realpath(name))})
    return {"executable": real, "python": os.path.abspath(sys.executable), "visible": visible}


def _take(
    taken: dict[IO[bytes], bytes], most: Mapping[IO[bytes], int], deadline: float
) -> Literal["timeout", "output"] | None:
    """Reads into `taken` until all pipes have ended, None; or until the deadline, or one has had too many bytes."""
    with selectors.DefaultSelector() as selector:
        for pipe in taken:
            selector.register(pipe, selectors.EVENT_READ)
        while selector.get_map():
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return "timeout"
            for key, _ in selector.select(left_s):
                pipe = cast(IO[bytes], key.fileobj)
                data = os.read(key.fd, _CHUNK)
                taken[pipe] += data
                if not data:
                    selector.unregister(pipe)
                if len(taken[pipe]) > most.get(pipe, _MAX_REPORT):
                    return "output"
    return None


def _kill(process: subprocess.Popen[bytes], strict: bool) -> None:
    """Kills all in the sandbox and waits until it is dead."""
    if strict and process.poll() is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_KILLED_S)
    if not strict or process.poll() is None:  # Once it is reaped, its id may be another's.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(_KILLED_S)


def _refusal(said: str) -> str:
    """Why there is no sandbox, and what would help."""
    fixes = []
    for name, (refuses, allows) in _SYSCTLS.items():
        with contextlib.suppress(OSError):
            if (Path("/proc/sys") / name).read_text().strip() == refuses:
                fixes.append(f"sysctl -w {name.replace('/', '.')}={allows}")
    allow = (
        f"As root, run: {'; '.join(fixes)}."
        if fixes
        else "In a container, allow it user namespaces and mounts (Docker: --security-opt seccomp=unconfined "
        "--security-opt apparmor=unconfined --security-opt systempaths=unconfined); the kernel must be 5.12 or newer."
    )
    return (
        f"This system refuses a sandbox for code: {said}. {allow} To run what a model writes without any sandbox, with "
        "your rights, files and network: --reward.sandbox unsafe"
    )

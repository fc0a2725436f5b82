"""Real Reverb servers for the tests, in an environment of their own that uv makes."""

from __future__ import annotations

import atexit
import functools
import json
import os
import select
import shutil
import subprocess
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np
import psutil
import pytest
from processes import ROOT, Processes, Started, free_port

from seedx.config import TableConfig
from seedx.replay import reverb_pb2 as pb
from seedx.replay.description import table_description
from seedx.replay.replay import Sample
from seedx.replay.reverb_client import ReverbClient, find_table
from seedx.replay.reverb_replay import ReverbReplay
from seedx.types import Unroll

HERE = Path(__file__).parent
START_S = 300.0  # the first time uv downloads TensorFlow
ANSWER_S = 100.0
S = 60.0  # within which what is possible happens
QUEUE = TableConfig(max_size=1000)
REPLAY = TableConfig(sampler="prioritized", max_size=1000, max_times_sampled=0)


def find_uv(tool: str = "reverb") -> str:
    """uv's path; without it the test is skipped, or fails if SEEDX_REQUIRE names the tool that uv is for."""
    try:
        from uv import find_uv_bin

        return find_uv_bin()
    except (ImportError, FileNotFoundError):
        return shutil.which("uv") or missing(f"there is no uv: pip install -e '.[{tool}]'", tool)


def missing(why: str, tool: str = "reverb") -> Any:
    """Ends a test that cannot have its tool."""
    if tool in os.environ.get("SEEDX_REQUIRE", "").split():
        pytest.fail(f"SEEDX_REQUIRE names {tool}, and {why}")
    pytest.skip(why)


class Host:
    """The process that the servers live in."""

    def __init__(self) -> None:
        command = [find_uv(), "run", "--quiet", "--script", str(HERE / "reverb_host.py")]
        self._checkpoints = tempfile.TemporaryDirectory(prefix="seedx-reverb-")
        env = {**os.environ, "TMPDIR": self._checkpoints.name}
        # Its messages go where pytest shows them; it ends when its input does.
        self._popen = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)
        atexit.register(self.close)

    def ask(self, line: Any, timeout_s: float) -> int | None:
        """The answer to a line; None if there is none within the timeout, or ever."""
        assert self._popen.stdin is not None
        assert self._popen.stdout is not None
        self._popen.stdin.write(json.dumps(line) + "\n")
        self._popen.stdin.flush()
        ready, _, _ = select.select([self._popen.stdout], [], [], timeout_s)
        answer = self._popen.stdout.readline() if ready else ""
        return int(answer) if answer else None

    def close(self) -> None:
        """Ends the process and its servers."""
        self._popen.communicate(timeout=ANSWER_S)
        self._checkpoints.cleanup()


@functools.cache
def start_host() -> Host | str:
    """The host of this test process; or why there is none."""
    host = Host()
    port = host.ask([table_description(TableConfig(), 1, "first")], START_S)
    return f"uv run --script {HERE / 'reverb_host.py'} started no server within {START_S} s" if port is None else host


@contextmanager
def reverb_server(*tables: dict[str, Any]) -> Generator[str, None, None]:
    """The address of a server with these tables."""
    host = start_host()
    if isinstance(host, str):
        missing(host)
    port = host.ask(tables, ANSWER_S)
    assert port is not None, f"no server for {tables}"
    try:
        yield f"localhost:{port}"
    finally:
        host.ask(port, ANSWER_S)


def table_info(address: str, table: str = "replay") -> pb.TableInfo:
    """A table as its server describes it."""
    client = ReverbClient(address, S)
    try:
        return find_table(client.server_info(), table, client.address)
    finally:
        client.close()


class Launched:
    """A server of launch/reverb_server.py that can be started again."""

    def __init__(self, processes: Processes, *tables: dict[str, Any]) -> None:
        self._processes, self._port = processes, free_port()
        self.address = f"localhost:{self._port}"
        self.checkpoints = processes.directory / f"tables-{self._port}"
        self._tables = json.dumps(tables)
        self.process: Started = None  # type: ignore[assignment]

    def start(self, *flags: str) -> Started:
        """Starts it; it may yet refuse."""
        command = (find_uv(), "run", "--quiet", "--script", str(ROOT / "launch" / "reverb_server.py"))
        where = ("--port", str(self._port), "--config", self._tables, "--checkpoint-dir", str(self.checkpoints))
        self.process = self._processes.start(*command, *where, *flags)
        return self.process

    def serve(self) -> Started:
        """Starts it and waits until it serves."""
        process = self.start("--allow-unauthenticated")
        process.until(lambda: "serving" in process.out, "the server", START_S)
        return process

    def alive(self) -> list[psutil.Process]:
        """Its processes: uv and the server itself."""
        return self._processes.alive("--port", str(self._port))

    def kill(self) -> None:
        """Kills all of it."""
        for process in self.alive():
            process.kill()
        self.process.wait()

    def hang(self) -> None:
        """Stops all of it, as if its host had vanished: connections stay and nothing answers."""
        for process in self.alive():
            process.suspend()


@contextmanager
def reverb_table(config: TableConfig, batch_size: int = 1, **kwargs: Any) -> Generator[ReverbReplay, None, None]:
    """A replay over a table of its own, on a server of its own; it does not fetch ahead unless told to."""
    with reverb_server(table_description(config, batch_size, "replay")) as address:
        replay = ReverbReplay(f"reverb://{address}", "replay", **{"prefetch": False, **kwargs})
        try:
            yield replay
        finally:
            replay.close()


def numbered(*numbers: int, rows: int = 3) -> Unroll:
    """Unrolls of frames that all hold the unroll's number."""
    frames = np.array(numbers, np.int64)[:, None, None] + np.zeros((1, rows, 4), np.int64)
    return Unroll({"frame": frames}, None, None, None, np.array(numbers, np.float32))


def numbers_of(sample: Sample) -> list[int]:
    """The numbers of `numbered` items, which are whole."""
    numbers = sample.items.timestep["frame"][:, 0, 0].tolist()
    jax.tree.map(np.testing.assert_array_equal, sample.items, numbered(*numbers))
    return numbers


def insert(replay: ReverbReplay, *numbers: int, timeout_s: float = S, **kwargs: Any) -> np.ndarray:
    """Inserts `numbered` items."""
    return replay.insert(numbered(*numbers), np.ones(len(numbers)), timeout_s, **kwargs)

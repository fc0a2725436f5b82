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

import pytest

from seedx.config import TableConfig
from seedx.replay.description import table_description
from seedx.replay.reverb_replay import ReverbReplay

HERE = Path(__file__).parent
START_S = 300.0  # the first time uv downloads TensorFlow
ANSWER_S = 30.0


def find_uv() -> str:
    """uv's path; without it the test is skipped, or fails if SEEDX_REQUIRE names reverb."""
    try:
        from uv import find_uv_bin

        return find_uv_bin()
    except (ImportError, FileNotFoundError):
        return shutil.which("uv") or missing("there is no uv: pip install -e '.[reverb]'")


def missing(why: str) -> Any:
    """Ends a test that cannot have its server."""
    if "reverb" in os.environ.get("SEEDX_REQUIRE", "").split():
        pytest.fail(f"SEEDX_REQUIRE names reverb, and {why}")
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


@contextmanager
def reverb_table(config: TableConfig, batch_size: int = 1, **kwargs: Any) -> Generator[ReverbReplay, None, None]:
    """A replay over a table of its own, on a server of its own; it does not fetch ahead unless told to."""
    with reverb_server(table_description(config, batch_size, "replay")) as address:
        replay = ReverbReplay(f"reverb://{address}", "replay", **{"prefetch": False, **kwargs})
        try:
            yield replay
        finally:
            replay.close()

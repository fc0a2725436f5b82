"""Hugging Face's generate as a contender: decode_generate.py in an interpreter of its own."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any


class Peer:
    """Takes static batches, one at a time; idle between them.

    Args:
        python: An interpreter with torch and transformers.
        source: Of the model, see decode_generate.py.
    """

    def __init__(self, python: str, source: dict[str, Any]) -> None:
        command = [python, str(Path(__file__).with_name("decode_generate.py")), json.dumps(source)]
        env = os.environ | {"TQDM_DISABLE": "1"}
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)
        assert self._read() == "ready"

    def time(self, prompts: Sequence[Sequence[int]], new_tokens: int, sample: bool = False) -> float:
        """Seconds of one batch."""
        assert self._process.stdin is not None
        batch = {"prompts": [list(prompt) for prompt in prompts], "new_tokens": new_tokens, "sample": sample}
        self._process.stdin.write(json.dumps(batch) + "\n")
        self._process.stdin.flush()
        return float(self._read())

    def close(self) -> None:
        """Ends the interpreter."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _read(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the peer ended; its error is above.")
        return line.strip()

"""A run that learns no faster than a test lets it, and what others get from its engine meanwhile."""

from __future__ import annotations

import re

import numpy as np
import orbax.checkpoint as ocp
from decode_harness import near_misses
from processes import QUICK, Processes, Started

from seedx.inference import decode_pb2 as pb
from seedx.inference.decode_client import Completion, gather, generate
from seedx.networks.model_source import open_model
from seedx.rundir import newest_update
from seedx.security import Access

_FLAGS = (
    *("--agent", "grpo", "--task", "text_tasks:stepped", "--stop-at-reward", "None", "--warm-start.reward", "0"),
    *("--held-out.num-prompts", "0", "--learner.batch-size", "2", "--grpo.group-size", "2", "--max-staleness", "0"),
    *("--grpo.no-dynamic-sampling", "--learner.learning-rate", "0.01", "--rollout.max-tokens", "24"),
    *("--reward.timeout-s", "600", "--rollout.timeout-s", "600", "--serve-port", "0"),
    *("--checkpoint.interval-s", "0.01", "--checkpoint.keep", "1000", "--metrics.no-tensorboard"),
)
_REWARDS = 4  # of an update
MAX_TOKENS = 16


class ServingRun:
    """A run at version 0 that others can ask.

    Attributes:
        address: Of its server.
        process: Of `launch/local.py`.
    """

    def __init__(self, processes: Processes) -> None:
        self._directory = processes.directory
        self._run_dir = processes.directory / "run"
        self._config = open_model("tiny").config
        self._allow(0)
        self.process: Started = processes.launch("local.py", "--run-dir", str(self._run_dir), *_FLAGS, env=QUICK)
        found = self.process.until(lambda: re.search(r"the engine answers at (\S+)", self.process.out), "the server")
        self.address: str = found.group(1)

    def learn(self, updates: int) -> None:
        """Has the run go on to so many updates, where it waits."""
        self._allow(updates)

    def _allow(self, updates: int) -> None:
        unfinished = self._directory / "allowed.new"
        unfinished.write_text(str(_REWARDS * updates))
        unfinished.rename(self._directory / "allowed")

    def generate(self, prompt: tuple[int, ...]) -> Completion:
        """Greedy tokens by our own protocol, which says of which version each is."""
        request = pb.GenerateRequest(
            tokens=pb.GenerateRequest.Tokens(ids=prompt), max_tokens=MAX_TOKENS, temperature=0.0
        )
        with generate(self.address, request, Access(), 60.0) as replies:
            return gather(replies, 1)[0]

    def has_saved(self, version: int) -> bool:
        """Whether there is a checkpoint of this version."""
        return (self._run_dir / "checkpoints" / str(version)).exists()

    def newest_saved(self) -> int:
        """The version of the newest checkpoint."""
        return newest_update(self._run_dir)

    def check(self, version: int, prompt: tuple[int, ...], tokens: list[int]) -> None:
        """Asserts that each token is the likeliest by a full forward pass with the checkpoint of a version."""
        with ocp.StandardCheckpointer() as reader:
            params = reader.restore(self._run_dir / "checkpoints" / str(version) / "params")
        near_misses(params, prompt, np.array(tokens), self._config)

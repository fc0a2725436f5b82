"""The flags of a decode engine, which all its servers have in common. No jax."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from seedx.checks import require
from seedx.device_config import MeshConfig, parse_bytes


@dataclass(frozen=True)
class EngineConfig:
    """A decode engine.

    Attributes:
        model: smollm2, a .gguf file, a Hugging Face directory, hf://org/name, or tiny (random weights).
        max_concurrent: Completions that are generated at a time, at most.
        memory_budget: What weights, caches and intermediate results may take, on all devices of the mesh together, for
            example 4GB; None: half of the memory.
        context: Tokens of a prompt with its completion; None: 2,048, or as many as the model knows if that is less.
        dtype: Of weights and caches; auto: float32 on CPUs, elsewhere bfloat16.
        mesh: The devices.
        drain_s: How long SIGTERM lets requests finish.
    """

    _MULTIPLE_OF: ClassVar[str] = "completions are spread over --mesh.data x --mesh.fsdp devices"

    model: str
    max_concurrent: int = 64
    memory_budget: str | None = None
    context: int | None = None
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    mesh: MeshConfig = field(default_factory=MeshConfig)
    drain_s: float = 30.0

    def __post_init__(self) -> None:
        require(
            self.model != "", "--model ('') is empty; give smollm2, tiny, a .gguf file, a directory or hf://org/name."
        )
        require(self.mesh.data >= 1, f"--mesh.data ({self.mesh.data}) must be at least 1.")
        require(self.max_concurrent >= 1, f"--max-concurrent ({self.max_concurrent}) must be at least 1.")
        require(
            self.max_concurrent % self.slots_multiple == 0,
            f"--max-concurrent ({self.max_concurrent}) must be a multiple of {self.slots_multiple}: "
            f"{self._MULTIPLE_OF}.",
        )
        require(
            self.context is None or self.context >= 2,
            f"--context ({self.context}) must be at least 2: a token of the prompt and one of the completion.",
        )
        require(0 <= self.drain_s < 1e6, f"--drain-s ({self.drain_s}) must not be negative, and below 1e6.")
        _ = self.budget_bytes

    @property
    def slots_multiple(self) -> int:
        """What the number of slots is a multiple of: they are spread over so many groups of devices."""
        return self.mesh.data * self.mesh.fsdp

    @property
    def budget_bytes(self) -> int | None:
        """The memory budget as a number.

        Raises:
            ConfigError: it is no number of bytes.
        """
        return parse_bytes(self.memory_budget, "--memory-budget")

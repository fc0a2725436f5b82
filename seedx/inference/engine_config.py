"""The flags of a decode engine, which all its servers have in common. No jax."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from seedx.checks import require

_SUFFIXES = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


@dataclass(frozen=True)
class MeshConfig:
    """The devices that a decode engine is spread over: data x fsdp x tensor; by default the first one alone.

    Attributes:
        data: Groups of devices that share completions; each group has all weights.
        fsdp: Devices of a group that share completions too, and keep a part of each weight, which they send each other.
        tensor: Devices that share the heads and the feed-forward layer of a completion.
    """

    data: int = 1
    fsdp: int = 1
    tensor: int = 1

    def __post_init__(self) -> None:
        for name in ("data", "fsdp", "tensor"):
            value = getattr(self, name)
            require(value >= 1, f"--mesh.{name} ({value}) must be at least 1.")


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


def parse_bytes(text: str | None, flag: str) -> int | None:
    """A number of bytes, None for None.

    Raises:
        ConfigError: it is none; names the flag.
    """
    if text is None:
        return None
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?i?B|)", text, re.IGNORECASE)
    suffix = found[2].upper().removesuffix("B") + "B" if found and found[2].upper() not in ("", "B") else ""
    require(
        found is not None and suffix in _SUFFIXES,
        f"{flag} ({text!r}) must be bytes, for example 4GB, 512MiB or 4000000000.",
    )
    assert found is not None
    return int(float(found[1]) * _SUFFIXES[suffix])

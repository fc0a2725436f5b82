"""Devices and their memory, as flags name them. No jax."""

from __future__ import annotations

import re
from dataclasses import dataclass

from seedx.checks import require

_SUFFIXES = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


@dataclass(frozen=True)
class MeshConfig:
    """The devices of a language model: data x fsdp x tensor; by default the first one alone.

    Attributes:
        data: Groups of devices that share completions; each group has all weights. 0, in LLM runs: as many as there
            are, and on a CPU one for each core, up to 8.
        fsdp: Devices of a group that share completions too, and keep a part of each weight, which they send each other.
        tensor: Devices that share the heads and the feed-forward layer of a completion.
    """

    data: int = 1
    fsdp: int = 1
    tensor: int = 1

    def __post_init__(self) -> None:
        for name in ("data", "fsdp", "tensor"):
            value, least = getattr(self, name), int(name != "data")
            require(value >= least, f"--mesh.{name} ({value}) must be at least {least}.")


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

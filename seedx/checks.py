"""What settings are held to, and how a wrong one is refused."""

from __future__ import annotations

import math
from dataclasses import fields, is_dataclass
from typing import Any


class ConfigError(ValueError):
    """A value that cannot work; the message names the field, the value, what is allowed and the fix."""


def require(ok: bool, message: str) -> None:
    """Raises ConfigError with `message` unless `ok`."""
    if not ok:
        raise ConfigError(message)


def positive(owner: Any, *names: str) -> None:
    """Refuses fields of these names that are not positive."""
    for name in names:
        value = getattr(owner, name)
        require(value > 0, f"{type(owner).__name__}.{name} ({value}) must be positive.")


def finite(owner: Any) -> None:
    """Refuses NaN and infinity in any field: no comparison would notice, and JSON has no word for them."""
    for spec in fields(owner):
        value = getattr(owner, spec.name)
        if is_dataclass(value):
            finite(value)
        elif isinstance(value, float):
            require(math.isfinite(value), f"{type(owner).__name__}.{spec.name} ({value}) must be a finite number.")


def not_negative(owner: Any, *names: str) -> None:
    """Refuses fields of these names that are negative."""
    for name in names:
        value = getattr(owner, name)
        require(value >= 0, f"{type(owner).__name__}.{name} ({value}) must not be negative.")

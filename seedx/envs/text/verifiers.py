"""Whether a completion is right, 1.0 or 0.0, by comparison with the known answer."""

from __future__ import annotations


def exact(answer: str, completion: str) -> float:
    """The same text; spaces and line ends around it do not count."""
    return float(completion.strip() == answer.strip())

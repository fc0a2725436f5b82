"""The settings of low-rank adapters."""

from __future__ import annotations

from dataclasses import dataclass

from seedx.checks import not_negative, require


@dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters on all linear maps of the blocks, which are trained instead of the weights (2106.09685).

    Attributes:
        rank: Of the change of each map; 0: no adapters, all weights are trained.
        alpha: The change is A B alpha / rank; 0: as the rank, so that it is A B.
    """

    rank: int = 0
    alpha: float = 0.0

    def __post_init__(self) -> None:
        not_negative(self, "rank", "alpha")
        require(
            self.rank > 0 or self.alpha == 0,
            f"lora.alpha ({self.alpha:g}) does nothing without adapters, and all weights would be trained; give "
            "--lora.rank.",
        )

    @property
    def scale(self) -> float:
        """What A B is multiplied by."""
        return self.alpha / self.rank if self.alpha else 1.0

"""What the device holds of the slots, and the programs that change it."""

from __future__ import annotations

from typing import Any

import numpy as np

from seedx.inference.decode_programs import Programs
from seedx.inference.memory_plan import MemoryPlan
from seedx.types import Tree


class SlotState:
    """The decode state of all slots; every method launches a program or several.

    Args:
        programs: Or what stands for them in `warm_up`.
        plan: Shapes.
        state: Of `programs.fresh`; it is consumed.
    """

    def __init__(self, programs: Programs, plan: MemoryPlan, state: Any) -> None:
        self._programs, self._plan, self._state = programs, plan, state
        self.span = plan.spans[0]  # tokens that the cache of all slots holds now

    def insert(self, rows: Tree, places: np.ndarray, count: int) -> None:
        """Copies prompts to slots, see `Programs.insert`."""
        cache = self._programs.insert(self._state.cache, rows, places, np.int32(count))
        self._state = self._state._replace(cache=cache)

    def generate(self, params: Tree, orders: np.ndarray) -> Any:
        """K steps of all slots; int32 `[K, 3, S]`."""
        self._state, packed = self._programs.generate(params, self._state, orders)
        return packed

    def make_room(self, tokens: int) -> None:
        """Has the cache hold texts of so many tokens; it shrinks only where half would do, not to go to and fro."""
        spans = self._plan.spans
        while self.span < min(tokens, self._plan.length):
            self.resize(spans[spans.index(self.span) + 1])
        while self.span > spans[0] and 2 * tokens <= (below := spans[spans.index(self.span) - 1]):
            self.resize(below)

    def resize(self, span: int) -> None:
        """To a neighbouring span. One layer after the other: there is never a second cache, only a second layer."""
        layers = list(self._state.cache)
        self._state = self._state._replace(cache=())
        for i in range(len(layers)):
            layers[i] = self._programs.resize(layers[i], span)
        self._state = self._state._replace(cache=tuple(layers))
        self.span = span

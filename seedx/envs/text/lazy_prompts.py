"""A split whose prompts are made when they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import overload

from seedx.envs.text.task import Prompt


class LazyPrompts(Sequence[Prompt]):
    """`count` prompts; the one at `index` is `make(index)`, which must always return the same."""

    def __init__(self, count: int, make: Callable[[int], Prompt]) -> None:
        self._indices = range(count)
        self._make = make

    def __len__(self) -> int:
        return len(self._indices)

    @overload
    def __getitem__(self, index: int) -> Prompt: ...
    @overload
    def __getitem__(self, index: slice) -> list[Prompt]: ...
    def __getitem__(self, index: int | slice) -> Prompt | list[Prompt]:
        if isinstance(index, slice):
            return [self._make(i) for i in self._indices[index]]
        return self._make(self._indices[index])

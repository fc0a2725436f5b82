"""Samples in the engine's slots: filling them, launching steps for all, and sorting out whose tokens came back.

Threading: the scheduler's thread alone.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from seedx.inference.engine import Engine, LongPrompt, Placement, StepResult
from seedx.inference.live_weights import LiveWeights
from seedx.inference.sample_table import Booked, SampleTable
from seedx.inference.waiting import Group, Sample, Waiting
from seedx.weights import Weights

_CHUNKS_FOR_A_PLACE = 4  # prompt chunks that a turn computes for each sample that could be placed


class InFlight(NamedTuple):
    """A dispatch whose results were not fetched."""

    result: StepResult
    slots: np.ndarray  # int [n], those that took part
    rows: np.ndarray  # int [n], of their samples
    serials: np.ndarray  # int [n], of these


class Slots:
    """The samples that are being generated.

    Args:
        engine: Whose slots they are.
        waiting: Where samples come from.
    """

    def __init__(self, engine: Engine, waiting: Waiting) -> None:
        num_slots = engine.plan.num_slots
        self.table = SampleTable(2 * num_slots, engine.plan.length, engine.steps_per_dispatch)
        self._engine, self._waiting = engine, waiting
        self._free = list(range(num_slots))
        self._of_row: list[Sample | None] = [None] * (2 * num_slots)
        self._of_slot: list[Sample | None] = [None] * num_slots
        self._row = np.full(num_slots, -1, np.int64)  # of each slot's sample
        self._to_launch = np.zeros(num_slots, np.int64)  # tokens that its sample may still get
        self._on_old = np.zeros(num_slots, bool)
        self._long: tuple[Group, LongPrompt] | None = None
        self._held: Group | None = None  # has a prefix and waits for slots; there is room for one such

    @property
    def live(self) -> int:
        """Slots with a sample."""
        return len(self._of_slot) - len(self._free)

    @property
    def samples(self) -> list[Sample]:
        """The samples in slots, and those whose last tokens are on their way."""
        return [sample for sample in self._of_row if sample is not None]

    # ---- filling

    def fill(self, weights: Weights) -> None:
        """Gives free slots to waiting samples, and computes their prompts.

        A turn computes so many chunks of prompts as there are samples to place, times four: one long prompt hardly
        slows those that are being generated, and many free slots are filled at once.
        """
        if self._long is not None and (self._long[1].version != weights.version or self._long[0].done):
            self._long = None
        chunk = self._engine.plan.chunk
        budget = _CHUNKS_FOR_A_PLACE * chunk * min(len(self._free), self._waiting.groups)
        short: dict[Group, list[Sample]] = {}
        while self._free and (group := self._waiting.first()) is not None:
            if self._long is not None:
                group = self._long[0]
            if group.prefix is None or group.prefix.version != weights.version:
                group.prefix = None
                if budget <= 0:
                    break
                if self._engine.is_long(group.prompt):
                    budget -= chunk
                    self._extend(weights, group)
                    continue
                budget -= len(group.prompt)
            if group.prefix is None:
                short[group] = self._take(group)
            else:
                self._engine.insert(self._open(group, self._take(group)))
        self._place_short(weights, short)

    def _place_short(self, weights: Weights, taken: dict[Group, list[Sample]]) -> None:
        """Computes prompts together and places their samples, a chunk of tokens after the other to bound the memory."""
        plan, groups = self._engine.plan, sorted(taken, key=lambda group: len(group.prompt))
        while groups:
            fit = 1
            while fit < len(groups) and (fit + 1) * plan.bucket(len(groups[fit].prompt) - 1) <= plan.chunk:
                fit += 1
            part, groups = groups[:fit], groups[fit:]
            prefixes = self._engine.prefill(weights, [group.prompt for group in part])
            placements = []
            for group, prefix in zip(part, prefixes, strict=True):
                group.prefix = prefix
                placements += self._open(group, taken[group])
            self._engine.insert(placements)

    def _extend(self, weights: Weights, group: Group) -> None:
        if self._long is None:
            self._long = group, self._engine.begin(weights, group.prompt)
        long = self._long[1]
        if not long.ready:
            self._engine.extend(weights, long)
        if long.ready:
            group.prefix, self._long = long.prefix(), None
            self._hold(group)

    def _hold(self, group: Group) -> None:
        """Keeps the prefix of a group for its next samples, in place of another one's."""
        if self._held is not None and self._held is not group:
            self._held.prefix = None
        self._held = group

    def _take(self, group: Group) -> list[Sample]:
        """Moves as many samples of a group to slots as there are."""
        taken = []
        while self._free and group.unplaced:
            sample = group.unplaced.popleft()
            sample.slot = self._free.pop()
            taken.append(sample)
        self._waiting.placed(group, len(taken))
        return taken

    def _open(self, group: Group, samples: list[Sample]) -> list[Placement]:
        """Notes that samples are in slots from now on."""
        request, prefix = group.request, group.prefix
        assert prefix is not None
        limit = min(request.max_tokens, self._engine.plan.length - len(group.prompt))
        for sample in samples:
            watched = sample.text is not None or group.listener is not None
            sample.row = self.table.open(limit, request.stop_tokens, watched)
            self._of_row[sample.row] = self._of_slot[sample.slot] = sample
            self._row[sample.slot], self._to_launch[sample.slot] = sample.row, limit
        if group.unplaced:
            self._hold(group)
        else:
            group.prefix = None
        settings = request.temperature, request.top_k, request.top_p
        return [Placement(sample.slot, prefix, *settings, sample.seed) for sample in samples]

    # ---- stepping

    def launch(self, weights: LiveWeights) -> list[InFlight]:
        """Launches K tokens for every sample: one dispatch, or two while some finish on the old weights."""
        flights = []
        if weights.finishing is not None:
            flights += self._launch(weights.finishing, self._on_old)
        flights += self._launch(weights.current, ~self._on_old)
        spent = np.flatnonzero((self._row >= 0) & (self._to_launch <= 0))
        for slot in spent.tolist():
            self._vacate(slot)
        if weights.finishing is not None and not self._on_old.any():
            weights.release()
        return flights

    def _launch(self, weights: Weights, members: np.ndarray) -> list[InFlight]:
        slots = np.flatnonzero(members & (self._row >= 0))
        if not len(slots):
            return []
        rows = self._row[slots]
        result = self._engine.generate(weights, members)
        self._to_launch[slots] -= self._engine.steps_per_dispatch
        return [InFlight(result, slots, rows, self.table.serial[rows])]

    def book(self, flight: InFlight) -> Booked:
        """Waits for a dispatch and books its tokens."""
        packed = np.asarray(flight.result.packed)
        results = packed.transpose(1, 2, 0)[:, flight.slots]
        return self.table.add(flight.rows, flight.serials, flight.result.version, results)

    def sample_in(self, row: int) -> Sample | None:
        """The sample of a row; None if it has left."""
        return self._of_row[row]

    def leave(self, sample: Sample) -> None:
        """Takes a sample out of its row and, if it still has one, its slot."""
        if sample.slot >= 0:
            self._vacate(sample.slot)
        self.table.close(sample.row)
        self._of_row[sample.row] = None
        sample.row = -1

    def _vacate(self, slot: int) -> None:
        """Frees a slot for the next sample; the row of the one that was in it stays until its last tokens came."""
        sample = self._of_slot[slot]
        assert sample is not None
        sample.slot, self._of_slot[slot] = -1, None
        self._row[slot], self._on_old[slot] = -1, False
        self._free.append(slot)
        self._engine.free([slot])

    # ---- swaps

    def keep_on_old(self) -> bool:
        """Has the samples that asked for it finish on the weights that are current now; whether there are any."""
        for slot, sample in enumerate(self._of_slot):
            self._on_old[slot] = sample is not None and sample.group.request.on_swap == "finish"
        return bool(self._on_old.any())

    def restarting(self) -> list[Sample]:
        """Samples that begin anew with new weights; those whose last tokens are on their way do not."""
        return [s for s in self._of_slot if s is not None and s.group.request.on_swap == "restart"]

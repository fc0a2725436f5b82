"""What a table is at one moment, for its snapshots."""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np

from seedx.replay.chains import Chains
from seedx.replay.rate_limiter import Limits
from seedx.replay.roster import RosterState

Kind = Literal["rows", "items"]  # of data: rows, and what items have beside them


class TableState(NamedTuple):
    """A table at one moment, but for its leaves."""

    roster: RosterState
    limits: Limits
    inserted: int  # the rate limiter's counters
    deleted: int
    sampled: int
    chains: Chains  # which rows the items have, in the roster's order
    row_keys: np.ndarray  # uint64 [R]; of the row at each place, `DROPPED` where there is none


class Keys(NamedTuple):
    """Under which keys the data of a state are back."""

    items: np.ndarray  # uint64 [n]; the last n of the state, in its order
    rows: np.ndarray  # uint64 [R]; `DROPPED` for rows that none of these has

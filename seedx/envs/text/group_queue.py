"""Groups on their way from the rollouts to the learner, through a replay: each once, and in their order.

A Reverb server delivers at least once and may lose what it holds when it is killed; one that others have used may hold
their groups, or those of this run before it was resumed, which are generated anew. So each group has a number. The
learner's end passes over what it has seen and what it did not ask for, and puts in order what comes otherwise; the
rollouts' end keeps what was not learned from, and inserts it again when the learner waits in vain.

Threading: one thread puts, another one takes.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable

import numpy as np

from seedx.checks import ConfigError
from seedx.envs.text.group import Group, example_item, to_item
from seedx.metrics import Metrics
from seedx.replay.items import Ragged, join
from seedx.replay.patience import Patience
from seedx.replay.replay import Replay, ReplayTimeoutError

_INSERT_TIMEOUT_S = 1.0
_SILENCE_S = 10.0  # after which what was inserted and did not come is taken for lost
_STRAYS = 16  # groups of others that may come after the start: those of a run that just ended were on their way


class GroupQueue:
    """Both ends of the way.

    Args:
        replay: A queue.
        first: The number of the first group: how many were learned from before.
        metrics: Counts `replay/repeated_groups`, `replay/foreign_groups` and `replay/resent_groups`.
        held: Groups of others that the replay has at the start.
    """

    def __init__(self, replay: Replay, first: int, metrics: Metrics, held: int = 0) -> None:
        self._replay, self._metrics = replay, metrics
        self._foreign: set[tuple[int, int]] = set()  # groups of others; a server that is started again repeats them
        self._most_foreign = held + _STRAYS
        self._session = secrets.randbits(62)  # tells our groups from all others
        self._patience = Patience("the rollout loop")
        self._number = first  # of the next that is put
        self._next = first  # of the next that is taken
        self._here: dict[int, Ragged] = {}  # received and not taken
        self._lock = threading.Lock()  # of the next
        self._kept: dict[int, Ragged] = {}  # inserted, and not received: no more than the rollouts are ahead
        self._silent_since: float | None = None  # the learner waits, and nothing was put or came since

    # ---- the rollouts' end

    def put(self, group: Group, stopped: Callable[[], bool]) -> None:
        """Inserts the next group; waits for room until it is to stop."""
        item = _numbered(to_item(group), self._session, self._number)
        with self._lock:
            self._kept[self._number] = item
        self._number += 1
        self._insert(item, stopped)

    def put_lost(self, stopped: Callable[[], bool]) -> None:
        """Inserts again what the learner waits for in vain, if there is any."""
        with self._lock:
            silent_s = 0.0 if self._silent_since is None else time.monotonic() - self._silent_since
            lost = list(self._kept.values()) if silent_s > _SILENCE_S else []
        for item in lost:
            self._metrics.count("replay/resent_groups")
            self._insert(item, stopped)

    def _insert(self, item: Ragged, stopped: Callable[[], bool]) -> None:
        priorities = np.ones(1, np.float32)
        while not stopped():
            try:
                self._replay.insert(item, priorities, _INSERT_TIMEOUT_S)
            except ReplayTimeoutError as error:
                self._patience.timed_out(error)
                continue
            self._patience.over()
            break
        with self._lock:
            self._silent_since = None

    # ---- the learner's end

    def take(self, count: int, timeout_s: float) -> Ragged:
        """The next groups, as many as asked for.

        Raises:
            ReplayTimeoutError: there were not so many within the timeout; those that came are kept for the next call.
            ConfigError: another run is at work on the same replay.
            What else `Replay.sample` raises.
        """
        deadline, wanted = time.monotonic() + timeout_s, range(self._next, self._next + count)
        while any(number not in self._here for number in wanted):
            try:
                item = self._replay.sample(1, max(deadline - time.monotonic(), 0.0)).items
            except ReplayTimeoutError:
                with self._lock:
                    self._silent_since = self._silent_since or time.monotonic()
                raise
            self._receive(item)
        self._next += count
        return join([self._here.pop(number) for number in wanted])

    def _receive(self, item: Ragged) -> None:
        session, number = item.state["order"][0].tolist()
        if session != self._session:
            self._metrics.count("replay/foreign_groups")
            self._foreign.add((session, number))
            if len(self._foreign) > self._most_foreign:
                raise ConfigError(
                    "another run inserts groups into this run's table, and each takes those of the other. Give each a "
                    "Reverb server of its own: --replay reverb starts one."
                )
            return
        if number < self._next or number in self._here:
            self._metrics.count("replay/repeated_groups")
            return
        self._here[number] = item
        with self._lock:
            self._kept.pop(number, None)
            self._silent_since = None


def example(group_size: int) -> Ragged:
    """An item like those of the queue, to tell a replay what they look like."""
    return _numbered(example_item(group_size), 0, 0)


def _numbered(item: Ragged, session: int, number: int) -> Ragged:
    return item._replace(state={**item.state, "order": np.array([[session, number]], np.int64)})

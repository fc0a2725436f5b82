"""Which prompts a run passes over: the rarer, the further their completions' success is from one half.

Prompts that are always answered right, or never, teach nothing: all rewards of their groups are equal. Each prompt has
a success rate, the exponential mean of its groups' mean rewards. Where its turn comes again it is taken with
probability floor + (1 - floor) 4 p (1 - p): above the floor in proportion to the variance of a reward that is 0 or 1.

Choices must not depend on timing, though groups are under way while others are chosen. Of the groups begun before, the
choice goes by all but the last `behind` - 1, which are those that admission lets be under way at most. So it is a
function of the seed and of what groups before it were rewarded, in a resumed run too.

Threading: one thread chooses and tells, another one says what was learned from and saves.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from seedx.checks import require
from seedx.envs.counter_rng import draw
from seedx.grpo_config import CurriculumConfig

MOST_PROMPTS = 200_000  # whose rates a checkpoint's metadata hold
_SALT = 0x43555252 << 32  # no number that orders the prompts is one of these
_RESOLUTION = 2**53


class Answered(NamedTuple):
    """A group that was scored.

    Attributes:
        position: Of its prompt in the order of the run.
        uid: Of its prompt.
        success: Its mean reward, within 0 and 1; None: nothing of it could be scored.
    """

    position: int
    uid: int
    success: float | None


class Curriculum:
    """Success rates, and the choices that follow from them.

    Args:
        config: How rare prompts become.
        seed: Of the run, 0 to 2**32 - 1.
        behind: Groups that may be under way at a time, 1 or more.
        saved: What `saved` gave; None: no prompt was answered before.
    """

    def __init__(
        self,
        config: CurriculumConfig,
        *,
        seed: int,
        behind: int,
        saved: Mapping[str, Any] | None = None,
    ) -> None:
        saved = saved or {"rates": (), "recent": ()}
        self._config, self._seed, self._behind = config, np.uint64(seed | _SALT), behind
        self._lock = threading.Lock()
        self._under_way: deque[tuple[int, int]] = deque()  # position and uid; bounded by admission
        self._answered = deque(Answered(*values) for values in saved["recent"])  # what `_trailing` does not hold
        self._known = 0  # how many of these `_rates` holds
        self._rates: dict[int, float] = dict(map(tuple, saved["rates"]))  # of prompts, as the next choice sees them
        self._trailing = self._rates.copy()  # likewise, the first choice after what was learned from

    # ---- the rollouts' thread

    def takes(self, position: int, uid: int) -> bool:
        """Whether the prompt at a position is taken; it is if it was not answered yet."""
        with self._lock:
            begun = len(self._answered) + len(self._under_way)
            self._go_by(begun - (self._behind - 1))
            rate = self._rates.get(uid)
        return rate is None or drawn(self._seed, position) < probability(rate, self._config.floor)

    def begin(self, position: int, uid: int) -> None:
        """The group of a prompt is begun."""
        with self._lock:
            self._under_way.append((position, uid))

    def answered(self, rewards: np.ndarray) -> None:
        """The oldest group under way is done: `[n]` rewards of the completions that were scored."""
        success = float(np.clip(rewards.mean(), 0.0, 1.0)) if len(rewards) else None
        with self._lock:
            self._answered.append(Answered(*self._under_way.popleft(), success))

    # ---- the learner's thread

    def learned(self, position: int) -> None:
        """All groups before this position were learned from, or are not going to be: no resume needs them."""
        with self._lock:
            before = sum(1 for _ in itertools.takewhile(lambda group: group.position < position, self._answered))
            spent = before - (self._behind - 1)
            self._go_by(spent)
            for _ in range(spent):
                self._add(self._trailing, self._answered.popleft())
                self._known -= 1

    def saved(self, position: int) -> dict[str, Any]:
        """What a run that begins at this position goes on from, as JSON can hold it."""
        self.learned(position)
        with self._lock:
            recent = [list(group) for group in self._answered if group.position < position]
            return {"rates": [list(pair) for pair in sorted(self._trailing.items())], "recent": recent}

    # ---- rates

    def _go_by(self, count: int) -> None:
        """Has choices go by so many of the groups in `_answered`."""
        while self._known < count:
            self._add(self._rates, self._answered[self._known])
            self._known += 1

    def _add(self, rates: dict[int, float], group: Answered) -> None:
        if group.success is not None:
            before = rates.get(group.uid, group.success)
            rates[group.uid] = before + self._config.weight * (group.success - before)


def check_num_prompts(num_prompts: int) -> None:
    """Makes sure that the rates of so many prompts can be kept.

    Raises:
        ConfigError: they cannot.
    """
    require(
        num_prompts <= MOST_PROMPTS,
        f"the task has {num_prompts:,} prompts to train on, and --curriculum.floor below 1 keeps the success of each, "
        f"of at most {MOST_PROMPTS:,}: so many hardly come twice. Leave --curriculum.floor at 1.",
    )


def probability(rate: float, floor: float) -> float:
    """That a prompt with this success rate is taken."""
    return floor + (1.0 - floor) * 4.0 * rate * (1.0 - rate)


def drawn(seed: np.uint64, position: int) -> float:
    """A number for each position, uniform in [0, 1)."""
    return float(draw(np.array([seed]), np.array([position], np.uint64), _RESOLUTION)[0]) / _RESOLUTION

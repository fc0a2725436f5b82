"""One host's part in learning together: when it gives a masked batch, what it says, and what it heeds."""

from __future__ import annotations

import logging
import signal
import time

import jax
import numpy as np

from seedx.hosts import Hosts
from seedx.learner.batches import Batches, LearnerBatch
from seedx.learner.learner import Learner
from seedx.lifeline import HostLostError
from seedx.threads import Crew
from seedx.votes import Vote

_POLL_S = 0.1
_SAY_S = 3.0

log = logging.getLogger(__name__)


class Joint:
    """Learning together with other hosts; for the learner's thread.

    Args:
        hosts: All of them.
        learner: Of this host.
        batches: Its own, of its share of a batch.
        masked: What it gives while it has none.
        wait_s: How long the others wait for its batch.
        crew: Is told when another host has failed.
        signals: Numbers of the signals that came; those of other hosts are added.

    Attributes:
        idle: Whether no host learned anything with the last update.
        broken: Whether an update failed midway and took the optimizer's state with it.
    """

    def __init__(
        self,
        hosts: Hosts,
        learner: Learner,
        batches: Batches,
        masked: LearnerBatch,
        wait_s: float,
        crew: Crew,
        signals: list[int],
    ) -> None:
        self._hosts, self._learner, self._batches, self._masked = hosts, learner, batches, masked
        self._wait_s = wait_s
        self._crew = crew
        self._signals = signals
        self._waited_until = time.monotonic() + wait_s
        self._short = False
        self.idle = True
        self.broken = False

    def next_batch(self, stopping: bool) -> LearnerBatch | None:
        """The next batch, or None if there is none yet.

        The others wait for it. So after `wait_s` without one it is a masked one, at the pace of the others, until there
        is one again; and at once if this host wants to stop.
        """
        left_s = self._waited_until - time.monotonic()
        wait_s = _POLL_S if self.idle else min(max(left_s, 0.0), _POLL_S)
        batch = None if stopping else self._batches.next(wait_s)
        if batch is not None:
            self._waited_until = time.monotonic() + self._wait_s
            self._note(short=False)
            return batch
        if left_s > 0 and not stopping:
            return None
        self._note(short=not stopping)
        return self._masked

    def _note(self, short: bool) -> None:
        if short and not self._short:
            log.warning("no batch for %g s; the other hosts learn without this one until it has some", self._wait_s)
        if self._short and not short:
            log.warning("this host learns again")
        self._short = short

    def update(
        self, batch: LearnerBatch, reason: str | None, return_mean: float, episodes: int
    ) -> tuple[np.ndarray | None, str | None, tuple[float, int]]:
        """One update of all hosts.

        Args:
            batch: Of this host.
            reason: Why it wants to stop, or None.
            return_mean: Of its last episodes.
            episodes: How many they are.

        Returns:
            The priorities of the batch's items; why all stop, or None; mean return and episodes of all hosts.

        Raises:
            HostLostError: the update failed, which is how the end of another host shows.
        """
        vote = Vote(reason, not batch.masked, batch.env_steps, return_mean, episodes)
        try:
            priorities = self._learner.step(batch, vote)
        except jax.errors.JaxRuntimeError as error:
            self.broken = True
            self._crew.stop.wait(_SAY_S)  # Who watches the hosts can say which one is lost.
            raise HostLostError(
                f"{self._hosts} cannot compute update {self._learner.state.updates + 1}, most likely since another one "
                f"is gone; its log says why. Start all again with --resume. ({error})"
            ) from error
        votes = self._learner.votes
        assert votes is not None
        self.idle = not votes.learners
        if votes.stop is not None:
            self._heed(votes.stop, votes.stopper)
        return priorities, votes.stop, votes.returns

    def _heed(self, stop: str, stopper: int) -> None:
        """Has this process end like that of the host that stops the run."""
        if stopper != self._hosts.index:
            log.warning("host %d of %d ends the run: %s", stopper, self._hosts.count, stop)
        if stop == "failed":
            self._crew.fail(HostLostError(f"host {stopper} of {self._hosts.count} failed; its log says why."))
        elif stop in signal.Signals.__members__ and not self._signals:
            self._signals.append(signal.Signals[stop])

"""What an LLM run's figures warn of: plain words when one of them is past a known line."""

from __future__ import annotations

from collections import deque

from seedx.console import Figures

_CLIPPED = 0.5  # clip fraction
_GAP = 1e-3  # of log-probabilities that engine and learner give one token with the same float32 weights
_NO_SPREAD = 0.9  # fraction of groups,
_GROUPS = 20  # of the last so many at least
_UNSCORED = 0.05  # fraction of completions
_IDLE = 0.5  # occupancy that is little, of the slots that completions under way could fill,
_WAITING = 0.3  # and part of the time that the learner waits for a batch which is much
_UNREWARDED = 0.5  # fraction of the completions under way
_COLLAPSED = 0.05  # of the entropy at the beginning
_FLAT_ROWS = 60  # over which a growing divergence must have brought some reward
_FLAT = 0.01


class Warnings:
    """Looks at one row of figures after the other.

    Args:
        exact: Whether engine and learner compute in the same precision as the weights are kept in.
        compared: Whether a completion is compared with those of its group, and teaches nothing where all are equal.
        under_way: Completions of rollouts at a time, at most.
        slots: Of the decode engine.
    """

    def __init__(self, exact: bool, compared: bool = True, *, under_way: int, slots: int) -> None:
        self._exact, self._compared = exact, compared
        self._under_way, self._slots = under_way, slots
        self._scored_before = 0.0
        self._equal: deque[tuple[float, float]] = deque()  # of the newest rows: groups, fraction without spread
        self._first_entropy: float | None = None
        self._before: deque[tuple[float, float]] = deque(maxlen=_FLAT_ROWS)  # reward, divergence

    def __call__(self, row: Figures) -> dict[str, str]:
        """What this row warns of, by kind."""
        checks = {
            "clip fraction": self._clipped(row),
            "engine gap": self._gap(row),
            "no spread": self._no_spread(row),
            "unscored": self._unscored(row),
            "idle": self._idle(row),
            "entropy": self._entropy(row),
            "divergence": self._divergence(row),
        }
        return {kind: text for kind, text in checks.items() if text}

    def _clipped(self, row: Figures) -> str:
        clipped = row.get("learner/clip_fraction", 0.0)
        if clipped <= _CLIPPED:
            return ""
        return (
            f"{clipped:.0%} of the tokens are clipped: completions are too stale, or steps too large. Lower "
            "--max-staleness or --learner.learning-rate."
        )

    def _gap(self, row: Figures) -> str:
        gap = row.get("learner/engine_gap_max", 0.0)
        if not self._exact or gap <= _GAP:
            return ""
        return (
            f"engine and learner differ by {gap:.2g} in a token's log-probability under the same weights: that is a "
            "bug, not staleness. Please report it with the run's config.json."
        )

    def _no_spread(self, row: Figures) -> str:
        if "rollout/zero_spread" in row:  # else none came back in this interval
            scored = row["rollout/scored_groups"]
            self._equal.append((scored - self._scored_before, row["rollout/zero_spread"]))
            self._scored_before = scored
        groups = sum(count for count, _ in self._equal)
        while self._equal and groups - self._equal[0][0] >= _GROUPS:
            groups -= self._equal.popleft()[0]
        equal = sum(count * fraction for count, fraction in self._equal) / max(groups, 1)
        if not self._compared or groups < _GROUPS or equal < _NO_SPREAD:
            return ""
        return (
            f"in {equal:.0%} of the last {groups:.0f} groups all rewards are equal, and teach nothing: the prompts are "
            "too hard or too easy, or the reward says too little. See samples.html; --grpo.dynamic-sampling passes "
            "over such groups."
        )

    def _unscored(self, row: Figures) -> str:
        unscored = row.get("reward/unscored", 0) - row.get("rollout/redundant_used", 0)  # others took their places
        if unscored <= 0 or unscored < _UNSCORED * row.get("env_steps", 0):
            return ""
        return f"{unscored:,.0f} completions could not be scored and are left out; the log above says why."

    def _idle(self, row: Figures) -> str:
        occupancy, waiting = row.get("decode/occupancy"), row.get("learner/wait_batch_share", 0.0)
        reach = min(self._under_way / self._slots, 1.0)  # small batches never fill the slots, and need not
        if occupancy is None or occupancy >= _IDLE * reach or waiting <= _WAITING:
            return ""
        unrewarded = row.get("reward/open", 0)
        why = "they take turns. Raise --max-staleness."
        if unrewarded > _UNREWARDED * self._under_way:
            why = (
                f"{unrewarded:,.0f} of {self._under_way:,} completions under way wait for their rewards. Raise "
                "--reward.workers, or have rewards take less time."
            )
        return (
            f"{1 - occupancy:.0%} of the decode engine's slots are empty, and the learner waits {waiting:.0%} of the "
            f"time: {why}"
        )

    def _entropy(self, row: Figures) -> str:
        entropy = row.get("learner/entropy")
        if entropy is None:
            return ""
        self._first_entropy = self._first_entropy or entropy
        if entropy >= _COLLAPSED * self._first_entropy or row.get("reward_mean", 0.0) >= 0.9:
            return ""
        return (
            f"entropy fell from {self._first_entropy:.3g} to {entropy:.3g} nats: completions are all alike. Raise "
            "--grpo.clip-high or --grpo.entropy-cost, or lower --learner.learning-rate."
        )

    def _divergence(self, row: Figures) -> str:
        reward, divergence = row.get("reward_mean"), row.get("learner/kl_reference")
        if reward is None or divergence is None:
            return ""
        full = len(self._before) == _FLAT_ROWS
        reward_then, divergence_then = self._before[0] if full else (reward, divergence)
        self._before.append((reward, divergence))
        if not full or reward > reward_then + _FLAT or divergence < 2 * max(divergence_then, 1e-3):
            return ""
        return (
            f"the divergence from the reference grew from {divergence_then:.3g} to {divergence:.3g} while the reward "
            f"stayed at {reward:.3g}: the reward may be gamed. Look at samples.html; raise --grpo.kl-cost."
        )

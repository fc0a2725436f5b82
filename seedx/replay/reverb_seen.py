"""Which items of a queue were sampled, remembered for as long as a server may give them again."""

from __future__ import annotations

_MAX_KEYS = 2**19  # of a generation; tens of megabytes


class Seen:
    """Keys in two generations: those since the last checkpoint of the servers, and those between it and the one before.

    A server that is started again gives again what was sampled after its last checkpoint. A key that came while that
    was being written may be in the older generation, so this is kept until the next one. What is known when a server
    was started again is kept apart until it comes again: it may lie in the table, and in checkpoints of it, for long.
    Without checkpoints, or with
    many items between them, generations end at `max_keys`, and older keys may be forgotten too early, which is said
    once. Not for several threads.

    Args:
        max_keys: Of each generation.
    """

    def __init__(self, max_keys: int = _MAX_KEYS) -> None:
        self._max_keys = max_keys
        self._new: set[int] = set()
        self._old: set[int] = set()
        self._restored: set[int] = set()
        self._said = False

    def add(self, key: int) -> bool:
        """Remembers a key; whether it is new."""
        is_new = key not in self._new and key not in self._old and key not in self._restored
        if len(self._new) == self._max_keys and key not in self._new:
            if self._old:
                self._warn()
            self.rotate()
        self._new.add(key)  # also one that came again, which a checkpoint may hold once more
        self._restored.discard(key)
        return is_new

    def rotate(self) -> None:
        """A checkpoint was written: what came before the one before it cannot come again."""
        self._old, self._new = self._new, set()

    def restored(self) -> None:
        """A server has loaded its last checkpoint: anything known may come again."""
        self._restored |= self._old | self._new
        if len(self._restored) > 2 * self._max_keys:
            self._warn()
            self._restored = self._old | self._new

    def _warn(self) -> None:
        if not self._said:
            self._said = True
            print(
                f"more than {2 * self._max_keys:,} items of the Reverb queue were sampled between its checkpoints; "
                "of older ones, those that a server gives again after a restart are trained on twice and not counted. "
                "Have it write checkpoints more often: --checkpoint.replay-interval-s.",
                flush=True,
            )

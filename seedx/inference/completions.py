"""What becomes of tokens: pieces for listeners, texts, completions; and how requests end.

Threading: the scheduler's thread alone.
"""

from __future__ import annotations

from seedx.inference.completion_text import CompletionText
from seedx.inference.requests import Completion, Delta, FinishReason, Handle, Tokens
from seedx.inference.slots import InFlight, Slots
from seedx.inference.waiting import Group, Sample, Waiting
from seedx.tokenizer import Tokenizer


class Completions:
    """The requests at work and what they have so far.

    Args:
        slots: Where their samples are.
        waiting: Where their samples wait.
        tokenizer: For texts; None: there are none.
    """

    def __init__(self, slots: Slots, waiting: Waiting, tokenizer: Tokenizer | None) -> None:
        self._slots, self._waiting, self._tokenizer = slots, waiting, tokenizer
        self.groups: dict[Handle, Group] = {}  # all that are not done

    def deliver(self, flight: InFlight) -> int:
        """Waits for a dispatch and hands out what it brought; how many tokens."""
        booked = self._slots.book(flight)
        ends = booked.start, booked.end, booked.stopped, booked.full
        for row, start, end, stopped, full, tokens, logprobs, raw_logprobs, versions in zip(
            booked.rows, *ends, *booked.new, strict=True
        ):
            sample = self._slots.sample_in(row)
            if sample is None:
                continue  # a listener that failed took it away
            reason: FinishReason | None = "stop" if stopped else "length" if full else None
            text = None
            if sample.text is not None:
                text = sample.text.extend(tokens[: end - start - stopped].tolist())  # a stop token has no text
                if sample.text.stopped:
                    reason, self._slots.table.count[row] = "stop", sample.text.num_tokens
            if reason is not None:
                self._finish(sample, reason, start, text)
            elif sample.group.listener is not None:
                self._tell(sample.group, Delta(sample.index, tokens, logprobs, raw_logprobs, versions, text, None))
        return booked.count

    def _finish(self, sample: Sample, reason: FinishReason, start: int | None = None, text: str | None = None) -> None:
        """Completes a sample; its listener is told what came from `start` on."""
        group, table = sample.group, self._slots.table
        end = int(table.count[sample.row]) if sample.row >= 0 else 0
        start = end if start is None else start
        tokens, new = table.read(sample.row, 0, end), table.read(sample.row, start, end)
        if sample.row >= 0:
            self._slots.leave(sample)
        rest = (text or "") + sample.text.flush() if sample.text is not None else None
        group.results[sample.index] = self._completion(sample, tokens, reason)
        group.handle.num_done = len(group.results)
        self._waiting.completed()
        if group.listener is not None and group.handle in self.groups:
            self._tell(group, Delta(sample.index, *new, rest, reason))
        if group.done and self.groups.pop(group.handle, None) is not None:
            group.handle.finish([group.results[i] for i in range(len(group.samples))])

    def _completion(self, sample: Sample, made: Tokens, reason: FinishReason) -> Completion:
        text = sample.text.text if sample.text is not None else None
        if text is None and self._tokenizer is not None:
            text = self._tokenizer.decode(made.tokens[: len(made.tokens) - (reason == "stop")].tolist())
        return Completion(*made, reason, text)

    def restart(self, sample: Sample) -> None:
        """Has a sample in a slot begin anew."""
        if sample.row < 0:
            return  # a listener that failed took it away
        group, request = sample.group, sample.group.request
        self._slots.leave(sample)
        if sample.text is not None and self._tokenizer is not None:
            sample.text = CompletionText(self._tokenizer, request.stop)
        group.unplaced.append(sample)
        self._waiting.returned(group, 1)
        self._waiting.push(group)
        if group.listener is not None:
            nothing = self._slots.table.read(0, 0, 0)
            self._tell(group, Delta(sample.index, *nothing, "" if sample.text else None, None, restarted=True))

    def _tell(self, group: Group, delta: Delta) -> None:
        assert group.listener is not None
        try:
            group.listener(delta)
        except Exception as error:
            if self.groups.pop(group.handle, None) is not None:
                group.listener = None
                self.end(group, "cancelled")
                group.handle.fail(error)

    def end(self, group: Group, reason: FinishReason) -> None:
        """Completes all samples of a group with what there is."""
        if group.unplaced:
            count = len(group.unplaced)
            group.unplaced.clear()
            self._waiting.placed(group, count)
        for sample in group.samples:
            if sample.index not in group.results:
                self._finish(sample, reason)

    def fail(self, error: BaseException) -> None:
        """Fails all requests."""
        for group in self.groups.values():
            group.handle.fail(error)
        self.groups.clear()

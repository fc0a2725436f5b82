"""Tasks for whole runs. Workers load it: no test framework, no jax."""

from __future__ import annotations

import itertools
import time
from pathlib import Path

from faulty_tasks import Faulty

from seedx.envs.text.task import Prompt


class Bytes:
    """Any model has some success: the part of a completion's characters that are below "@"."""

    max_tokens = 8

    def prompts(self, split):
        return [Prompt(f"{split[:2]}{number}=") for number in range(12)]

    def reward(self, prompt, completion):
        return sum(character < "@" for character in completion) / 8


class Known(Bytes):
    """Every other prompt is always answered right."""

    def reward(self, prompt, completion):
        return 1.0 if int(prompt.text[2:-1]) % 2 else super().reward(prompt, completion)


class Flaky(Bytes):
    """Some completions have no reward."""

    def reward(self, prompt, completion):
        if sum(map(ord, completion)) % 4 == 0:
            raise LookupError("no such completion")
        return super().reward(prompt, completion)


class Slow(Bytes):
    """Rewards wait."""

    reward_waits = True

    def reward(self, prompt, completion):
        time.sleep(0.3)
        return super().reward(prompt, completion)


class SlowKnown(Known):
    """Rewards wait."""

    reward_waits = True

    def reward(self, prompt, completion):
        time.sleep(0.3)
        return super().reward(prompt, completion)


class Talking(Bytes):
    """Answers twice."""

    max_tokens = 24

    def reply(self, prompt, turns):
        return f"{len(turns)}?" if len(turns) < 3 else None


class Silent(Bytes):
    """Never answers every third prompt."""

    def prompts(self, split):
        return [Prompt(f"{text}=") for text in ("silent", "a", "b")]

    def reply(self, prompt, turns):
        while prompt.text == "silent=":
            pass


class Stepped(Bytes):
    """Computes as many rewards as the file "allowed" says, and waits with the others."""

    reward_waits = True

    def __init__(self):
        self._numbers = itertools.count()

    def reward(self, prompt, completion):
        number = next(self._numbers)
        while number >= int(Path("allowed").read_text()):
            time.sleep(0.01)
        return super().reward(prompt, completion)


class Broken(Faulty):
    """The rewards of `Faulty`, one kind for every third prompt; the others count characters."""

    max_tokens = 4

    def __init__(self, *faults):
        self._texts = [text for fault in faults for text in (fault, "length", "length")]

    def prompts(self, split):
        return [Prompt(text) for text in self._texts]


class Empty(Bytes):
    def prompts(self, split):
        return []


class Untested(Bytes):
    def prompts(self, split):
        return super().prompts(split) if split == "train" else []


def bytes_():
    return Bytes()


def slow():
    return Slow()


def known():
    return Known()


def slow_known():
    return SlowKnown()


def flaky():
    return Flaky()


def talking():
    return Talking()


def silent():
    return Silent()


def stepped():
    return Stepped()


def loops():
    return Broken("loops")


def raises():
    return Broken("raises")


def allocates():
    return Broken("allocates")


def dies():
    return Broken("dies")


def nan():
    return Broken("nan")


def only_nan():
    task = Broken("nan")
    task._texts = ["nan"]
    return task


def empty():
    return Empty()


def untested():
    return Untested()


def unmade():
    raise RuntimeError("the data set is gone")

"""The part of grpo.py speed that tunix's GRPOLearner plays, in an interpreter with google-tunix.

Its argument is JSON, of `grpo_speed.time_tunix`. The work is that of the others: a step for 64 completions of 64 tokens
in groups of 8, prompts of 16 letters, a reward that counts a letter. Prints the seconds of each step but the first two.
"""

import contextlib
import itertools
import json
import sys
import time

from grpo_race_goal import OverError
from grpo_race_tunix import make_training


def main(settings: dict) -> list[float]:
    """Seconds of the steps, from one batch of rewards to the next."""
    times: list[float] = []

    def reward(completions: list[str], **_: object) -> list[float]:
        times.append(time.perf_counter())
        if len(times) == settings["updates"] + 3:
            raise OverError
        return [float(text.count("A")) for text in completions]

    with contextlib.suppress(OverError):
        make_training(settings, reward)()
    return [after - before for before, after in itertools.pairwise(times[2:])]


if __name__ == "__main__":
    print("SECONDS", json.dumps(main(json.loads(sys.argv[1]))), flush=True)

"""How fast GRPO is: against the programs that it is made of, against others, with slow rewards, and asked by others.

    python benchmarks/grpo.py speed                    # against the bare jitted decode and update
    python benchmarks/grpo.py speed --devices 2 --trl-python /path/to/bin/python --tunix-python /path/to/bin/python
                                                       # on two simulated devices, and TRL and tunix
    python benchmarks/grpo.py latency                  # with a verifier that sleeps
    python benchmarks/grpo.py serving                  # while others ask its engine, as with --serve-port
    python benchmarks/grpo.py race --trl-python /path/to/bin/python --tunix-python /path/to/bin/python
                                                       # to a reward of 0.9 from one warm start, and TRL and tunix

Each is in grpo_NAME.py. Contenders take turns, and figures are medians over the rounds; `race` has one round. Prints
one line for each figure: RESULT <name> <value> <unit> (min, max). The tiny model is random, float32: vocabulary 64,
width 128, feed-forward 256, 4 layers, heads 4/2; an update takes 64 completions of 64 tokens in groups of 8. `race`
has model, task and batches of the default command.

Targets: `speed` at least 0.9 of the bare programs and 1.5 times TRL and tunix, goal 2.5; `latency` at least 0.9 of what
staleness allows; `serving` at least 0.9 of the rate alone, with a request for 64 tokens each second.
"""

from __future__ import annotations

import argparse
import sys

import grpo_latency
import grpo_race
import grpo_serving
import grpo_speed


def main(argv: list[str]) -> None:
    """Runs a subcommand."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("speed", help="against the bare programs")
    command.add_argument("--rounds", type=int, default=7, help="rounds that count")
    command.add_argument("--devices", type=int, default=1, help="devices that share rows; on a CPU simulated")
    command.add_argument("--trl-python", help="an interpreter with torch, transformers and trl")
    command.add_argument("--tunix-python", help="an interpreter with google-tunix")
    command.set_defaults(run=grpo_speed.run)
    command = commands.add_parser("latency", help="with a verifier that sleeps")
    command.add_argument("--updates", type=int, default=12, help="updates that count of each setting")
    command.set_defaults(run=grpo_latency.run)
    command = commands.add_parser("serving", help="while others ask its engine")
    command.add_argument("--rounds", type=int, default=5, help="rounds that count")
    command.add_argument("--updates", type=int, default=30, help="updates of a turn")
    command.set_defaults(run=grpo_serving.run)
    command = commands.add_parser("race", help="to a reward from the same warm start")
    command.add_argument("--trl-python", help="an interpreter with torch, transformers and trl")
    command.add_argument("--tunix-python", help="an interpreter with google-tunix")
    command.add_argument("--seed", type=int, default=1, help="of the warm start and of what follows")
    command.set_defaults(run=grpo_race.run)
    plan = parser.parse_args(argv)
    plan.run(plan)


if __name__ == "__main__":
    main(sys.argv[1:])

"""How fast GRPO is: a whole run against the programs that it is made of, against others, and with slow rewards.

    python benchmarks/grpo.py speed                    # against the bare jitted decode and update
    python benchmarks/grpo.py speed --devices 2        # rows spread over two simulated devices
    python benchmarks/grpo.py latency                  # with a verifier that sleeps

Each is in grpo_NAME.py. Contenders take turns, and figures are medians over the rounds. Prints one line for each
figure: RESULT <name> <value> <unit> (min, max). The tiny model is random, float32: vocabulary 64, width 128,
feed-forward 256, 4 layers, heads 4/2; an update takes 64 completions of 64 tokens in groups of 8.

Targets: `speed` at least 0.9 of the bare programs; `latency` at least 0.9 of what staleness allows.
"""

from __future__ import annotations

import argparse
import sys

import grpo_latency
import grpo_speed


def main(argv: list[str]) -> None:
    """Runs a subcommand."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("speed", help="against the bare programs")
    command.add_argument("--rounds", type=int, default=7, help="rounds that count")
    command.add_argument("--devices", type=int, default=1, help="devices that share rows; on a CPU simulated")
    command.set_defaults(run=grpo_speed.run)
    command = commands.add_parser("latency", help="with a verifier that sleeps")
    command.add_argument("--updates", type=int, default=12, help="updates that count of each setting")
    command.set_defaults(run=grpo_latency.run)
    plan = parser.parse_args(argv)
    plan.run(plan)


if __name__ == "__main__":
    main(sys.argv[1:])

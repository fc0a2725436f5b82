"""How fast tokens are made: the scheduler and its engine against what they are made of, and against others.

    python benchmarks/decode.py tiny                                      # against the bare jitted scan
    python benchmarks/decode.py tiny --devices 2 --peer-python /path/to/bin/python  # and Hugging Face's generate
    python benchmarks/decode.py smollm2 --peer-python /path/to/bin/python
    python benchmarks/decode.py smollm2 --int8                            # int8 weights against float32
    python benchmarks/decode.py load --peer-python /path/to/bin/python
    python benchmarks/decode.py mixed
    python benchmarks/decode.py group
    python benchmarks/decode.py swap

Each is in decode_NAME.py. The peer's interpreter has torch and transformers, for `smollm2` and `load` also gguf.
Contenders take turns, and figures are medians over the rounds. Prints one line for each figure: RESULT <name> <value>
<unit> (min, max). The tiny model is random, float32: vocabulary 64, width 128, feed-forward 256, 4 layers, heads 4/2.

Targets: `tiny` at least 0.85 of the scan's tokens/s and 3 times generate's, goal 5; `smollm2` at least generate's;
`load` at least 2 times the static batches' useful tokens/s; `mixed` at least 0.9 of the slots in use; `group` one
prefill; `swap` at most one step longer than the median.
"""

from __future__ import annotations

import argparse
import sys

import decode_group
import decode_load
import decode_mixed
import decode_smollm2
import decode_swap
import decode_tiny


def main(argv: list[str]) -> None:
    """Runs a subcommand."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("tiny", help="the tiny model against the bare scan and generate")
    command.add_argument("--peer-python", help="an interpreter with torch and transformers")
    command.add_argument("--rounds", type=int, default=7, help="rounds that count")
    command.add_argument("--steps", type=int, default=8, help="tokens of each slot in one dispatch")
    command.add_argument("--devices", type=int, default=1, help="devices that share the slots; on a CPU simulated")
    command.set_defaults(run=decode_tiny.run)
    command = commands.add_parser("smollm2", help="SmolLM2-135M against generate")
    command.add_argument("--peer-python", help="an interpreter with torch, transformers and gguf")
    command.add_argument("--rounds", type=int, default=3, help="rounds that count")
    command.add_argument("--int8", action="store_true", help="also with int8 weights")
    command.set_defaults(run=decode_smollm2.run)
    command = commands.add_parser("load", help="SmolLM2-135M under a load of mixed lengths against static batches")
    command.add_argument("--peer-python", help="an interpreter with torch, transformers and gguf")
    command.add_argument("--rounds", type=int, default=1, help="loads, each against its static batches")
    command.set_defaults(run=decode_load.run)
    command = commands.add_parser("mixed", help="slots in use with mixed lengths, tiny model")
    command.set_defaults(run=decode_mixed.run)
    command = commands.add_parser("group", help="16 samples of a prompt, tiny model")
    command.set_defaults(run=decode_group.run)
    command = commands.add_parser("swap", help="how long new weights hold decoding up, SmolLM2-135M")
    command.add_argument("--int8", action="store_true", help="with int8 weights, which are quantised at each swap")
    command.set_defaults(run=decode_swap.run)
    plan = parser.parse_args(argv)
    plan.run(plan)


if __name__ == "__main__":
    main(sys.argv[1:])

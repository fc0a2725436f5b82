"""Figures of scaling: `python benchmarks/scaling.py publish`; `--help` after it says more."""

import sys

import scaling_publish

COMMANDS = {"publish": scaling_publish.main}


if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1] not in COMMANDS:
        sys.exit(f"give one of {', '.join(COMMANDS)}; see each one's --help.")
    COMMANDS[sys.argv[1]](sys.argv[2:])

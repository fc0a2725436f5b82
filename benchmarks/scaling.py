"""Figures of scaling: `python benchmarks/scaling.py NAME`, each in its scaling_NAME.py."""

import sys

import scaling_collectives
import scaling_delta
import scaling_model
import scaling_publish

COMMANDS = {
    "collectives": scaling_collectives.main,
    "delta": scaling_delta.main,
    "model": scaling_model.main,
    "publish": scaling_publish.main,
}


if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1] not in COMMANDS:
        sys.exit(f"give one of {', '.join(COMMANDS)}; see each one's --help.")
    COMMANDS[sys.argv[1]](sys.argv[2:])

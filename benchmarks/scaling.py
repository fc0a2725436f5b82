"""Figures of scaling: `python benchmarks/scaling.py NAME`, each in its scaling_NAME.py; see each one's --help.

collectives  what devices send each other in an update, of a ring's bytes
compile      all programs compiled for TPU slices that are not there, and their memory
delta        bytes that deltas of a GRPO run's versions save
model        the cost model: predicted and measured runs, projections
publish      1 GB of weights to another process
"""

import importlib
import sys

COMMANDS = ("collectives", "compile", "delta", "model", "publish")


if __name__ == "__main__":
    if sys.argv[1:2] in (["--help"], ["-h"]):
        print(__doc__)
    elif sys.argv[1:] and sys.argv[1] in COMMANDS:
        # Not before it is known which: each sets up jax's devices in its own way.
        sys.exit(importlib.import_module(f"scaling_{sys.argv[1]}").main(sys.argv[2:]))
    else:
        sys.exit(f"give one of {', '.join(COMMANDS)}; see --help.")

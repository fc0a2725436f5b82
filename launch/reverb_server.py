# /// script
# requires-python = "==3.11.*"
# dependencies = ["dm-reverb[tensorflow]==0.14.0"]
# ///
"""Serves replay tables with dm-reverb, in an interpreter and environment of its own, which uv makes.

    uv run --script launch/reverb_server.py --port 8000 --config tables.json --checkpoint-dir tables \
        --allow-unauthenticated

The config is a file with a JSON list, or the list itself, with an object for each table:

    {"name": "replay", "sampler": "prioritized", "priority_exponent": 0.6, "remover": "fifo", "max_size": 100000,
     "max_times_sampled": 0, "samples_per_insert": 1.0, "min_size": 1000, "min_diff": 0.0, "max_diff": 2000.0}

`sampler` and `remover` are "fifo", "lifo", "uniform" or "prioritized"; the last four are those of Reverb's RateLimiter
(1.8e308 is as good as no bound), and `seedx.replay.description` makes it all. The newest checkpoint in
--checkpoint-dir is loaded, and what it says of a table then counts, not the config. SIGTERM and Ctrl-C write one and
end with 143 and 130.
"""

import argparse
import json
import os
import signal
import sys
import threading
from pathlib import Path

UNAUTHENTICATED = """\
reverb_server.py: dm-reverb listens on every interface of this machine and asks for no credentials: whoever reaches \
the port can read, change and fill the tables. If only those whom you trust can reach it (a private network, a \
firewall), say so with --allow-unauthenticated."""


def main() -> int:
    """Serves until a signal; the exit code of a wrong command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--config", required=True, help="the tables: a JSON list, or a file that holds one")
    parser.add_argument("--checkpoint-dir", type=Path, required=True, help="made if it is not there")
    parser.add_argument("--allow-unauthenticated", action="store_true")
    flags = parser.parse_args()
    if not flags.allow_unauthenticated:
        print(UNAUTHENTICATED, file=sys.stderr)
        return 2
    text = flags.config if flags.config.startswith("[") else Path(flags.config).read_text()
    tables = json.loads(text)
    stopped, numbers = threading.Event(), []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: (numbers.append(number), stopped.set()))

    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # it takes no GPU for an error
    import reverb  # pyrefly: ignore [missing-import]

    flags.checkpoint_dir.mkdir(parents=True, exist_ok=True)
    found = newest_checkpoint(flags.checkpoint_dir)
    print(f"reverb_server.py: {f'loading {found}' if found else 'empty tables'}", flush=True)
    checkpointer = reverb.platform.checkpointers_lib.DefaultCheckpointer(str(flags.checkpoint_dir.absolute()))
    server = reverb.Server([make_table(reverb, **table) for table in tables], flags.port, checkpointer)
    names = ", ".join(table["name"] for table in tables)
    print(f"reverb_server.py: serving {names} on port {server.port}", flush=True)
    parent = int(os.environ.get("SEEDX_PARENT_PID", 0))  # the supervisor's; uv stands between
    while not stopped.wait(1.0):  # a signal interrupts no wait without a timeout
        if parent and not Path(f"/proc/{parent}").exists():
            os._exit(1)
    print(f"reverb_server.py: wrote {reverb.Client(f'localhost:{server.port}').checkpoint()}", flush=True)
    os._exit(128 + numbers[0])  # server.stop() takes seconds, in which inserts would be acknowledged and lost


def newest_checkpoint(directory: Path) -> Path | None:
    """The one that Reverb loads: the last by name that is complete."""
    return max((done.parent for done in directory.glob("*/DONE")), default=None)


def make_table(
    reverb,
    name: str,
    sampler: str,
    priority_exponent: float,
    remover: str,
    max_size: int,
    max_times_sampled: int,
    samples_per_insert: float,
    min_size: int,
    min_diff: float,
    max_diff: float,
):
    """A table without a signature: clients check items themselves."""

    def selector(kind: str):
        match kind:
            case "fifo":
                return reverb.selectors.Fifo()
            case "lifo":
                return reverb.selectors.Lifo()
            case "uniform":
                return reverb.selectors.Uniform()
            case "prioritized":
                return reverb.selectors.Prioritized(priority_exponent)
        raise ValueError(f"table {name}: selector {kind!r} must be fifo, lifo, uniform or prioritized.")

    limiter = reverb.rate_limiters.RateLimiter(samples_per_insert, min_size, min_diff, max_diff)
    return reverb.Table(name, selector(sampler), selector(remover), max_size, limiter, max_times_sampled)


if __name__ == "__main__":
    sys.exit(main())

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
(1.8e308 is as good as no bound). `python -m seedx.program --format tables` with the flags of a run prints its list. The
newest checkpoint in --checkpoint-dir is loaded, and what it says of a table then counts, not the config. SIGTERM and
Ctrl-C write one and end with 143 and 130.
"""

import argparse
import json
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path

SELECTORS = ("fifo", "lifo", "uniform", "prioritized")
LEAST = {"max_size": 1, "max_times_sampled": 0, "min_size": 1}  # of a table's figures, whole ones first
LEAST |= {"priority_exponent": 0.0, "samples_per_insert": 1e-300, "min_diff": -1.8e308, "max_diff": -1.8e308}
UNAUTHENTICATED = """\
dm-reverb listens on every interface of this machine and asks for no credentials: whoever reaches the port can read, \
change and fill the tables. If only those whom you trust can reach it, say so with --allow-unauthenticated."""


def main() -> int:
    """Serves until a signal; the exit code of a wrong command line."""
    end_with(os.getppid())
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--config", required=True, help="the tables: a JSON list, or a file that holds one")
    parser.add_argument("--checkpoint-dir", type=Path, required=True, help="made if it is not there")
    parser.add_argument("--allow-unauthenticated", action="store_true")
    flags = parser.parse_args()
    if not flags.allow_unauthenticated:
        return refuse(UNAUTHENTICATED)
    wrong = f"--config {flags.config[:80]!r}"
    try:
        tables = json.loads(flags.config if flags.config.startswith("[") else Path(flags.config).read_text())
        names = [check_table(table) for table in tables]
        if len(set(names)) < max(len(names), 1):
            raise ValueError("it must hold a table, and no two of one name")
        wrong = f"--checkpoint-dir {flags.checkpoint_dir}"
        flags.checkpoint_dir.mkdir(parents=True, exist_ok=True)
        wrong = f"--port {flags.port}"
        is_dual = socket.has_dualstack_ipv6()  # dm-reverb would share the port with a server that has it already
        family = socket.AF_INET6 if is_dual else socket.AF_INET
        socket.create_server(("", flags.port), family=family, dualstack_ipv6=is_dual).close()
    except (OSError, TypeError, ValueError) as error:
        return refuse(f"{wrong} cannot be used: {error}")
    numbers: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        # No more than that: signals come close together, and a handler that took a lock would wait for itself.
        signal.signal(number, lambda number, _: numbers.append(number))

    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # it takes no GPU for an error
    import reverb  # pyrefly: ignore [missing-import]

    found = newest_checkpoint(flags.checkpoint_dir)
    print(f"reverb_server.py: {f'loading {found}' if found else 'empty tables'}", flush=True)
    checkpointer = reverb.platform.checkpointers_lib.DefaultCheckpointer(str(flags.checkpoint_dir.absolute()))
    server = reverb.Server([make_table(reverb, table) for table in tables], flags.port, checkpointer)
    print(f"reverb_server.py: serving {', '.join(names)} on port {server.port}", flush=True)
    while not numbers:
        time.sleep(0.2)
    print(f"reverb_server.py: wrote {reverb.Client(f'localhost:{server.port}').checkpoint()}", flush=True)
    os._exit(128 + numbers[0])  # server.stop() takes seconds, in which inserts would be acknowledged and lost


def refuse(why: str) -> int:
    """Says what is wrong with the command line; its exit code."""
    print(f"reverb_server.py: {why}", file=sys.stderr)
    return 2


def end_with(parent: int) -> None:
    """Ends this process, wherever it is, when uv does, or the supervisor that started uv: neither may tell us.

    A shell or another parent may end before; a server that was started with nohup goes on.
    """
    supervisor = os.environ.get("SEEDX_PARENT_PID")
    under_uv = Path(f"/proc/{parent}/comm").read_text().strip() == "uv"

    def watch() -> None:
        while not under_uv or os.getppid() == parent:
            if supervisor is not None and not is_running(supervisor):
                break
            time.sleep(1.0)
        os._exit(1)

    if under_uv or supervisor is not None:
        threading.Thread(target=watch, daemon=True).start()


def is_running(process: str) -> bool:
    """Whether there is such a process, and not only what its parent has not taken note of yet."""
    try:
        status = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] not in ("Z", "X")


def newest_checkpoint(directory: Path) -> Path | None:
    """The one that Reverb loads: the last by name that is complete."""
    return max((done.parent for done in directory.glob("*/DONE")), default=None)


def check_table(table) -> str:
    """The name of a table; ValueError where Reverb would fail, which takes seconds to load."""
    keys = {"name", "sampler", "remover", *LEAST}
    if not isinstance(table, dict) or table.keys() != keys:
        raise ValueError(f"{str(table)[:200]} must be an object with {', '.join(sorted(keys))}, all and no others")
    for key in ("sampler", "remover"):
        if table[key] not in SELECTORS:
            raise ValueError(f"{key} {table[key]!r} must be one of {', '.join(SELECTORS)}")
    for key, least in LEAST.items():
        if not isinstance(table[key], int | type(least)) or not table[key] >= least:
            raise ValueError(f"{key} {table[key]!r} must be of type {type(least).__name__} and at least {least}")
    return str(table["name"])


def make_table(reverb, table):
    """A table without a signature: clients check items themselves."""

    def selector(kind: str):
        exponent = [table["priority_exponent"]] if kind == "prioritized" else []
        return getattr(reverb.selectors, kind.capitalize())(*exponent)

    limits = (table[key] for key in ("samples_per_insert", "min_size", "min_diff", "max_diff"))
    sizes = table["max_size"], reverb.rate_limiters.RateLimiter(*limits), table["max_times_sampled"]
    return reverb.Table(table["name"], *map(selector, (table["sampler"], table["remover"])), *sizes)


if __name__ == "__main__":
    sys.exit(main())

# /// script
# requires-python = "==3.10.*"
# dependencies = ["dm-launchpad==0.5.2", "tensorflow-cpu==2.8.4", "numpy<1.24", "protobuf<3.20"]
# ///
"""Runs everything on this machine as a Launchpad program, in an interpreter of Launchpad's own, which uv makes.

    uv run --script launch/lp.py --agent impala --num-actors 8

All other flags are those of launch/local.py: `python -m seedx.program` takes them, makes the run directory and says
what the roles are. Launchpad binds the learner's address and starts the roles. It restarts none: when one fails, all
end. Exit codes are those of launch/local.py.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

TERMINALS = ("output_to_files", "tmux_session")


def main() -> int:
    """Runs the program to its end; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--python", help="runs seedx; by default the first python3 on PATH that can")
    parser.add_argument("--terminal", default=TERMINALS[0], help=" or ".join(TERMINALS))
    parser.add_argument("--dry-run", action="store_true", help="print the roles' commands and start nothing")
    own, flags = parser.parse_known_args()
    if own.terminal not in TERMINALS:
        why = "in current_terminal Launchpad notices no failure, and others need a display, or byobu"
        parser.error(f"--terminal {own.terminal} must be {' or '.join(TERMINALS)}: {why}.")
    if own.terminal == "tmux_session" and shutil.which("tmux") is None:
        parser.error(f"--terminal {own.terminal} needs tmux: install it, or use {TERMINALS[0]}.")
    for flag in {"--address", "--server", "--format", "--prepare"} & {word.partition("=")[0] for word in flags}:
        parser.error(f"{flag} is not for Launchpad, which binds the address; see python -m seedx.program.")
    path = os.environ["PATH"].split(os.pathsep)  # uv has put this interpreter first, which is not for the roles
    os.environ["PATH"] = os.pathsep.join(where for where in path if where != os.path.dirname(sys.executable))
    os.environ.pop("VIRTUAL_ENV", None)
    if (python := find_python(own.python)) is None:
        where = f"--python {own.python} cannot" if own.python else "no python3 on PATH can"
        parser.error(f"{where} import seedx; activate the environment that has it, or name its --python.")
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback
    threading.Thread(target=end_with_uv, args=(os.getppid(),), daemon=True).start()
    command = (python, "-m", "seedx.program", *flags, "--address", "localhost:0")  # Launchpad binds another one
    if own.dry_run:
        return subprocess.call(command)
    plan = subprocess.run((*command, "--prepare", "--format", "json"), stdout=subprocess.PIPE)
    return plan.returncode or run(json.loads(plan.stdout), own.terminal == "tmux_session")


def find_python(wanted: "str | None") -> "str | None":
    """The path of an interpreter that can run seedx: the one asked for, or the first on PATH."""
    for directory in [None] if wanted else os.environ["PATH"].split(os.pathsep):
        python = shutil.which(wanted or "python3", path=directory)
        if python and subprocess.call((python, "-c", "import seedx.cli"), stderr=subprocess.DEVNULL) == 0:
            return os.path.abspath(python)
    return None


def end_with_uv(parent: int) -> None:
    """Ends the run when uv, which started us, is killed: it cannot tell us."""
    if Path(f"/proc/{parent}/comm").read_text().strip() == "uv":
        while os.getppid() == parent:
            time.sleep(1.0)
        os.kill(os.getpid(), signal.SIGTERM)


def run(plan: dict, tmux: bool) -> int:
    """Launches a plan's roles and waits for their end; the exit code."""
    os.environ["LAUNCHPAD_LOGGING_DIR"] = f"{plan['run_dir']}/logs"  # read when Launchpad is imported
    import launchpad
    from absl import flags
    from lp_ending import raise_on_signals, wait
    from lp_program import make_program

    session = f"seedx-{os.getpid()}"
    # Launchpad is to kill nobody: `wait` does, and lets a checkpoint take its time.
    flags.FLAGS(["lp.py", "--lp_termination_notice_secs=-1", f"--tmux_session_name={session}"])
    manager = launchpad.launch(make_program(plan, tmux), launch_type="local_mp", terminal=TERMINALS[tmux])
    if tmux:
        try:
            raise_on_signals(threading.Event())
            return manager.wait() or 0
        finally:
            subprocess.call(("tmux", "kill-session", "-t", session))
    workers = {title.removesuffix(".log"): worker for title, [worker] in manager._active_workers.items()}
    return wait(manager, workers, Path(plan["run_dir"]))


if __name__ == "__main__":
    sys.exit(main())

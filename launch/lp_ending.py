"""How the roles of a Launchpad program end: by themselves, when one fails, or by a signal; see lp.py."""

import atexit
import contextlib
import os
import signal
import sys
import threading
import time
from pathlib import Path

GRACE_S = 10.0  # from a signal until a role is killed; it starts anew while the learner writes a checkpoint
SECOND_INTERRUPT_S = 0.5  # from a Ctrl-C until another one kills at once


def raise_on_signals(ending: threading.Event) -> None:
    """Has the first signal raise SystemExit if none is `ending`, and a second Ctrl-C that is not the first again."""
    came: "list[float]" = []

    def leave(number, _) -> None:
        came.append(time.monotonic())  # uv passes on what has come already
        again = number == signal.SIGINT and came[-1] > came[0] + SECOND_INTERRUPT_S
        if again or (len(came) == 1 and not ending.is_set()):
            sys.exit(128 + number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup has SIGHUP
            signal.signal(number, leave)


def wait(manager, workers: dict, run_dir: Path) -> int:
    """Waits until the learner is done, a role fails or a signal comes, then ends the others; the exit code."""
    atexit.unregister(manager.wait)  # What is left of the roles when this process ends, the kernel kills.
    name, told, ending = "learner", None, threading.Event()
    try:
        raise_on_signals(ending)
        manager.wait(["learner.log"])
    except RuntimeError:  # Launchpad has told the others
        name = next(name for name, worker in workers.items() if worker.returncode)
    except SystemExit as leaving:
        told = leaving.args[0]
    ending.set()
    number = (told or 128 + signal.SIGTERM) - 128
    end([workers["learner"]], number, run_dir / "checkpoints")
    end(workers.values(), signal.SIGTERM, run_dir / "checkpoints")
    code = workers[name].returncode if workers[name].returncode >= 0 else 128 - workers[name].returncode
    code = told if told and code == 128 + signal.SIGKILL else code  # it took too long
    log = run_dir / "logs" / f"{name}.log"
    lines, failed = log.read_text(errors="replace").splitlines(), name != "learner" or code not in (0, 128 + number)
    print(*lines[-20:] if failed else lines[-1:], sep="\n", flush=True)
    if failed:
        print(f"lp.py: {name} ended with code {code}, and so the run. Its log: {log}", file=sys.stderr)
    return code


def end(workers, number: int, checkpoints: Path) -> None:
    """Tells roles to end, waits until they have, and kills those that take too long."""
    for worker in workers:
        worker.send_signal(number)
    seen, shown = None, time.monotonic()
    while any(worker.poll() is None for worker in workers) and time.monotonic() < shown + GRACE_S:
        if checkpoints.exists() and (changed := checkpoints.stat().st_mtime) != seen:
            seen, shown = changed, time.monotonic()
        time.sleep(0.05)
    for worker in workers:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(worker.pid, signal.SIGKILL)  # with what it has started
        worker.wait()

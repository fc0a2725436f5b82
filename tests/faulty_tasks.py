"""Tasks with faults, for the tests: `faulty_tasks:make`. What goes wrong is what a prompt's text says.

Imports no test framework: workers load it.
"""

import ctypes
import math
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np

from seedx.checks import ConfigError
from seedx.envs.text.sandbox import SandboxError, SandboxLimits, run_pairs

NOT_ENDING = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"


class Faulty:
    """Rewards by the prompt's text: the name of a method below, its argument in `answer`."""

    def prompts(self, split):
        return []

    def reward(self, prompt, completion):
        return getattr(self, prompt.text)(prompt, completion)

    def reply(self, prompt, turns):
        """As the last turn says; other faults are those of rewards."""
        match turns[-1]:
            case "none":
                return None
            case "number":
                return 3
            case "surrogate":
                return "\udcff"
            case "count":
                return f"{prompt.answer}{len(turns)}€"
            case fault:
                return getattr(self, fault)(prompt, "")

    def length(self, prompt, completion):
        return float(len(completion))

    def components(self, prompt, completion):
        return {"right": completion == prompt.answer, "length": np.float32(len(completion)), "turns": np.int64(3)}

    def extra(self, prompt, completion):
        return {**prompt.extra, "messages": len(prompt.messages)}

    def loops(self, prompt, completion):
        while True:
            pass

    def sleeps(self, prompt, completion):
        time.sleep(600)

    sleeps_too = sleeps

    def meets(self, prompt, completion):
        """Ends when three are here."""
        THREE.wait(60)
        return 1.0

    def raises(self, prompt, completion):
        raise LookupError("no such\udcffanswer")

    def exits(self, prompt, completion):
        sys.exit(3)

    def dies(self, prompt, completion):
        os._exit(7)

    def dies_beside(self, prompt, completion):
        """Once another one is in `stays`."""
        while not Path(completion).exists():
            time.sleep(0.01)
        os._exit(7)

    def stays(self, prompt, completion):
        """Ends only the second time."""
        if not (mark := Path(completion)).exists():
            mark.touch()
            time.sleep(600)
        return 1.0

    def segfaults(self, prompt, completion):
        signal.signal(signal.SIGSEGV, signal.SIG_DFL)
        ctypes.string_at(0)

    def nan(self, prompt, completion):
        return math.nan

    def infinite(self, prompt, completion):
        return {"right": 1.0, "length": math.inf}

    def none(self, prompt, completion):
        return None

    def word(self, prompt, completion):
        return "1.0"

    def empty(self, prompt, completion):
        return {}

    def array(self, prompt, completion):
        return np.zeros(3)

    def allocates(self, prompt, completion):
        return float(len(bytearray(50 * 2**30)))

    def prints(self, prompt, completion):
        print('{"id": 0, "scores": {"reward": 666}}', flush=True)
        os.write(1, b'\n{"ready": true}\ngarbage\n')
        subprocess.run(["echo", "garbage"], check=True)
        return 1.0 if sys.stdin.read() == "" else 0.0

    def alarm(self, prompt, completion):
        """As verifiers do that bound their own time."""
        signal.signal(signal.SIGALRM, lambda *_: None)
        signal.alarm(0)
        return 1.0

    def forks_and_returns(self, prompt, completion):
        os.fork()
        return 1.0

    def leaves_children(self, prompt, completion):
        """One in our group, one in a session of its own whose parent has ended; both ignore SIGTERM."""
        subprocess.Popen([sys.executable, "-c", NOT_ENDING])
        if os.fork() == 0:
            os.setsid()
            subprocess.Popen([sys.executable, "-c", NOT_ENDING])
            os._exit(0)
        if completion == "dies":
            os._exit(7)
        Path(completion).touch()
        time.sleep(600)

    def runs(self, prompt, completion):
        """The completion in a sandbox."""
        result = run_pairs(completion, [("", prompt.answer)], SandboxLimits(timeout_s=600))
        return {"passed": result.passed, "strict": os.environ["SEEDX_SANDBOX"] == "strict"}

    def flaky(self, prompt, completion):
        """Fails the first time."""
        if not (mark := Path(completion)).exists():
            mark.touch()
            raise LookupError("not yet")
        return 1.0

    def prepared(self, prompt, completion):
        return self.ready

    def environment(self, prompt, completion):
        return {"jax": float("jax" in sys.modules), "here": float(os.getcwd() in sys.path)}


THREE = threading.Barrier(3)


def make():
    return Faulty()


def make_waiting():
    task = Faulty()
    task.reward_waits = True
    return task


def make_prepared():
    task = Faulty()
    task.ready = 0.0
    task.prepare = lambda: setattr(task, "ready", 1.0)
    return task


def make_unprepared():
    task = Faulty()
    task.prepare = lambda: _raise(ConfigError("the model is gone"))
    return task


def _raise(error):
    raise error


def make_nothing():
    raise RuntimeError("the data set is gone")


def make_sandboxed():
    """Where there is no sandbox."""
    raise SandboxError("This system refuses a sandbox")


def make_end():
    os._exit(9)


def make_flaky():
    """Cannot be made the first time."""
    mark = Path(os.environ["FLAKY_MARK"])
    if not mark.exists():
        mark.touch()
        raise RuntimeError("not yet")
    return Faulty()

"""Environments with faults, for the tests: `--env faulty_envs:make_counting`.

The observation is a serial number that is new for every process and every connection to a server, the number of steps
so far, and the action that was executed last: an unroll shows whether its rows are consecutive steps of one connection.
"""

import os
import threading
import time
from pathlib import Path

import numpy as np

from seedx.types import ArraySpec, EnvSpec, StepType, TimeStep

EPISODE = 7
_OBSERVATION = ArraySpec((3,), "float32")


class Counting:
    """N environments with episodes of 7 steps. What goes wrong at which step is read from the environment variable
    FAULT, "<what>@<step>"; "once" in it makes it happen once in the working directory.
    """

    def __init__(self, num_envs, seeds, observation=_OBSERVATION):
        self.spec = EnvSpec("counting", observation=observation, action=ArraySpec((), "int32", num_values=3))
        self.num_envs = num_envs
        self._serial = np.asarray(seeds) % 2**18
        self._t = -1
        self._what, _, step = os.environ.get("FAULT", "").partition("@")
        self._fault_step = int(step or -1)

    def reset(self):
        self._start = self._t + 1
        self._serial += 2**18  # exact in float32 for 60 connections
        return self._row(np.full(self.num_envs, -1))

    def step(self, action):
        return self._row(action)

    def close(self):
        if self._what == "locked-close":  # as if an exception had come between taking the lock and giving it back
            lock = threading.Lock()
            lock.acquire()
            lock.acquire()

    def _row(self, action):
        self._t += 1
        phase = (self._t - self._start) % (EPISODE + 1)
        step_type = {0: StepType.FIRST, EPISODE: StepType.LAST}.get(phase, StepType.MID)
        observation = np.stack([self._serial, np.full(self.num_envs, self._t), action], axis=1).astype(np.float32)
        reward = np.ones(self.num_envs, np.float32)
        if self._t == self._fault_step and not ("once" in self._what and Path("faulted").exists()):
            Path("faulted").touch()
            observation, reward = self._spoilt(observation, reward)
        return TimeStep(
            np.full(self.num_envs, step_type, np.uint8),
            reward,
            np.full(self.num_envs, step_type != StepType.LAST, np.float32),
            observation,
        )

    def _spoilt(self, observation, reward):
        match self._what.removeprefix("once-"):
            case "raise":
                raise RuntimeError("the simulator exploded")
            case "hang":
                time.sleep(3600)
            case "shape":
                return observation[:, :2], reward
            case "dtype":
                return observation.astype(np.float64), reward
            case "nan-reward":
                return observation, np.where(np.arange(len(reward)) == 1, np.nan, reward).astype(np.float32)
        raise ValueError(f"no such fault: {self._what}")


class Slow(Counting):
    """As `Counting`; a step takes 5 ms without using the CPU."""

    def step(self, action):
        time.sleep(0.005)
        return super().step(action)


def make_counting(num_envs, seeds):
    return Counting(num_envs, seeds)


def make_slow(num_envs, seeds):
    return Slow(num_envs, seeds)


def make_other(num_envs, seeds):
    """As `make_counting`, but with another spec."""
    return Counting(num_envs, seeds, observation=ArraySpec((5,), "float32"))

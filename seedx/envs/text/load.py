"""Makes the task that a user names."""

from __future__ import annotations

from seedx.envs.text.task import Task
from seedx.imports import load


def load_task(name: str) -> Task:
    """The task that `name` ("module:function") makes."""
    return load(name, "task")()

"""How much memory there is."""

from __future__ import annotations

import os
from pathlib import Path


def memory_bytes() -> int:
    """Bytes of memory that this process may take: the machine's, or its control group's if that is less."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    group = Path("/sys/fs/cgroup/memory.max")
    limit = group.read_text().strip() if group.exists() else "max"
    return machine if limit == "max" else min(machine, int(limit))

"""A table as launch/reverb_server.py is told of it."""

from __future__ import annotations

from typing import Any

from seedx.config import TableConfig
from seedx.replay.rate_limiter import limits_for

TABLE = "unrolls"  # the table's name in a Reverb server


def table_description(table: TableConfig, batch_size: int, name: str = TABLE) -> dict[str, Any]:
    """What the server makes the table of.

    Raises:
        ConfigError: a batch does not fit.
    """
    return {
        "name": name,
        "sampler": table.sampler,
        "priority_exponent": table.priority_exponent,
        "remover": table.remover,
        "max_size": table.max_size or 2 * batch_size,
        "max_times_sampled": table.max_times_sampled,
        **limits_for(table, batch_size)._asdict(),
    }

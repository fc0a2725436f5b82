"""The table of one name on several Reverb servers, as they describe it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from seedx.replay import reverb_pb2 as pb
from seedx.replay.reverb_client import ReverbClient, compare_table, describe_table, find_table
from seedx.replay.reverb_codec import ReverbDataError
from seedx.replay.reverb_decoder import Received, decode
from seedx.replay.reverb_layout import Layout
from seedx.replay.reverb_peek import peek, put_back
from seedx.replay.reverb_signature import check_signature

_INFO_S = 1.0
REMEDY = "empty it: start the server with another --checkpoint-dir, or use another one."


class Tables:
    """A table on every server. Any thread may call.

    Args:
        clients: The servers.
        name: The table's.
        connect_s: How long they are waited for.

    Attributes:
        state_ids: Of the servers' tables; another one says that a server was started again.
        held: Items that each held already, by address.

    Raises:
        ValueError: a server has no such table, or two addresses are of one server.
        ReverbLostError: not all were there within `connect_s`.
    """

    def __init__(self, clients: Sequence[ReverbClient], name: str, connect_s: float) -> None:
        self._clients = clients
        self._name = name
        deadline = time.monotonic() + connect_s
        infos = [client.server_info(max(0.0, deadline - time.monotonic())) for client in clients]
        self._last = [find_table(i, name, c.address) for i, c in zip(infos, clients, strict=True)]
        self.state_ids = [info.tables_state_id for info in infos]
        for n, client in enumerate(clients):
            if self.state_ids[n] in self.state_ids[:n]:
                other = clients[self.state_ids.index(self.state_ids[n])].address
                raise ValueError(f"{other} and {client.address} are the same Reverb server; name each server once.")
        self.held = {c.address: table.current_size for c, table in zip(clients, self._last, strict=True)}

    @property
    def is_queue(self) -> bool:
        """Whether items are sampled once."""
        return all(table.max_times_sampled == 1 for table in self._last)

    def check_signatures(self, layout: Layout) -> None:
        """Raises ValueError if a table's signature admits no such items."""
        for client, table in zip(self._clients, self._last, strict=True):
            check_signature(table, layout, client.address)

    def check_items(self, layout: Layout) -> list[Received | None]:
        """An item of each table that has one, after all are known to be of this layout; give them to the first sample.

        Raises:
            ReverbDataError: one is not; those that were taken are put back.
        """
        found = [peek(client, table) for client, table in zip(self._clients, self._last, strict=True)]
        for client, sample in zip(self._clients, found, strict=True):
            try:
                if sample is not None:
                    decode([sample], layout, self._name)
            except ReverbDataError as error:
                raise ReverbDataError(
                    f"{error} The table at {client.address} holds items of another run or settings, and nothing was "
                    f"added to it{self._put_back(found)}. Use another table, or {REMEDY}"
                ) from None
        return found

    def ask(self) -> list[pb.TableInfo | None]:
        """The tables now, None for those whose server does not answer."""
        infos = [client.ask_server_info(_INFO_S) for client in self._clients]
        return [
            None if info is None else find_table(info, self._name, client.address)
            for info, client in zip(infos, self._clients, strict=True)
        ]

    def info(self) -> dict[str, float]:
        """Items held, and inserted and sampled since the last reset; and how long a server has been gone and may be.

        The servers' own counts; of one that does not answer, the last that it gave.
        """
        for i, table in enumerate(self.ask()):
            self._last[i] = self._last[i] if table is None else table
        limiters = [table.rate_limiter_info for table in self._last]
        inserted = sum(limiter.insert_stats.completed for limiter in limiters)
        sampled = sum(limiter.sample_stats.completed for limiter in limiters)
        return {
            "replay/items": sum(table.current_size for table in self._last),
            "replay/inserted": inserted,
            "replay/sampled": sampled,
            "replay/samples_per_insert": sampled / max(inserted, 1),
            "replay/gone_s": max(client.gone_s for client in self._clients),
            "replay/give_up_in_s": min(client.give_up_in_s for client in self._clients),
        }

    def describe(self) -> str:
        """The tables' states, for messages.

        Raises:
            ReverbLostError: a server has been gone for too long.
        """
        return "; ".join(
            f"at {client.address}, " + (describe_table(table) if table else client.describe_absence())
            for client, table in zip(self._clients, self.ask(), strict=True)
        )

    def differences(self, wanted: Mapping[str, Any]) -> list[str]:
        """What the tables have otherwise than a description, see `table_description`; a line for each."""
        found = [(c.address, compare_table(table, wanted)) for c, table in zip(self._clients, self._last, strict=True)]
        return [f"table {self._name!r} at {address} has {', '.join(each)}" for address, each in found if each]

    def _put_back(self, found: Sequence[Received | None]) -> str:
        """What is to be said of items that could not be put back."""
        servers = zip(self._clients, self._last, found, strict=True)
        lost = [c.address for c, table, sample in servers if sample is not None and not put_back(c, table, sample)]
        return f"; but one item, which was looked at, is missing at {', '.join(lost)} since" if lost else ""

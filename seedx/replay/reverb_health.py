"""A health check of one Reverb server from the shell, which inserts and samples nothing.

    python -m seedx.replay.reverb_health HOST:PORT          (or reverb://HOST:PORT)

prints the tables of a server that is well and ends with 0. It ends with 1 and the reason after 5 s without an answer,
and where the thread of a table is dead.
"""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Sequence

import grpc

from seedx.replay import reverb_pb2 as pb
from seedx.replay.reverb_client import ReverbClient, describe_table
from seedx.reverb_address import SCHEME, server_error

_HEALTH_S = 5.0
_WORK_S = 0.5  # within which the thread of a table does more than run, if it is alive
_WORK_CHECKS = 4


def dead_tables(client: ReverbClient, before: pb.ServerInfoResponse) -> list[str]:
    """Names of the tables whose thread is dead: inserts and samples hang there, though the server answers.

    Such a thread counts as running for ever, where a live one sleeps, waits, samples or inserts now and then; nothing
    is inserted or sampled to tell. A live one that is busy for seconds with one thing would be taken for dead.
    """
    suspects = {table.name: _other_work_ms(table) for table in before.table_info}
    for _ in range(_WORK_CHECKS):
        time.sleep(_WORK_S)
        info = client.ask_server_info(_HEALTH_S)
        if info is None or not suspects:
            return []
        now = {table.name: _other_work_ms(table) for table in info.table_info}
        suspects = {name: work_ms for name, work_ms in suspects.items() if now.get(name) == work_ms}
    return sorted(suspects)


def _other_work_ms(table: pb.TableInfo) -> int:
    """All that a table's thread did but for running."""
    time_ms = table.table_worker_time
    return (
        time_ms.sampling_ms
        + time_ms.inserting_ms
        + time_ms.sleeping_ms
        + time_ms.waiting_for_sampling_ms
        + time_ms.waiting_for_inserts_ms
    )


def main(argv: Sequence[str]) -> int:
    """A health check from the shell; the exit code: 0 for a server that is well, 1 for another, 2 for a wrong call."""
    argv = [address.removeprefix(SCHEME) for address in argv]
    if len(argv) != 1 or server_error(argv[0]):
        wrong = f"{argv[0]!r} {server_error(argv[0])}; " if len(argv) == 1 else ""
        print(f"{wrong}usage: python -m seedx.replay.reverb_health HOST:PORT", file=sys.stderr)
        return 2
    [address] = argv
    host, _, port = address.rpartition(":")
    try:
        socket.getaddrinfo(host.strip("[]"), port)
    except OSError as error:
        print(f"{address} has a host that cannot be found: {error.strerror}.", file=sys.stderr)
        return 1
    client = ReverbClient(address, give_up_s=0.0)
    try:
        info = client.ask_server_info(_HEALTH_S)
        if info is None:
            print(f"no Reverb server answered at {address} within {_HEALTH_S:g} s.", file=sys.stderr)
            return 1
        for table in sorted(info.table_info, key=lambda table: table.name):
            print(describe_table(table))
        dead = dead_tables(client, info)
    except grpc.RpcError as error:
        print(f"{address} is no Reverb server: {error.code().name}: {error.details()}", file=sys.stderr)
        return 1
    finally:
        client.close()
    for name in dead:
        print(
            f"table {name!r} at {address} is dead: its thread has ended, so that inserts and samples hang. Start the "
            "server again; its log says why (a negative priority does it).",
            file=sys.stderr,
        )
    return 1 if dead else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

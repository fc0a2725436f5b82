"""How the hosts of one learner find each other, before their jax does, which would name nobody that is missing."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Mapping
from typing import TypeAlias

from seedx.checks import ConfigError
from seedx.lifeline import HostLostError

_RETRY_S = 0.2
_GREETING_S = 5.0
_SAY_S = 10.0  # for host 0's answer to come after its deadline
_MAX_LINE = 1000
_GO, _NO, _OTHER = "go", "no: ", "other settings: "

Connections: TypeAlias = Mapping[int, socket.socket]


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a host of this name."""
    return host in ("localhost", "127.0.0.1", "[::1]")


def call_roll(address: str, count: int, settings: str, deadline: float, stop: Callable[[], bool]) -> Connections:
    """Host 0: waits for the others' greetings and tells all of them at once how it went.

    Args:
        address: host:port, where it is found.
        count: Of the hosts.
        settings: Must be the same on all hosts.
        deadline: Until when it waits, on the monotonic clock.
        stop: Ends the wait.

    Returns:
        A connection to each of the others, by its index.

    Raises:
        HostLostError: one did not come in time; all hosts that came name it.
        ConfigError: the port is taken, or a host has other settings.
    """
    came: dict[int, socket.socket] = {}
    others = set(range(1, count))
    wrong = other = ""
    with contextlib.ExitStack() as connections, _listen(address) as server:
        while others - came.keys() and not other and not stop() and time.monotonic() < deadline:
            with contextlib.suppress(OSError), contextlib.ExitStack() as guest:  # nobody is there, or a stranger
                connection = guest.enter_context(server.accept()[0])
                index, _, theirs = _line(connection, _GREETING_S).partition(" ")
                if not index.isdecimal() or int(index) not in others:
                    continue  # a stranger, or a host of another list
                came[int(index)] = connection
                connections.push(guest.pop_all())
                if theirs != settings:
                    other = f"host {index} has other settings than host 0; start all with the same flags."
        if missing := sorted(others - came.keys()):
            names = ", ".join(map(str, missing))
            wrong = f"{_plural(missing)} {names} of {count} did not come to {address} in time."
        answer = f"{_OTHER}{other}" if other else f"{_NO}{wrong}" if wrong else _GO
        for connection in came.values():
            with contextlib.suppress(OSError):  # Who is gone by now will be missed.
                connection.sendall(f"{answer}\n".encode())
        if other:
            raise ConfigError(other)
        if wrong:
            raise HostLostError(wrong)
        connections.pop_all()
    return came


def answer_roll(address: str, index: int, settings: str, deadline: float, stop: Callable[[], bool]) -> Connections:
    """Another host: greets host 0 and waits for its answer.

    Args:
        address: host:port, where host 0 is found.
        index: Of this host.
        settings: Must be the same on all hosts.
        deadline: Until when it waits, on the monotonic clock.
        stop: Ends the wait.

    Returns:
        The connection to host 0, by its index.

    Raises:
        HostLostError: host 0 is not there, or misses a host.
        ConfigError: a host has other settings.
    """
    host, _, port = address.rpartition(":")
    problem = "no answer"
    while not stop():
        left_s = deadline - time.monotonic()
        try:
            with contextlib.ExitStack() as connected:
                connection = socket.create_connection((host.strip("[]"), int(port)), timeout=max(left_s, _RETRY_S))
                connected.enter_context(connection)
                connection.sendall(f"{index} {settings}\n".encode())
                answer = _line(connection, max(left_s, 0) + _SAY_S)
                if answer == _GO:
                    connected.pop_all()
                    return {0: connection}
            if answer.startswith(_OTHER):
                raise ConfigError(answer.removeprefix(_OTHER))
            if answer.startswith(_NO):
                raise HostLostError(answer.removeprefix(_NO))
        except OSError as error:
            problem = str(error)
        if left_s < 0:
            raise HostLostError(f"host 0 is not at {address} ({problem}); this is host {index}.")
        time.sleep(_RETRY_S)
    raise HostLostError("stopped while it waited for the other hosts.")


def _listen(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    both = socket.has_dualstack_ipv6() and not is_loopback(host)
    family = socket.AF_INET6 if both or host == "[::1]" else socket.AF_INET
    name = host.strip("[]") if is_loopback(host) else ""
    try:
        server = socket.create_server((name, int(port)), family=family, dualstack_ipv6=both)
    except OSError as error:
        raise ConfigError(f"host 0 cannot listen at {address} ({error}); choose another port.") from error
    server.settimeout(_RETRY_S)
    return server


def _line(connection: socket.socket, timeout_s: float) -> str:
    """The line that the other side sends within this time; "" if it goes before, or sends none."""
    deadline, line = time.monotonic() + timeout_s, b""
    while b"\n" not in line and len(line) < _MAX_LINE:
        connection.settimeout(max(deadline - time.monotonic(), 0.001))
        said = connection.recv(_MAX_LINE - len(line))
        if not said:
            return ""
        line += said
    return line.partition(b"\n")[0].decode(errors="replace").strip()


def _plural(items: list[int]) -> str:
    return "host" if len(items) == 1 else "hosts"

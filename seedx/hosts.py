"""The hosts of one learner, and how they find each other. Loads jax only where it is used."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass

from seedx.checks import ConfigError, require

HEARTBEAT_S = 30  # without a sign of life of a host, the others end; what closes its connections is noticed at once
_RETRY_S = 0.2
_GREETING_S = 5.0
_SAY_S = 10.0  # for the coordinator's answer to come after its deadline
_LEAVE_S = 600  # for the others, while host 0 writes the last checkpoint
_MAX_LINE = 1000
_GO, _NO = "go", "no: "  # answers to a roll call


class HostLostError(RuntimeError):
    """A host did not come, or is gone; the message says all that is known."""


@dataclass(frozen=True)
class Hosts:
    """This host among those of its learner; by default the only one.

    Attributes:
        coordinator: host:port, where host 0 is found.
        count: Number of hosts.
        index: This one, from 0.
    """

    coordinator: str = ""
    count: int = 1
    index: int = 0

    def __post_init__(self) -> None:
        require(
            0 <= self.index < self.count,
            f"host index ({self.index}) must lie in 0 .. {self.count - 1}: there are {self.count} hosts.",
        )
        port = self.coordinator.rpartition(":")[2]
        require(
            self.count == 1 or (port.isdecimal() and 0 < int(port) < 65536),
            f"coordinator ({self.coordinator!r}) must be host:port, where host 0 is found.",
        )

    def __str__(self) -> str:
        return f"host {self.index} of {self.count}"

    @property
    def alone(self) -> bool:
        """Whether there is no other host."""
        return self.count == 1

    def share(self, batch_size: int) -> int:
        """This host's part of a batch.

        Raises:
            ConfigError: it does not divide.
        """
        require(
            batch_size % self.count == 0,
            f"learner.batch_size ({batch_size}) must be divisible by the number of hosts ({self.count}).",
        )
        return batch_size // self.count

    def join(self, settings: str, timeout_s: float, stop: Callable[[], bool]) -> None:
        """Waits for all hosts and connects their jax; before the first use of a device.

        Args:
            settings: Must be the same on all hosts.
            timeout_s: How long to wait.
            stop: Ends the wait.

        Raises:
            HostLostError: a host did not come in time, or has other settings; all hosts that came name it.
            ConfigError: the coordinator's port is taken.
        """
        if self.alone:
            return
        deadline = time.monotonic() + timeout_s
        if self.index == 0:
            _call_roll(self, settings, deadline, stop)
        else:
            _answer_roll(self, settings, deadline, stop)
        import jax

        jax.config.update("jax_enable_preemption_service", False)  # It would take SIGTERM away from our handlers.
        host, _, port = self.coordinator.rpartition(":")
        jax.distributed.initialize(
            self.coordinator,
            self.count,
            self.index,
            cluster_detection_method="deactivate",  # Slurm's would give each process one device.
            heartbeat_timeout_seconds=HEARTBEAT_S,
            shutdown_timeout_seconds=_LEAVE_S,
            coordinator_bind_address=f"{host}:{port}" if _is_loopback(host) else None,
        )

    def meet(self, where: str, timeout_s: float) -> None:
        """Waits until all hosts are there: a first collective fails if it waits for another host for 30 s.

        Raises:
            HostLostError: they were not in time.
        """
        if self.alone:
            return
        import jax
        from jax._src.distributed import global_state

        assert global_state.client is not None
        try:
            global_state.client.wait_at_barrier(where, int(timeout_s * 1000))
        except jax.errors.JaxRuntimeError as error:
            raise HostLostError(f"{where} did not begin on all {self.count} hosts ({error}).") from error

    def leave(self) -> None:
        """Waits until all hosts are done: a host that just ends would look like one that is lost."""
        if not self.alone:
            import jax

            jax.distributed.shutdown()


def _is_loopback(host: str) -> bool:
    return host in ("localhost", "127.0.0.1", "[::1]")


def _call_roll(hosts: Hosts, settings: str, deadline: float, stop: Callable[[], bool]) -> None:
    """Host 0: waits for the others' greetings and tells all of them at once how it went."""
    came: dict[int, socket.socket] = {}
    others = set(range(1, hosts.count))
    wrong = ""
    with contextlib.ExitStack() as connections:
        with _listen(hosts.coordinator) as server:
            while others - came.keys() and not wrong and not stop() and time.monotonic() < deadline:
                with contextlib.suppress(OSError):  # nobody is there yet, or a stranger has hung up
                    connection = connections.enter_context(server.accept()[0])
                    index, _, theirs = _line(connection, _GREETING_S).partition(" ")
                    if not index.isdecimal() or int(index) not in others:
                        continue  # a stranger, or a host of another list
                    came[int(index)] = connection
                    if theirs != settings:
                        wrong = f"host {index} has other settings than host 0; start all with the same flags."
        if missing := sorted(others - came.keys()):
            names = ", ".join(map(str, missing))
            wrong = wrong or f"{_plural(missing)} {names} of {hosts.count} did not come to {hosts.coordinator} in time."
        for connection in came.values():
            with contextlib.suppress(OSError):  # Who is gone by now will be missed by jax.
                connection.sendall(f"{_NO + wrong if wrong else _GO}\n".encode())
    if wrong:
        raise HostLostError(wrong)


def _answer_roll(hosts: Hosts, settings: str, deadline: float, stop: Callable[[], bool]) -> None:
    """Another host: greets host 0 and waits for its answer."""
    host, _, port = hosts.coordinator.rpartition(":")
    problem = "no answer"
    while not stop():
        left_s = deadline - time.monotonic()
        answer = ""
        try:
            with socket.create_connection((host.strip("[]"), int(port)), timeout=max(left_s, _RETRY_S)) as connection:
                connection.sendall(f"{hosts.index} {settings}\n".encode())
                answer = _line(connection, max(left_s, 0) + _SAY_S)
        except OSError as error:
            problem = str(error)
        if answer == _GO:
            return
        if answer.startswith(_NO):
            raise HostLostError(answer.removeprefix(_NO))
        if left_s < 0:
            raise HostLostError(f"host 0 is not at {hosts.coordinator} ({problem}); this is {hosts}.")
        time.sleep(_RETRY_S)
    raise HostLostError("stopped while it waited for the other hosts.")


def _listen(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    both = socket.has_dualstack_ipv6() and not _is_loopback(host)
    family = socket.AF_INET6 if both or host == "[::1]" else socket.AF_INET
    name = host.strip("[]") if _is_loopback(host) else ""
    try:
        server = socket.create_server((name, int(port)), family=family, dualstack_ipv6=both)
    except OSError as error:
        raise ConfigError(f"host 0 cannot listen at {address} ({error}); choose another port.") from error
    server.settimeout(_RETRY_S)
    return server


def _line(connection: socket.socket, timeout_s: float) -> str:
    """The line that the other side sends; "" if it goes before."""
    connection.settimeout(timeout_s)
    with connection.makefile("rb") as file:
        return file.readline(_MAX_LINE).decode(errors="replace").strip()


def _plural(items: list[int]) -> str:
    return "host" if len(items) == 1 else "hosts"

"""The hosts of one learner, and how they find each other. Loads jax only where it is used."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from seedx.checks import require
from seedx.lifeline import SILENT_S, HostLostError, Lifeline
from seedx.roll_call import answer_roll, call_roll, is_loopback

_LAST_RESORT_S = int(3 * SILENT_S)  # then jax ends the process
_LEAVE_S = 600  # for the others, while host 0 writes the last checkpoint


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

    def join(
        self,
        settings: str,
        timeout_s: float,
        stop: Callable[[], bool],
        on_lost: Callable[[HostLostError], None],
    ) -> Lifeline:
        """Waits for all hosts and connects their jax; before the first use of a device.

        Args:
            settings: Must be the same on all hosts.
            timeout_s: How long to wait.
            stop: Ends the wait.
            on_lost: Told of a host that is lost from then on.

        Returns:
            What watches the other hosts; to be ended before `leave`.

        Raises:
            HostLostError: a host did not come in time; all hosts that came name it.
            ConfigError: the coordinator's port is taken, or the hosts are in another order than a slice's workers.
        """
        if self.alone:
            return Lifeline({}, 1, on_lost)
        deadline = time.monotonic() + timeout_s
        if self.index == 0:
            connections = call_roll(self.coordinator, self.count, settings, deadline, stop)
        else:
            connections = answer_roll(self.coordinator, self.index, settings, deadline, stop)
        lifeline = Lifeline(connections, self.count, on_lost)
        import jax

        jax.config.update("jax_enable_preemption_service", False)  # It would take SIGTERM away from our handlers.
        host, _, port = self.coordinator.rpartition(":")
        jax.distributed.initialize(
            self.coordinator,
            self.count,
            self.index,
            cluster_detection_method="deactivate",  # Slurm's would give each process one device.
            heartbeat_timeout_seconds=_LAST_RESORT_S,
            shutdown_timeout_seconds=_LEAVE_S,
            coordinator_bind_address=f"{host}:{port}" if is_loopback(host) else None,
        )
        own = next(iter(connections.values())).getsockname()[0]
        _collect_at(own.removeprefix("::ffff:"))  # how a socket of IPv6 shows an address of IPv4
        number = jax.process_index()  # of a TPU slice's host the slice says so
        require(
            number == self.index,
            f"the devices of {self} are of the slice's worker {number}; name --hosts in the order of its workers.",
        )
        return lifeline

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


def _collect_at(address: str) -> None:
    """Has CPUs listen at this address for each other: jax would take whatever this machine's name stands for."""
    from jax._src.distributed import global_state
    from jax._src.xla_bridge import make_cpu_client
    from jax.extend.backend import register_backend_factory
    from jaxlib import _jax

    gloo = _jax.make_gloo_tcp_collectives(global_state.client, hostname=address)
    register_backend_factory("cpu", lambda: make_cpu_client(gloo), fail_quietly=False)


ONE_HOST = Hosts()

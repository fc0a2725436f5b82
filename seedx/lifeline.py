"""Connections between host 0 and the others by which all notice at once when one is gone, and say which.

jax would notice too, but names nobody, and ends the process in the midst of things.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
import time
from collections.abc import Callable, Mapping

SILENT_S = 30.0  # without a sign of life, a host counts as lost; who closes its connections does at once
_BEAT_S = 1.0
_BYTES = 4096
_BEAT, _BYE, _LOST = b".", b"!", b"?"  # `_LOST` is followed by the index of a host that host 0 misses


class HostLostError(RuntimeError):
    """A host did not come, or is gone; the message says all that is known."""


class Lifeline:
    """Watches other hosts on a thread of its own, until `end`.

    Args:
        connections: To the others, by their index; of those that are not host 0, to host 0 alone.
        count: Of the hosts.
        on_lost: Told of the first host that is lost.
    """

    def __init__(
        self, connections: Mapping[int, socket.socket], count: int, on_lost: Callable[[HostLostError], None]
    ) -> None:
        self._connections = dict(connections)
        self._count = count
        self._on_lost = on_lost
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lifeline", daemon=True)
        if self._connections:
            self._thread.start()

    def end(self) -> None:
        """Says goodbye: this host is done, and its silence from now on means nothing."""
        self._over.set()
        if self._connections:
            self._thread.join()

    def _run(self) -> None:
        lost = self._watch()
        if lost is None:
            self._send(_BYE)
            return
        index, why = lost
        self._send(b"%c%d" % (_LOST, index))
        what = f"host {index} of {self._count} is lost: {why}."
        self._on_lost(HostLostError(f"{what} Its log may say more. Start all again with --resume."))

    def _watch(self) -> tuple[int, str] | None:
        """Which host is lost, and why; None: this one is done."""
        heard = dict.fromkeys(self._connections, time.monotonic())
        with selectors.DefaultSelector() as selector:
            for index, connection in self._connections.items():
                connection.setblocking(False)
                selector.register(connection, selectors.EVENT_READ, index)
            beat_at = 0.0
            while not self._over.is_set():
                if time.monotonic() >= beat_at:
                    self._send(_BEAT)
                    beat_at = time.monotonic() + _BEAT_S
                for key, _ in selector.select(_BEAT_S / 10):
                    said = _read(self._connections[key.data])
                    heard[key.data] = time.monotonic()
                    if _BYE in said:
                        selector.unregister(key.fileobj)
                        del heard[key.data]
                    elif not said:
                        return key.data, "its connection is closed"
                    elif _LOST in said:
                        return int(said.partition(_LOST)[2]), "so says host 0"
                for index, when in heard.items():
                    if time.monotonic() - when > SILENT_S:
                        return index, f"it has been silent for {SILENT_S:g} s"
        return None

    def _send(self, said: bytes) -> None:
        for connection in self._connections.values():
            with contextlib.suppress(OSError):  # Who is gone is noticed by reading.
                connection.send(said)


def _read(connection: socket.socket) -> bytes:
    """What has come; empty if the connection is closed."""
    try:
        return connection.recv(_BYTES)
    except BlockingIOError:
        return _BEAT
    except OSError:
        return b""

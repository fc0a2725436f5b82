"""Addresses of Reverb servers, as settings and command lines give them."""

from __future__ import annotations

from seedx.checks import require

SCHEME = "reverb://"


def parse_address(address: str) -> list[str]:
    """The servers of `reverb://host:port,host:port`, each as host:port.

    Raises:
        ConfigError: it is not of this form, or names a server twice.
    """
    require(
        address.startswith(SCHEME),
        f"{address!r} must be {SCHEME}host:port, or {SCHEME}host:port,host:port,... of several.",
    )
    hosts = address.removeprefix(SCHEME).split(",")
    for host in hosts:
        found = server_error(host)
        require(
            not found,
            f"{address!r}: {host!r} {found}. It must be {SCHEME}host:port, or {SCHEME}host:port,host:port,... of "
            "several, with ports in 1 .. 65535.",
        )
    places = [(name.lower(), int(port)) for name, _, port in (host.rpartition(":") for host in hosts)]
    twice = [host for n, host in enumerate(hosts) if places[n] in places[:n]]
    require(not twice, f"{address!r} names {', '.join(twice)} twice; name each server once.")
    return hosts


def server_error(server: str) -> str:
    """What is wrong with a server's host:port, "" if nothing is. An IPv6 host stands in brackets."""
    host, colon, port = server.rpartition(":")
    if not server:
        return "names no server"
    if not colon:
        return "has no port"
    if not host:
        return "has no host"
    if any(c.isspace() or c == "/" for c in host):
        return "has a host with a space or slash"
    if ":" in host and not (host.startswith("[") and host.endswith("]")):
        return "has several colons, while an IPv6 host stands in brackets: [::1]:8000"
    if not (port.isascii() and port.isdigit()):
        return f"has the port {port!r}, which is no number"
    if not 1 <= int(port) <= 65535:
        return f"has the port {port}, which does not exist"
    return ""

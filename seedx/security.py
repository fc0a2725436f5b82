"""Who may listen where, and who may speak: loopback by default, TLS or a token for anything else."""

from __future__ import annotations

import contextlib
import errno
import hmac
import ipaddress
import re
import socket
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Protocol, runtime_checkable

import grpc
import grpc.aio

from seedx.checks import ConfigError


@runtime_checkable
class Credentials(Protocol):
    """Files with credentials, which the flags `<flag_prefix>tls-cert` and so on name; see `Access`."""

    flag_prefix: ClassVar[str]

    @property
    def tls_cert(self) -> str | None: ...  # noqa: D102
    @property
    def tls_key(self) -> str | None: ...  # noqa: D102
    @property
    def tls_ca(self) -> str | None: ...  # noqa: D102
    @property
    def token_file(self) -> str | None: ...  # noqa: D102


@dataclass(frozen=True)
class Access:
    """Credentials of the decode server and its clients.

    Attributes:
        tls_cert: PEM file of the server's certificate chain; None: no TLS.
        tls_key: PEM file of the server's private key.
        tls_ca: PEM file of the authority that clients trust; None: the certificate itself.
        token_file: File that holds the shared token; None: no token.
    """

    flag_prefix: ClassVar[str] = "--"

    tls_cert: str | None = None
    tls_key: str | None = None
    tls_ca: str | None = None
    token_file: str | None = None


def is_local(address: str) -> bool:
    """Whether only this machine can reach the address (a Unix socket or loopback)."""
    if address.startswith("unix:"):
        return True
    host = address.rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def check_address(address: str) -> None:
    """Raises ConfigError if `address` is no address."""
    if not address.startswith("unix:"):
        if address.startswith(("http://", "https://")):
            raise ConfigError(f"address {address!r} must be unix:/path or host:port; leave http:// out.")
        host, _, port = address.rpartition(":")
        if not host or not port.isdecimal() or int(port) > 65535:
            raise ConfigError(f"address {address!r} is neither unix:/path nor host:port.")


def check_listen_address(address: str, credentials: Credentials) -> None:
    """Refuses to serve others without protection.

    Raises:
        ConfigError: the address is no address, or not local while neither TLS nor a token is set.
    """
    check_address(address)
    if not is_local(address) and credentials.tls_cert is None and credentials.token_file is None:
        raise ConfigError(
            f"refusing to listen on {address}: other machines could reach it without credentials. Give "
            f"{credentials.flag_prefix}tls-cert and {credentials.flag_prefix}tls-key, or "
            f"{credentials.flag_prefix}token-file, or listen on 127.0.0.1 or unix:."
        )


def read_token(credentials: Credentials) -> str | None:
    """The shared token; None if no token file is set.

    Raises:
        ConfigError: the file cannot be read or holds no token.
    """
    if credentials.token_file is None:
        return None
    token = _read(credentials.token_file, f"{credentials.flag_prefix}token-file").decode("utf-8", "replace").strip()
    if not re.fullmatch(r"[ -~]+", token):  # what a header can carry
        raise ConfigError(
            f"{credentials.flag_prefix}token-file {credentials.token_file!r} must hold one line of ASCII; it is empty "
            "or not."
        )
    return token


def authorized(metadata: tuple, token: str | None) -> bool:
    """Whether call metadata, or HTTP's headers, carry the token (in constant time); always if there is none."""
    if token is None:
        return True
    given = dict(metadata).get("authorization", "")
    given = given if isinstance(given, str) else ""
    return hmac.compare_digest(given.encode("utf-8", "surrogateescape"), f"Bearer {token}".encode())


def server_credentials(credentials: Credentials) -> grpc.ServerCredentials | None:
    """TLS credentials of the server; None without TLS.

    Raises:
        ConfigError: the files cannot be read, or are no certificate and its key.
    """
    if credentials.tls_cert is None or credentials.tls_key is None:
        return None
    key = _read(credentials.tls_key, f"{credentials.flag_prefix}tls-key")
    cert = _read(credentials.tls_cert, f"{credentials.flag_prefix}tls-cert")
    http_tls(credentials)  # a look at the files: of wrong ones gRPC would say that it cannot listen
    return grpc.ssl_server_credentials([(key, cert)])


def http_tls(credentials: Credentials) -> ssl.SSLContext | None:
    """The same for an HTTP server; None without TLS.

    Raises:
        ConfigError: the files cannot be read, or are no certificate and its key.
    """
    if credentials.tls_cert is None or credentials.tls_key is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(credentials.tls_cert, credentials.tls_key)
    except OSError as error:  # ssl.SSLError among them
        raise ConfigError(
            f"{credentials.flag_prefix}tls-cert {credentials.tls_cert!r} and {credentials.flag_prefix}tls-key "
            f"{credentials.tls_key!r} are no certificate and its key: {error}."
        ) from error
    return context


def open_channel(address: str, credentials: Credentials, options: list[tuple[str, int]]) -> grpc.Channel:
    """A client channel to the address, with TLS where the config has a certificate to trust; see `bind`.

    Raises:
        ConfigError: the address is no address, or the certificate cannot be read.
    """
    check_address(address)
    trusted = credentials.tls_ca or credentials.tls_cert
    if trusted is None or address.startswith("unix:"):
        return grpc.insecure_channel(address, options=options)
    authority = _read(trusted, f"{credentials.flag_prefix}tls-ca")
    return grpc.secure_channel(address, grpc.ssl_channel_credentials(authority), options=options)


def call_metadata(credentials: Credentials) -> tuple[tuple[str, str | bytes], ...]:
    """Metadata that every call of a client carries."""
    token = read_token(credentials)
    return () if token is None else (("authorization", f"Bearer {token}"),)


def _read(path: str, name: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"{name} {path!r} cannot be read: {error.strerror}.") from error


def bind(server: grpc.aio.Server, address: str, access: Credentials) -> int:
    """Has a server listen on an address, with these credentials; the port, for a Unix socket 1.

    A Unix socket has no TLS: nothing leaves the machine, and its name is in no certificate.

    Raises:
        ConfigError: the address is in use or cannot be bound, or the credentials cannot be read.
    """
    credentials = server_credentials(access)
    try:
        _check_free(address)
        if credentials is None or address.startswith("unix:"):
            return server.add_insecure_port(address)
        return server.add_secure_port(address, credentials)
    except (RuntimeError, OSError) as error:
        raise taken(address) from error


def taken(address: str) -> ConfigError:
    """Says that an address cannot be listened on."""
    return ConfigError(
        f"cannot listen on {address}: it is in use or cannot be bound. Choose another address, or stop the server that "
        "holds it."
    )


def _check_free(address: str) -> None:
    """Raises OSError if an address cannot be bound: gRPC would write lines of its own beside our message."""
    if is_live_socket(address):
        raise OSError(errno.EADDRINUSE, "somebody listens there")
    if not address.startswith("unix:"):
        with contextlib.suppress(socket.gaierror):  # gRPC knows other names too, and says what it does not know
            own_hosts(address)


def own_hosts(address: str) -> list[str]:
    """The numeric hosts of a host:port that this machine has; localhost is often ::1 too where IPv6 is off.

    Raises:
        OSError: the name is not known, one of its addresses is in use or forbidden, or none can be bound.
    """
    host, _, port = address.rpartition(":")
    hosts, errors = [], []
    for family, kind, protocol, _, place in socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM):
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as gRPC does
                if family == socket.AF_INET6:
                    probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                probe.bind(place)
            hosts.append(str(place[0]))
        except OSError as error:
            if error.errno in (errno.EADDRINUSE, errno.EACCES):
                raise
            errors.append(error)
    if not hosts:
        raise errors[0]
    return hosts


def is_live_socket(address: str) -> bool:
    """Whether somebody listens on a Unix socket: gRPC would take its path away from them."""
    if not address.startswith("unix:"):
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        return probe.connect_ex(address.removeprefix("unix:")) in (0, errno.EAGAIN)

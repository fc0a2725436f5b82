"""Who may listen where, and who may speak: loopback by default, TLS or a token for anything else."""

from __future__ import annotations

import errno
import hmac
import ipaddress
import socket
from pathlib import Path

import grpc

from seedx.config import ConfigError, InferenceConfig


def is_local(address: str) -> bool:
    """Whether only this machine can reach the address (a Unix socket or loopback)."""
    if address.startswith("unix:"):
        return True
    host = address.rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def check_address(address: str) -> None:
    """Raises ConfigError if `address` is no address."""
    if not address.startswith("unix:"):
        host, _, port = address.rpartition(":")
        if not host or not port.isdecimal() or int(port) > 65535:
            raise ConfigError(f"address {address!r} is neither unix:/path nor host:port.")


def check_listen_address(address: str, config: InferenceConfig) -> None:
    """Refuses to serve others without protection.

    Raises:
        ConfigError: the address is no address, or not local while neither TLS nor a token is set.
    """
    check_address(address)
    if not is_local(address) and config.tls_cert is None and config.token_file is None:
        raise ConfigError(
            f"refusing to listen on {address}: other machines could reach it without credentials. Give "
            "--inference.tls-cert and --inference.tls-key, or --inference.token-file, or listen on 127.0.0.1 or unix:."
        )


def read_token(config: InferenceConfig) -> str | None:
    """The shared token; None if no token file is set.

    Raises:
        ConfigError: the file cannot be read or holds no token.
    """
    if config.token_file is None:
        return None
    token = _read(config.token_file, "inference.token_file").decode("utf-8", "replace").strip()
    if not token or not token.isascii():
        raise ConfigError(
            f"inference.token_file {config.token_file!r} must hold one line of ASCII; it is empty or not."
        )
    return token


def authorized(metadata: tuple, token: str | None) -> bool:
    """Whether call metadata carries the token (compared in constant time); always if there is no token."""
    if token is None:
        return True
    given = dict(metadata).get("authorization", "")
    given = given if isinstance(given, str) else ""
    return hmac.compare_digest(given.encode(), f"Bearer {token}".encode())


def server_credentials(config: InferenceConfig) -> grpc.ServerCredentials | None:
    """TLS credentials of the server; None without TLS."""
    if config.tls_cert is None or config.tls_key is None:
        return None
    key, cert = _read(config.tls_key, "inference.tls_key"), _read(config.tls_cert, "inference.tls_cert")
    return grpc.ssl_server_credentials([(key, cert)])


def open_channel(address: str, config: InferenceConfig, options: list[tuple[str, int]]) -> grpc.Channel:
    """A client channel to the address, with TLS where the config has a certificate to trust.

    Raises:
        ConfigError: the address is no address, or the certificate cannot be read.
    """
    check_address(address)
    trusted = config.tls_ca or config.tls_cert
    if trusted is None:
        return grpc.insecure_channel(address, options=options)
    credentials = grpc.ssl_channel_credentials(_read(trusted, "inference.tls_ca"))
    return grpc.secure_channel(address, credentials, options=options)


def call_metadata(config: InferenceConfig) -> tuple[tuple[str, str | bytes], ...]:
    """Metadata that every call of a client carries."""
    token = read_token(config)
    return () if token is None else (("authorization", f"Bearer {token}"),)


def _read(path: str, name: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"{name} {path!r} cannot be read: {error.strerror}.") from error


def is_live_socket(address: str) -> bool:
    """Whether somebody listens on a Unix socket: gRPC would take its path away from them."""
    if not address.startswith("unix:"):
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        return probe.connect_ex(address.removeprefix("unix:")) in (0, errno.EAGAIN)

"""Who may listen where: loopback by default, TLS or a token for anything else."""

import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seedx.config import ConfigError, InferenceConfig
from seedx.inference import security

OPEN = InferenceConfig()
TLS = InferenceConfig(tls_cert="cert.pem", tls_key="key.pem")
TOKEN = InferenceConfig(token_file="token")
REMOTE = [
    "0.0.0.0:80",
    "[::]:80",
    ":::80",
    "10.0.0.1:8080",
    "[::ffff:10.0.0.1]:80",
    "[::ffff:0.0.0.0]:80",
    "example.org:443",
    "localhost.example.org:80",
    "127.0.0.1.example.org:80",
    "127.0.0.1@example.org:80",
    "0:80",
    "2130706433:80",
    "dns:///0.0.0.0:80",
    "ipv4:0.0.0.0:80",
    "ipv6:[::]:80",
]
LOCAL = ["127.0.0.1:0", "127.3.2.1:65535", "localhost:80", "[::1]:80", "unix:/tmp/socket", "unix:relative"]


@pytest.mark.parametrize("address", REMOTE)
def test_others_are_refused_without_credentials(address):
    with pytest.raises(ConfigError, match="refusing to listen") as refusal:
        security.check_listen_address(address, OPEN)
    for remedy in (address, "tls-cert", "token-file", "127.0.0.1"):
        assert remedy in str(refusal.value)
    security.check_listen_address(address, TLS)
    security.check_listen_address(address, TOKEN)


@pytest.mark.parametrize("address", LOCAL)
def test_this_machine_needs_none(address):
    security.check_listen_address(address, OPEN)


@pytest.mark.parametrize(
    "address", ["", "127.0.0.1", ":80", "127.0.0.1:", "127.0.0.1:x", "127.0.0.1:65536", "unix-abstract:x", "h:\u00b2"]
)
@pytest.mark.parametrize("config", [OPEN, TLS, TOKEN])
def test_no_address(address, config):
    with pytest.raises(ConfigError, match="neither unix:/path nor host:port"):
        security.check_listen_address(address, config)


@given(st.text(max_size=20) | st.from_regex(r"[\[\]:.0-9a-f]{0,12}:[0-9]{1,6}", fullmatch=True))
def test_any_text_is_accepted_or_refused(address):
    try:
        security.check_listen_address(address, OPEN)
    except ConfigError:
        return
    host = address.rpartition(":")[0].strip("[]")
    if not address.startswith("unix:") and host != "localhost":
        # What the system makes of it.
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
        assert all(ip[0].startswith("127.") or ip[0] == "::1" for *_, ip in found)


def test_tokens(tmp_path):
    path = tmp_path / "token"
    path.write_text("s3cret\n")
    config = InferenceConfig(token_file=str(path))
    token = security.read_token(config)
    assert token == "s3cret"
    assert security.authorized(tuple(security.call_metadata(config)), token)
    for wrong in ("", "s3cret", "Bearer ", "Bearer s3cre", "Bearer s3crett", "bearer s3cret", "Bearer s\u00e9cret"):
        assert not security.authorized((("authorization", wrong),), token)
    assert not security.authorized((), token)
    assert not security.authorized((("authorization", b"Bearer s3cret"),), token)
    assert security.authorized((), None)
    assert not security.call_metadata(OPEN)


@pytest.mark.parametrize("content", [b"", b"\n", b" \n\t", "\u00e9".encode(), b"\xff"])
def test_a_token_file_without_a_token(tmp_path, content):
    path = tmp_path / "token"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"token_file.*ASCII"):
        security.read_token(InferenceConfig(token_file=str(path)))


def test_files_that_cannot_be_read_are_named(tmp_path):
    missing = str(tmp_path / "missing")
    with pytest.raises(ConfigError, match=r"inference\.token_file .*missing.* cannot be read"):
        security.read_token(InferenceConfig(token_file=missing))
    with pytest.raises(ConfigError, match=r"inference\.tls_key .*missing.* cannot be read"):
        security.server_credentials(InferenceConfig(tls_cert=missing, tls_key=missing))
    with pytest.raises(ConfigError, match=r"inference\.tls_ca .*missing.* cannot be read"):
        security.open_channel("localhost:1", InferenceConfig(tls_ca=missing), [])

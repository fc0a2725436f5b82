import pytest

from seedx.checks import ConfigError
from seedx.config import Config
from seedx.reverb_address import parse_address

WRONG = {
    "reverb://": "'' names no server",
    "reverb://localhost": "'localhost' has no port",
    "reverb://:8000": "':8000' has no host",
    "reverb://:abc": "':abc' has no host",
    "reverb://a:abc": "has the port 'abc', which is no number",
    "reverb://a:": "has the port '', which is no number",
    "reverb://a:-1": "has the port '-1', which is no number",
    "reverb://a:\u0661": "has the port '\u0661', which is no number",
    "reverb://a:0": "has the port 0, which does not exist",
    "reverb://a:99999": "has the port 99999, which does not exist",
    "reverb://a:1,": "'' names no server",
    "reverb://a:1,b": "'b' has no port",
    "reverb://a:1, b:2": "' b:2' has a host with a space or slash",
    "reverb://http://a:1": "has a host with a space or slash",
    "reverb://::1:8000": "an IPv6 host stands in brackets",
}


@pytest.mark.parametrize("address", WRONG)
def test_a_config_says_what_is_wrong_with_an_address_and_what_is_allowed(address):
    with pytest.raises(ConfigError) as caught:
        Config(replay=address)
    words = str(caught.value)
    assert repr(address) in words
    assert WRONG[address] in words
    assert "It must be reverb://host:port, or reverb://host:port,host:port,... of several" in words


def test_a_server_is_named_once():
    with pytest.raises(ConfigError, match="names A:1, A:01 twice"):
        Config(replay="reverb://a:1,b:1,A:1,A:01")


def test_another_scheme_is_none_of_ours():
    with pytest.raises(ConfigError, match="'localhost:1' must be reverb://host:port"):
        parse_address("localhost:1")


def test_addresses():
    assert parse_address("reverb://a:1,b.c:22,[::1]:65535") == ["a:1", "b.c:22", "[::1]:65535"]
    for address in ("embedded", "reverb", "reverb://a:1"):
        assert Config(replay=address).replay == address

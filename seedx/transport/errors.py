"""What can go wrong between a publisher and a reader."""

from seedx.checks import ConfigError


class WeightsLostError(ConnectionError):
    """The publisher is not there, or went away; it may come back."""


class CorruptedError(RuntimeError):
    """A version did not arrive as it was published; it is not used."""


class TreeMismatchError(ConfigError):
    """The publisher has other tensors than the reader wants; the message names them."""

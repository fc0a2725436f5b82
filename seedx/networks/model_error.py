"""What is wrong with a stored model."""

from seedx.checks import ConfigError


class ModelError(ConfigError):
    """A stored model that cannot be read as it is; the message names the file, field or tensor."""

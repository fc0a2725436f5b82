"""The fields of a JSON object, each taken once, so that none is overlooked."""

from typing import Any

from seedx.networks.model_error import ModelError


class Fields:
    """The fields of one object of config.json.

    Args:
        raw: The object.
        defaults: Of fields that it may leave out.
        where: What goes before their names in messages.
    """

    def __init__(self, raw: dict[str, Any], defaults: dict[str, Any], where: str = "") -> None:
        self._raw, self._defaults, self._where = dict(raw), defaults, where

    def take(self, name: str, *default: Any) -> Any:
        """A field as it is written, null included; else its default, without which it must be there."""
        if name in self._raw:
            return self._raw.pop(name)
        if name in self._defaults:
            return self._defaults[name]
        if default:
            return default[0]
        raise ModelError(f"config.json lacks the field {self._where}{name}.")

    def take_count(self, name: str, *default: Any) -> Any:
        """The same for a positive integer; null only where that is the default.

        Raises:
            ModelError: it is something else; names the field.
        """
        value = self.take(name, *default)
        if value is None and default:
            return None
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ModelError(f"config.json's field {self._where}{name} ({value!r}) must be a positive integer.")
        return value

    def refuse_rest(self, harmless: set[str]) -> None:
        """Refuses what was not taken, unless it is harmless or off."""
        for name, value in self._raw.items():
            if name not in harmless and value:
                raise ModelError(
                    f"config.json's field {self._where}{name} ({value!r}) is not supported, and might change the "
                    "result. Remove the field if it does not."
                )

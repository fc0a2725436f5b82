"""Loads what a user names as "module:function": an agent, an environment, a torso. No jax, no NumPy."""

from __future__ import annotations

import difflib
import importlib
from typing import Any

from seedx.checks import ConfigError


def load(path: str, what: str) -> Any:
    """The function, or class, that `path` ("module:function") names.

    An error inside the module, a missing dependency too, is raised as it is: its traceback says where.

    Args:
        path: From the current directory or any installed package.
        what: The setting that holds it, for the message.

    Raises:
        ConfigError: it is not of that form, or there is no such module or nothing callable of that name in it.
    """
    module_name, _, name = path.partition(":")
    if not (module_name and name) or module_name.startswith("."):
        raise ConfigError(f"{what} {path!r} is unknown: it is not of the form 'module:function'.")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the module is there; something that it imports is not
        raise ConfigError(
            f"{what} {path!r} is unknown: there is no module {error.name!r} in the current directory or installed. "
            "Is its directory on the Python path?"
        ) from error
    found = getattr(module, name, None)
    if not callable(found):
        matches = difflib.get_close_matches(name, [n for n, value in vars(module).items() if callable(value)])
        hint = f" Did you mean {', '.join(repr(f'{module_name}:{match}') for match in matches)}?" if matches else ""
        raise ConfigError(f"{what} {path!r} is unknown: {module_name} has no function {name!r}.{hint}")
    return found

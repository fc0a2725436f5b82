"""Errors of a user's own code in one line: what was asked of it, what it raised, and where."""

from __future__ import annotations

import contextlib
import os
import sysconfig
import traceback
from collections.abc import Generator
from pathlib import Path

from seedx.checks import ConfigError

_MAX_TEXT = 2000  # characters
_OTHERS = (
    *(sysconfig.get_paths()[name] + os.sep for name in ("stdlib", "purelib", "platlib")),
    str(Path(__file__).parents[2]) + os.sep,  # seedx
    "<",  # as in <frozen importlib._bootstrap>
)


@contextlib.contextmanager
def blame(what: str) -> Generator[None]:
    """Around a call of a user's own code, which `what` names: what that raises is a wrong setting of the run.

    Raises:
        ConfigError: the code raised something, which is told with its place; its own ConfigErrors stay as they are.
    """
    try:
        yield
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{what} raised {describe(error)}") from error


def describe(error: BaseException) -> str:
    """The last line of its traceback, and the innermost place that is not Python's, an installed package's or ours.

    Where there is no such place, the innermost one.
    """
    said = traceback.format_exception_only(error)[-1].strip()[:_MAX_TEXT]
    places = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    if isinstance(error, SyntaxError) and error.filename:
        places.append((error.filename, error.lineno))
    if not places:
        return said
    file, line = next((place for place in reversed(places) if not place[0].startswith(_OTHERS)), places[-1])
    return f"{said} ({Path(file).name}:{line})"

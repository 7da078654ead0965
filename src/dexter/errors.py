"""The errors a user can meet, one class per exit code of the command line.

Every message says what was found, what was expected and what to do. The command line prints it as one line and exits
with `exit_code`; a library caller can catch any of them as `ValueError`.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType


class DexterError(ValueError):
    """Base of every error that is the input's or the environment's fault, not a bug."""

    exit_code = 1


class UsageError(DexterError):
    """A wrong argument, option or configuration key."""

    exit_code = 2


class DataError(DexterError):
    """Input data that is malformed, inconsistent or too large; names the file and, where there is one, the line."""

    exit_code = 3

    def __init__(self, message: str, *, path: str | Path | None = None, line: int | None = None) -> None:
        self.message = message
        self.path = Path(path) if path is not None else None
        self.line = line
        place = "" if path is None else f"{path}: " if line is None else f"{path}:{line}: "
        super().__init__(place + message)


class ModelError(DexterError):
    """A run folder, checkpoint, encoder or index that is damaged, incomplete or of another kind."""

    exit_code = 4


class ResourceError(DexterError):
    """Not enough disk, memory or permission, or an optional package that is not installed."""

    exit_code = 5


class DivergedError(DexterError):
    """Training met a value that is not finite."""

    exit_code = 6


class Interrupted(DexterError):
    """The run was stopped by a signal, after its state was saved."""

    def __init__(self, message: str, *, signal_number: int) -> None:
        self.exit_code = 128 + signal_number
        super().__init__(message)


def printable(text: str) -> str:
    """Return a text with control characters escaped, as a terminal may be given it."""
    return "".join(c if c.isprintable() or c == "\t" else ascii(c)[1:-1] for c in text)


def require(module: str, *, extra: str, purpose: str) -> ModuleType:
    """Import an optional module, or raise an error that names the extra which installs it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ResourceError(
            f"{purpose} needs the package {module!r}, which is not installed: pip install 'dexter-xmc[{extra}]'"
        ) from error

"""Optional packages: import one where it is needed, or say which install line brings it."""

from __future__ import annotations

import importlib
from types import ModuleType

from dexter.errors import ResourceError


def require(module: str, *, extra: str, purpose: str) -> ModuleType:
    """Import an optional module, or raise an error that names the extra which installs it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ResourceError(
            f"{purpose} needs the package {module!r}, which is not installed: pip install 'dexter-xmc[{extra}]'"
        ) from error

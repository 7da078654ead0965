"""Data sets made on this machine, from what is installed on it: no download, the same result for the same input."""

from __future__ import annotations

from dexter.data.dataset import Dataset
from dexter.errors import UsageError

NAMES = ("pydocs", "debian")
"""What `build` can make."""


def build(name: str) -> Dataset:
    """Make the data set of that name.

    - `pydocs`: what an object of a scientific Python package does -> the objects its documentation points to.
    - `debian`: what a Debian package is -> the packages it relates to.
    """
    if name == "pydocs":
        from dexter.data.sources import pydocs

        return pydocs.build()
    if name == "debian":
        from dexter.data.sources import debian

        return debian.build()
    raise UsageError(f"no built-in data set is called {name!r}: choose one of {', '.join(NAMES)}")

"""Nearest labels: which labels have the largest inner product with a query.

`search` is exact. `build` makes an index of a kind (`BACKENDS`) and measures it, `load` reads one back; both give an
`Index`.
"""

from dexter.index.base import BACKENDS, BackendName, Index, Place, Stamp, default_backend
from dexter.index.building import OpenIndex, build, load, open_index
from dexter.index.exact import ExactIndex, search
from dexter.types import TopK

__all__ = [
    "BACKENDS",
    "BackendName",
    "ExactIndex",
    "Index",
    "OpenIndex",
    "Place",
    "Stamp",
    "TopK",
    "build",
    "default_backend",
    "load",
    "open_index",
    "search",
]

"""Nearest labels: which labels have the largest inner product with a query.

`search` is exact. `build` makes an `Index` of one of the `BACKENDS` and measures its recall; `save_index` and
`open_index` write it to a folder and read it back.
"""

from dexter.index.base import BACKENDS, BackendName, DatabaseAddress, Index, Stamp, default_backend
from dexter.index.exact import ExactIndex, place, search, search_shards
from dexter.index.folder import StoredIndex, build, label_keys, open_index, save_index

__all__ = [
    "BACKENDS",
    "BackendName",
    "DatabaseAddress",
    "ExactIndex",
    "Index",
    "Stamp",
    "StoredIndex",
    "build",
    "default_backend",
    "label_keys",
    "open_index",
    "place",
    "save_index",
    "search",
    "search_shards",
]

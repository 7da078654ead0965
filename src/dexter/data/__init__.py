"""What a data set is, and how it is read and written.

The names are imported on first use: predicting needs neither SciPy nor the formats.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dexter.data.dataset import Dataset, Split
    from dexter.data.formats import FORMATS, detect, load_dataset, save_dataset

__all__ = ["FORMATS", "Dataset", "Split", "detect", "load_dataset", "save_dataset"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        home = "dexter.data.dataset" if name in ("Dataset", "Split") else "dexter.data.formats"
        return getattr(importlib.import_module(home), name)
    raise AttributeError(f"module 'dexter.data' has no attribute {name!r}")

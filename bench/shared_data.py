"""Where the benchmarks' data sets are: below $DEXTER_SHARED, or in `shared` beside the repository."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from dexter.data import Dataset
from dexter.data.formats import load_dataset


def locate(name: str) -> Path:
    """The folder of a data set; ends the program with one line where there is none."""
    shared = Path(os.environ.get("DEXTER_SHARED", Path(__file__).resolve().parents[2] / "shared"))
    folder = shared / "data" / name
    if not folder.is_dir():
        sys.exit(f"{folder}: no such data set: set DEXTER_SHARED to a folder that has data/{name}")
    return folder


def load(name: str) -> Dataset:
    """A data set by name, or by its path."""
    return load_dataset(name if "/" in name else locate(name))

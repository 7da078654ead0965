"""What a data set is, and how it is read and written."""

from __future__ import annotations

from dexter.data.dataset import Dataset, Split
from dexter.data.formats import FORMATS, detect, load_dataset, save_dataset

__all__ = ["FORMATS", "Dataset", "Split", "detect", "load_dataset", "save_dataset"]

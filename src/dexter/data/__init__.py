"""What a data set is, and how it gets here."""

from __future__ import annotations

from dexter.data.dataset import Dataset, Split
from dexter.data.formats import FORMATS, convert_dataset, detect, load_dataset, save_dataset

__all__ = ["FORMATS", "Dataset", "Split", "convert_dataset", "detect", "load_dataset", "save_dataset"]

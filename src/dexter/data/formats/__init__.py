"""Readers and writers of data sets: one module per format, one registry, one policy for bad input."""

from __future__ import annotations

from dexter.data.formats.format import Format
from dexter.data.formats.load import load_dataset
from dexter.data.formats.registry import FORMATS, detect
from dexter.data.formats.save import convert_dataset, save_dataset

__all__ = ["FORMATS", "Format", "convert_dataset", "detect", "load_dataset", "save_dataset"]

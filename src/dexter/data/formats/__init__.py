"""Readers and writers of data sets: what all formats share in `reader` and `writer`, one file per family of formats."""

from __future__ import annotations

from dexter.data.formats.registry import FORMATS, detect, load_dataset, read_column, read_label_file, save_dataset

__all__ = ["FORMATS", "detect", "load_dataset", "read_column", "read_label_file", "save_dataset"]

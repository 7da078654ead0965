"""Which queries meet which labels in a step."""

from dexter.batches.batch import Positives

__all__ = ["Positives"]

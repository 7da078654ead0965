"""Which queries meet which labels in a step."""

from dexter.positives import Positives

__all__ = ["Positives"]

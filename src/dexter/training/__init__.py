"""Training: the loop and what it is made of."""

from __future__ import annotations

from dexter.training.run import Run
from dexter.training.trainer import train
from dexter.training.tuning import tune

__all__ = ["Run", "train", "tune"]

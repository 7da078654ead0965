"""Training: the loop and what it is made of.

`train` needs torch; it and `tune` are imported on first use, so that a run folder can be read without either.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dexter.errors import require
from dexter.training.run import Run

if TYPE_CHECKING:
    from dexter.training.trainer import train
    from dexter.training.tuning import tune

__all__ = ["Run", "train", "tune"]


def __getattr__(name: str) -> Any:
    if name == "train":
        require("torch", extra="train", purpose="training")
        from dexter.training.trainer import train

        return train
    if name == "tune":
        from dexter.training.tuning import tune

        return tune
    raise AttributeError(f"module 'dexter.training' has no attribute {name!r}")

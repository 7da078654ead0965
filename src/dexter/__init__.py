"""dexter: dual encoders for extreme multi-label classification.

The public names are imported on first use, so that `import dexter` is instant and does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dexter.data import Dataset as Dataset
    from dexter.data.formats import load_dataset as load_dataset
    from dexter.evaluation.report import Report as Report
    from dexter.evaluation.runs import evaluate as evaluate
    from dexter.planning.plan import plan as plan
    from dexter.predict.predictor import Prediction as Prediction
    from dexter.predict.predictor import Predictor as Predictor
    from dexter.training import train as train
    from dexter.training import tune as tune

__version__ = "0.1.0"

_HOMES = {
    "Dataset": "dexter.data",
    "Prediction": "dexter.predict.predictor",
    "Predictor": "dexter.predict.predictor",
    "Report": "dexter.evaluation.report",
    "evaluate": "dexter.evaluation.runs",
    "load_dataset": "dexter.data.formats",
    "plan": "dexter.planning.plan",
    "train": "dexter.training",
    "tune": "dexter.training",
}

__all__ = ["Dataset", "Prediction", "Predictor", "Report", "evaluate", "load_dataset", "plan", "train", "tune"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'dexter' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])

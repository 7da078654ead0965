"""Predict with a trained run: rank its labels for texts, explain a ranking, turn scores into probabilities.

    predictor.py    `Predictor`: opens a run, predicts, changes labels
    rank.py         the one path from encoded texts to ranked labels, and the choice it depends on
    windows.py      texts beyond the encoder's length
    neighbours.py   votes of the nearest training queries
    scoring.py      the choice that was tuned on validation, and its file
    calibration.py  scores as probabilities, by label frequency; thresholds for a wanted precision
    explain.py      parts of a score, words that carry it, similar training queries; the preview of a new label
    run_index.py    the index that is stored with a run
    text_files.py   texts in: from a file, stdin or a table
    files.py        predictions out

Tuning is in `dexter.training.tuning`. The service imports from this package only, so what it needs of the model is
named here too.
"""

from dexter.model.edits import ChangeResult, LabelChange, LabelRefused, VersionConflict
from dexter.model.label_file import Example, LabelEdit
from dexter.model.labels import LabelEntry, Labels, new_label_id
from dexter.model.similar import Duplicate, SimilarLabel
from dexter.model.untrusted_sqlite import LabelsBusy
from dexter.predict.explain import MAX_PREVIEW_RANK, Explanation, LabelPreview, Word
from dexter.predict.neighbours import Neighbour
from dexter.predict.predictor import EmbeddedText, Prediction, Predictor
from dexter.predict.rank import RankingChoice
from dexter.predict.run_index import published_version

__all__ = [
    "MAX_PREVIEW_RANK",
    "ChangeResult",
    "Duplicate",
    "EmbeddedText",
    "Example",
    "Explanation",
    "LabelChange",
    "LabelEdit",
    "LabelEntry",
    "LabelPreview",
    "LabelRefused",
    "Labels",
    "LabelsBusy",
    "Neighbour",
    "Prediction",
    "Predictor",
    "RankingChoice",
    "SimilarLabel",
    "VersionConflict",
    "Word",
    "new_label_id",
    "published_version",
]

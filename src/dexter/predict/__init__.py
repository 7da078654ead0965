"""Predict with a trained run: rank its labels for texts, explain a ranking, turn scores into probabilities.

    predictor.py    `Predictor`: opens a run, predicts, changes labels
    rank.py         the one path from encoded texts to ranked labels, and the choice it depends on
    neighbours.py   votes of the nearest training queries
    scoring.py      the choice that was tuned on validation, and its file
    calibration.py  scores as probabilities, by label frequency; thresholds for a wanted precision
    explain.py      parts of a score, words that carry it, similar training queries
    preview.py      a label that does not exist yet: its rank, and the labels it resembles
    run_index.py    the index that is stored with a run
    files.py        texts in, predictions out

How the choice is made is `dexter.training.tuning`. Services import what they need of the model from here.
"""

from dexter.model.edits import ChangeResult, LabelChange, LabelRefused, VersionConflict
from dexter.model.labels import LabelEntry, LabelPage, Labels
from dexter.model.similar import SimilarLabel
from dexter.model.store import model_folder
from dexter.predict.explain import Explanation
from dexter.predict.neighbours import Neighbour
from dexter.predict.predictor import EmbeddedText, Prediction, Predictor
from dexter.predict.rank import RankingChoice, rank
from dexter.predict.run_index import published_version

__all__ = [
    "ChangeResult",
    "EmbeddedText",
    "Explanation",
    "LabelChange",
    "LabelEntry",
    "LabelPage",
    "LabelRefused",
    "Labels",
    "Neighbour",
    "Prediction",
    "Predictor",
    "RankingChoice",
    "SimilarLabel",
    "VersionConflict",
    "model_folder",
    "published_version",
    "rank",
]

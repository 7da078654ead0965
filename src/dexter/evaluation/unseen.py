"""Labels that training never saw: hold some out, train the run's recipe without them, add them by their texts, score.

It takes a training run as long as the run's own, which is kept below the run folder, so that a second call trains
nothing. The held-out labels leave the training data altogether, as labels and as pairs; a query that has no other label
is left out of training. They are then added to the trained model as any new label is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dexter.data import Dataset, Split
from dexter.data.dataset import hash_fraction
from dexter.errors import DataError, UsageError
from dexter.evaluation.report import restrict_to_labels, score_report, test_split
from dexter.evaluation.runs import DEFAULT_KS, predict_columns
from dexter.predict.predictor import Predictor
from dexter.training import train
from dexter.training.run import read_run

_SHOWN = ("P@1", "P@3", "P@5", "R@10", "R@100")


@dataclass(frozen=True, kw_only=True)
class UnseenReport:
    """How well queries find their held-out labels, with and without training on these labels."""

    share: float
    num_held_out: int
    num_labels: int
    num_queries: int
    """Test queries with at least one held-out label."""
    alone: Mapping[str, Mapping[str, float]]
    """Metrics of a ranking of the held-out labels only: of `unseen`, and of `trained`, the run that saw them."""
    among_all: Mapping[str, Mapping[str, float]]
    """Metrics of a ranking of all labels, in which only held-out labels count as right."""

    def render(self) -> str:
        """Render a table of the metrics, a row for each ranking."""
        lines = [
            f"{self.num_held_out:,} of {self.num_labels:,} labels held out; {self.num_queries:,} test queries want one",
            f"{'':34s}" + "".join(f"{name:>8s}" for name in self._columns),
        ]
        for title, rows in (("held-out labels alone", self.alone), ("among all labels", self.among_all)):
            for name, metrics in rows.items():
                lines.append(f"{title + ', ' + name:34s}" + "".join(f"{metrics[c]:8.2f}" for c in self._columns))
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """Return the report as plain values."""
        return asdict(self)

    @property
    def _columns(self) -> list[str]:
        """The metrics that every row has; cut-offs beyond the number of held-out labels are left out."""
        return [name for name in _SHOWN if all(name in row for row in (*self.alone.values(), *self.among_all.values()))]


def evaluate_unseen(run: str | Path, dataset: Dataset, *, share: float = 0.1, seed: int = 0) -> UnseenReport:
    """Train a run's recipe again without some labels, below its folder, and score these labels on the test split.

    Args:
        run: a finished run folder.
        dataset: the data it was trained on.
        share: share of the labels that are held out.
        seed: selects which labels.
    """
    if not 0.0 < share < 1.0:
        raise UsageError(f"the share of labels to hold out is {share}: expected a number between 0 and 1")
    folder = Path(run)
    read_run(folder)
    trained = Predictor.load(folder)
    dataset = trained.own_labels.filter_test(dataset)
    held_out = choose_labels(dataset.label_ids, share, seed=seed)
    wanting = np.flatnonzero(restrict_to_labels(test_split(dataset).relevance, held_out).getnnz(axis=1))
    if not len(wanting):
        raise DataError(f"{dataset.name}: no test query wants one of the {int(held_out.sum())} held-out labels")
    split = test_split(dataset).select(wanting)
    split = replace(split, relevance=restrict_to_labels(split.relevance, held_out))
    out = folder / "unseen" / f"share-{share:g}-seed-{seed}"
    train(without_labels(dataset, held_out), recipe=folder / "config.toml", out=out, resume=True)
    unseen = Predictor.load(out)
    new = [(dataset.label_ids[label], dataset.label_texts[label]) for label in np.flatnonzero(held_out).tolist()]
    unseen.add_labels(new)
    predictors = {"unseen": unseen, "trained": trained}
    new_ids = {label_id for label_id, _ in new}
    return UnseenReport(
        share=share,
        num_held_out=len(new),
        num_labels=dataset.num_labels,
        num_queries=len(split),
        alone={name: _score(_restrict(each, new_ids), dataset, split) for name, each in predictors.items()},
        among_all={name: _score(each, dataset, split) for name, each in predictors.items()},
    )


def choose_labels(label_ids: Sequence[str], share: float, *, seed: int = 0) -> NDArray[np.bool_]:
    """Choose the labels to hold out by a hash of id and seed, so that the choice does not depend on other labels."""
    fractions = np.array([hash_fraction(f"{seed}:{label_id}") for label_id in label_ids])
    chosen = fractions < share
    if not chosen.any():
        chosen[fractions.argmin()] = True
    return chosen


def without_labels(dataset: Dataset, held_out: NDArray[np.bool_]) -> Dataset:
    """Return the training data as if some labels did not exist; queries that had no others are left out."""
    kept = np.flatnonzero(~held_out)
    relevance = dataset.train.relevance[:, kept].tocsr()
    rows = np.flatnonzero(relevance.getnnz(axis=1))
    if not len(rows):
        raise DataError(f"{dataset.name}: no training query has a label left: hold a smaller share out")
    filtered = dataset.train.filtered
    train_split = Split(
        [dataset.train.texts[row] for row in rows.tolist()],
        [dataset.train.uids[row] for row in rows.tolist()],
        relevance[rows],
        None if filtered is None else filtered[rows][:, kept].tocsr(),
    )
    texts, ids = ([values[label] for label in kept.tolist()] for values in (dataset.label_texts, dataset.label_ids))
    name = f"{dataset.name}-without-{int(held_out.sum())}"
    return replace(dataset, name=name, label_texts=texts, label_ids=ids, train=train_split, test=None, source={})


def _restrict(predictor: Predictor, ids: set[str]) -> Predictor:
    """Return a predictor that ranks only these labels."""
    rows = np.array([row for row, label_id in enumerate(predictor.labels.ids) if label_id in ids], dtype=np.int64)
    model = predictor.model.select_labels(rows)
    return predictor.variant(model=model)


def _score(predictor: Predictor, dataset: Dataset, split: Split) -> dict[str, float]:
    ks = [k for k in DEFAULT_KS if k <= len(predictor.labels.ids)]
    columns_NK = predict_columns(predictor, dataset, split, max(ks))
    settings: dict[str, Any] = {"ks": ks, "propensity": dataset.propensity, "num_resamples": 0}
    return score_report(columns_NK, split, dataset.train.relevance, **settings).metrics

"""Learn from trained labels how to make the vectors and priors of labels that are added later.

Some trained labels are hidden: they lose the vector of their own, their row, their prior and their votes, and are made
again from their texts, as a new label is. What such a label lacks against a trained one, which was fitted to its
queries, is measured on validation queries and added to the prior of every new label. The words of a hidden label were
trained with it, so that it is found more often than a new one. Therefore not its recall decides, but how often it
is right in the places that it takes, with some caution.

Shapes: N queries, H hidden labels, K labels that they are made from, D dimensions.
"""

from __future__ import annotations

import logging

import numpy as np
from numpy.typing import NDArray

from dexter.data import Split
from dexter.encoders.head_arrays import unit_rows
from dexter.index import ExactIndex, search
from dexter.model.edits import apply_changes
from dexter.model.model import Model
from dexter.model.store import ChangedLabel
from dexter.model.unseen import NUM_NEIGHBOURS, LabelGenerator
from dexter.predict.rank import RankingChoice, find_voters, rank

log = logging.getLogger("dexter")
_PLACES = 10
"""Places of a ranking for which labels compete."""
_SHARE, _MAX_HIDDEN = 0.1, 2_000
"""Share and number of trained labels that are hidden."""
_MAX_TRAINING, _MAX_VALIDATION = 2_000, 1_000
"""Training queries whose mean and covariance are taken, and validation queries that are ranked."""
_CAUTION = 2.0
"""Factor of the odds that a hidden label in its place is right, against those of the labels it competes with."""
_MIN_HITS = 20
"""Number of hidden labels that must be found before a precision is believed."""


def fit_generator(model: Model, train: Split, validation: Split, choice: RankingChoice) -> LabelGenerator | None:
    """Fit how new labels are made, for labels that are ranked by `choice`.

    None for a model without label priors, or with too few labels: new ones are then made from their texts alone.

    Args:
        model: the trained model, with its training queries if it keeps them.
        train: the queries it was trained on.
        validation: queries held out of training.
        choice: how labels are ranked.
    """
    seen = np.flatnonzero(model.labels.counts > 0)
    num_hidden = min(int(_SHARE * len(seen)), _MAX_HIDDEN)
    if not model.has_prior or not num_hidden:
        return None
    train, validation = _spaced(train, _MAX_TRAINING), _spaced(validation, _MAX_VALIDATION)
    priors = model.priors_for_new_labels()
    hidden = np.sort(np.random.default_rng(0).permutation(seen)[:num_hidden])
    weight = model.head.temperature * choice.dial * (2 if choice.head == "unified" else 1)
    missing = _missing_score(model, validation, choice, hidden) / weight if weight else 0.0
    log.info("a new label has the prior of a rare one %+.2f", missing)
    return LabelGenerator.of_queries(
        model.encode_queries(train.texts), priors=tuple(prior + missing for prior in priors)
    )


def _missing_score(model: Model, validation: Split, choice: RankingChoice, hidden: NDArray[np.int64]) -> float:
    """Return what may be added to the scores of new labels, 0 or more.

    It is the most with which hidden labels that come among the first ten are right as often as the ten were without
    them, times a caution.
    """
    representations_ND = model.encode_queries(validation.texts)
    index = ExactIndex(model.label_vectors(head=choice.head, dial=choice.dial))
    depth = min(3 * _PLACES, len(model.labels.ids))
    voters = find_voters(model, validation.texts, representations_ND, choice)
    found = rank(model, index, representations_ND, choice, depth, voters=voters, exclude=validation.filtered)
    # The others move up to the places of hidden labels.
    order = np.argsort(np.isin(found.ids, hidden), axis=1, kind="stable")[:, :_PLACES]
    ids_NK, scores_NK = (np.take_along_axis(values, order, axis=1) for values in found)
    rows = np.repeat(np.arange(len(ids_NK)), ids_NK.shape[1])
    relevant = np.asarray(validation.relevance[rows, ids_NK.ravel()]).ravel() > 0
    right = float(np.mean(relevant & (ids_NK.ravel() >= 0)))
    scores_NH = _hidden_scores(model, representations_ND, choice, hidden)
    margins_NH = scores_NH - scores_NK[:, -1:]
    if validation.filtered is not None:
        margins_NH[validation.filtered[:, hidden].nonzero()] = -np.inf
    return largest_offset(margins_NH, (validation.relevance[:, hidden] > 0).toarray(), right)


def largest_offset(margins_NH: NDArray[np.float32], relevant_NH: NDArray[np.bool_], right: float) -> float:
    """Return the most that may be added to all margins, 0 or more, if those above 0 are to be relevant often enough.

    The odds that they are must be at least twice (`_CAUTION`) those of `right`, a probability; at least 20 must be.
    """
    falling = np.argsort(-margins_NH, axis=None, kind="stable")
    hits = np.cumsum(relevant_NH.ravel()[falling])
    misses = np.arange(1, len(hits) + 1) - hits
    enough = (hits >= _MIN_HITS) & (hits * (1.0 - right) >= _CAUTION * right * misses)
    if not enough.any():
        return 0.0
    return max(0.0, -float(margins_NH.ravel()[falling[np.flatnonzero(enough)[-1]]]))


def _hidden_scores(
    model: Model,
    representations_ND: NDArray[np.float32],
    choice: RankingChoice,
    hidden: NDArray[np.int64],
) -> NDArray[np.float32]:
    """Score labels as if they had been added by their texts: [N, H]."""
    # With a space after it a text has the same tokens, but not the vector that the encoder has learned for the label.
    texts, priors = [model.labels.texts[row] for row in hidden], model.priors_for_new_labels()
    representations_HD = model.encode_labels([text + " " for text in texts])
    seen = np.flatnonzero(model.labels.counts > 0)
    others = np.setdiff1d(seen, hidden)
    # Only the labels whose rows they borrow from are copied.
    near = search(
        unit_rows(model.label_embeddings(representations_HD)),
        unit_rows(model.label_embeddings()[others]),
        min(NUM_NEIGHBOURS, len(others)),
    )
    small = model.select_labels(others[np.unique(near.ids)])
    added = [
        ChangedLabel(model.labels.ids[row], text, vector_D, priors, 1)
        for row, text, vector_D in zip(hidden, texts, representations_HD, strict=True)
    ]
    labels_HD = apply_changes(small, added).label_vectors(head=choice.head, dial=choice.dial)[-len(hidden) :]
    return np.asarray(model.search_vectors(representations_ND, head=choice.head, dial=choice.dial) @ labels_HD.T)


def _spaced(split: Split, maximum: int) -> Split:
    """Take queries at equal distances: they stand in the order of the data set."""
    return split.select(np.linspace(0, len(split) - 1, min(maximum, len(split))).astype(np.int64))

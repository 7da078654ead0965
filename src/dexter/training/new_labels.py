"""Learn from trained labels how to make the vectors and priors of labels that are added later.

Some trained labels are hidden: they lose the vector of their own, their row, their prior and their votes, and are made
again from their texts, as a new label is. What such a label lacks against a trained one, which was fitted to its
queries, is measured on validation queries and added to the prior of every new label; so is how much it counts that a
query has the words of a label. The words of a hidden label were trained with it, so that it is found more often than a
new one. Therefore not its recall decides, but how often it is right in the places that it takes, with some caution.

Shapes: N queries, H hidden labels, K labels that they are made from, D dimensions.
"""

from __future__ import annotations

import logging
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dexter.encoders.head_arrays import unit_rows
from dexter.index import search
from dexter.model.edits import apply_changes
from dexter.model.label_file import ChangedLabel
from dexter.model.lexical import LabelWords, distinct_words
from dexter.model.unseen import NUM_NEIGHBOURS, LabelGenerator
from dexter.predict.rank import RankingChoice, word_gains
from dexter.training.tuning import Trial

log = logging.getLogger("dexter")
_PLACES = 10
"""Places of a ranking for which labels compete."""
_SHARE, _MAX_HIDDEN = 0.1, 1_000
"""Share and number of trained labels that are hidden."""
NUM_GENERATOR_QUERIES = 2_000
"""Training queries whose mean and covariance are taken."""
_MAX_PAIRS = 2**17
"""Most pairs of a query and a hidden label that are sorted."""
_WORD_WEIGHTS = (1.0, 2.0, 4.0, 8.0)
"""Weights of the words of new labels that are tried, in units of the temperature."""
_CAUTION = 2.0
"""Factor of the odds that a hidden label in its place is right, against those of the labels it competes with."""
_MIN_HITS = 20
"""Number of hidden labels that must be found before a precision is believed."""


def fit_generator(trial: Trial, choice: RankingChoice, queries_QD: NDArray[np.float32]) -> LabelGenerator | None:
    """Fit how new labels are made, for labels that are ranked by `choice`.

    None for a model without label priors, or with too few labels: new ones are then made from their texts alone.

    Args:
        trial: ranks the validation queries by the trained model.
        choice: how labels are ranked.
        queries_QD: the representations of some training queries.
    """
    model = trial.model
    seen = np.flatnonzero(model.labels.counts > 0)
    num_hidden = min(int(_SHARE * len(seen)), _MAX_HIDDEN)
    if not model.has_prior or not num_hidden:
        return None
    priors = model.priors_for_new_labels()
    hidden = np.sort(np.random.default_rng(0).permutation(seen)[:num_hidden])
    unit = model.head.temperature * (2 if choice.head == "unified" else 1)
    made = _fit_scores(trial, choice, hidden, unit=unit) if choice.dial else NewLabelScores(0.0, 0.0)
    missing = made.offset / (unit * choice.dial) if choice.dial else 0.0
    log.info("a new label has the prior of a rare one %+.2f; its words count %.0f", missing, made.word_weight)
    priors = tuple(prior + missing for prior in priors)
    return LabelGenerator.of_queries(queries_QD, priors=priors, word_weight=made.word_weight)


class NewLabelScores(NamedTuple):
    """What is added to the scores of new labels."""

    offset: float
    """To all of them."""
    word_weight: float
    """To one of which the text has every word, in units of the temperature."""


def _fit_scores(trial: Trial, choice: RankingChoice, hidden: NDArray[np.int64], *, unit: float) -> NewLabelScores:
    """Find out what may be added to the scores of new labels, so that most of them are found.

    Hidden labels that come among the first ten must be right as often as the ten were without them, times a caution.
    Where that is never so, nothing is added.
    """
    model, validation = trial.model, trial.split
    found = trial.rank(choice, min(3 * _PLACES, len(model.labels.ids)))
    # The others move up to the places of hidden labels.
    order = np.argsort(np.isin(found.ids, hidden), axis=1, kind="stable")[:, :_PLACES]
    ids_NK, scores_NK = (np.take_along_axis(values, order, axis=1) for values in found)
    rows = np.repeat(np.arange(len(ids_NK)), ids_NK.shape[1])
    is_right = np.asarray(validation.relevance[rows, ids_NK.ravel()]).ravel() > 0
    right = float(np.mean(is_right & (ids_NK.ravel() >= 0)))
    margins_NH = _hidden_scores(trial, choice, hidden) - scores_NK[:, -1:]
    if validation.filtered is not None:
        margins_NH[validation.filtered[:, hidden].nonzero()] = -np.inf
    relevant_NH = (validation.relevance[:, hidden] > 0).toarray()
    return choose_scores(margins_NH, np.float32(unit) * _word_gains(trial, hidden), relevant_NH, right)


def choose_scores(
    margins_NH: NDArray[np.float32], gains_NH: NDArray[np.float32], relevant_NH: NDArray[np.bool_], right: float
) -> NewLabelScores:
    """Choose what finds most relevant pairs of a query and a hidden label while those found are right often enough.

    Args:
        margins_NH: how far the score of each pair is above the last place of a ranking; 0 or more: it is found.
        gains_NH: what the words of the query say for the label, at weight one.
        relevant_NH: whether the label is relevant to the query.
        right: how often the labels of a ranking are.
    """
    offset = max(0.0, largest_offset(margins_NH, relevant_NH, right) or 0.0)
    best, most = NewLabelScores(offset, 0.0), np.count_nonzero(relevant_NH & (margins_NH + offset >= 0))
    for weight in _WORD_WEIGHTS:
        with_words_NH = margins_NH + np.float32(weight) * gains_NH
        largest = largest_offset(with_words_NH, relevant_NH, right)
        if largest is None:
            continue
        hits = np.count_nonzero(relevant_NH & (with_words_NH + largest >= 0))
        if hits > most:
            best, most = NewLabelScores(largest, weight), hits
    return best


def largest_offset(margins_NH: NDArray[np.float32], relevant_NH: NDArray[np.bool_], right: float) -> float | None:
    """Return the most that may be added to all margins if those of 0 or more are to be relevant often enough.

    The odds that they are must be at least twice (`_CAUTION`) those of `right`, a probability; at least 20 must be.
    None if no number will do.
    """
    # Of millions only the largest can be right often enough.
    kept = np.argpartition(-margins_NH, min(_MAX_PAIRS, margins_NH.size) - 1, axis=None)[:_MAX_PAIRS]
    falling = kept[np.argsort(-margins_NH.ravel()[kept], kind="stable")]
    hits = np.cumsum(relevant_NH.ravel()[falling])
    misses = np.arange(1, len(hits) + 1) - hits
    enough = (hits >= _MIN_HITS) & (hits * (1.0 - right) >= _CAUTION * right * misses)
    return -float(margins_NH.ravel()[falling[np.flatnonzero(enough)[-1]]]) if enough.any() else None


def _hidden_scores(trial: Trial, choice: RankingChoice, hidden: NDArray[np.int64]) -> NDArray[np.float32]:
    """Score labels as if they had been added by their texts: [N, H]."""
    model = trial.model
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
    queries_ND = model.search_vectors(trial.representations_ND, head=choice.head, dial=choice.dial)
    return np.asarray(queries_ND @ labels_HD.T)


def _word_gains(trial: Trial, hidden: NDArray[np.int64]) -> NDArray[np.float32]:
    """Return what the words of the queries say for labels, before it is weighed: [N, H]."""
    words = LabelWords(np.arange(len(hidden)), [trial.model.labels.texts[row] for row in hidden])
    gains_NH = np.zeros((len(trial.split), len(hidden)), dtype=np.float32)
    for row, text in enumerate(trial.split.texts):
        columns, gains = word_gains(distinct_words(text), words, 1.0)
        gains_NH[row, columns] = gains
    return gains_NH

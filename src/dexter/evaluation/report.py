"""The result of an evaluation: `Report` for one ranking, `Comparison` for two rankings of the same queries.

`score_report` is the only way from predictions to a report: it removes filter pairs, scores, splits by label frequency
and adds intervals, so that every table of the project is made by the same steps.

Frequency bands (`dexter.types.BANDS`) group labels by their number of training queries. The ranking stays as it is,
relevance is restricted to the labels of the band, and queries with none of them are left out. So `P@1` of the tail is
the share of queries with a rare label whose first prediction is such a label. The values of the bands do not add up to
the overall value, and even a perfect ranking may stay below 100 in a band, because labels of other bands rightly take
places.

Deciles (`decile_members`) split the labels that have training queries into ten groups of equal size, from the most to
the least frequent, and are scored in the same way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from scipy.sparse import csr_matrix

from dexter.data import Dataset, Split
from dexter.errors import DataError, UsageError
from dexter.evaluation.intervals import CONFIDENCE, SEED, Interval, bootstrap, paired_bootstrap
from dexter.metrics import (
    Hits,
    LabelCounts,
    Ratio,
    check_same_labels,
    checked_ks,
    checked_top_ids,
    count_labels,
    find_hits,
    inverse_propensity,
    label_metrics,
    overfetch,
    per_query,
    query_ratios,
    relevant_pairs,
    remove_filtered,
)
from dexter.types import BANDS

NUM_DECILES = 10


@dataclass(frozen=True, kw_only=True)
class Report:
    """The metrics of one ranking, in percent, with what they were computed from."""

    metrics: dict[str, float]
    """Each metric over all queries, such as `metrics["P@1"]`; NaN where no query takes part."""
    by_frequency: dict[str, dict[str, float]]
    """The metrics restricted to the labels of each frequency band: frequent, torso, tail, unseen."""
    band_sizes: dict[str, dict[str, int]]
    """Per band the number of labels, of queries with such a label and of relevant pairs."""
    by_decile: dict[str, dict[str, float]]
    """The metrics restricted to the labels of each decile of training frequency, "1" (most frequent) to "10"."""
    decile_sizes: dict[str, dict[str, int]]
    """Per decile the same numbers as in `band_sizes`, and the smallest and largest number of training queries of its
    labels: `least` and `most`, both 0 in a decile without labels."""
    num_queries: int
    """Queries that were scored."""
    num_without_labels: int
    """Queries without a relevant label: misses in P, left out of R, nDCG and MRR."""
    num_short: int
    """Queries with fewer predictions than the largest cut-off: the missing places count as misses."""
    intervals: dict[str, Interval] = field(default_factory=dict)
    """Bootstrap intervals of the metrics that are sums over queries; empty when none were asked for."""
    calibration: dict[str, float] = field(default_factory=dict)
    """Expected calibration error of the first places in percent: `softmax` before calibration, `calibrated` after it;
    empty where a run has no probabilities."""
    hierarchy: dict[str, float] = field(default_factory=dict)
    """Where the labels are those of a vocabulary with broader concepts: `parentP@k` (a hit on the parent counts too),
    `hP@k` and `hR@k` (with all broader labels); empty otherwise."""
    reliability: list[dict[str, float]] = field(default_factory=list)
    """Bins of the calibrated probabilities of the first places: `claimed` (their mean), `right` (share of right labels)
    and `count`; empty where a run has no probabilities."""
    own_labels: dict[str, Any] = field(default_factory=dict)
    """Where own labels are left out beside the filter pairs of the data: `num_queries` with one, `num_positive` of
    these pairs that are relevant, and `metrics_with_own`, the metrics if they were not left out."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Cut-offs, propensity constants, training size, filter pairs, resampling: all that a repetition needs."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Two rankings of the same queries, and the intervals of their differences."""

    before: dict[str, float]
    """The first ranking's metrics in percent."""
    after: dict[str, float]
    """The second ranking's metrics in percent."""
    differences: dict[str, Interval]
    """`after - before` in points, with paired bootstrap intervals."""
    num_queries: int
    """Queries that both rankings were scored on."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Cut-offs, propensity constants, resampling."""


def score_report(
    top_ids: Any,
    split: Split,
    train_relevance: csr_matrix,
    *,
    ks: Sequence[int] = (1, 3, 5),
    propensity: tuple[float, float] = (0.55, 1.5),
    num_resamples: int = 1000,
) -> Report:
    """Score predictions for a split's queries.

    Args:
        top_ids: integers, queries x places, best first; -1 where there is no prediction. Where the split has filter
            pairs, fetch `max(ks) + overfetch(split.filtered)` places: the pairs are removed here.
        split: the queries' relevance and filter pairs.
        train_relevance: training queries x labels, for propensities and frequency bands.
        ks: the cut-offs.
        propensity: the constants (a, b).
        num_resamples: bootstrap resamples; 0 leaves the intervals out.
    """
    ks = checked_ks(ks)
    relevance = relevant_pairs(split.relevance)
    check_same_labels(relevance, train_relevance)
    top_ids, num_removed = _without_filtered(top_ids, split, max(ks))
    weights = inverse_propensity(train_relevance, *propensity)
    num_train_of_label = np.bincount(relevant_pairs(train_relevance).indices, minlength=relevance.shape[1])
    hits = find_hits(top_ids, relevance)
    counts = count_labels(top_ids, hits, relevance, ks)
    ratios = dict(query_ratios(hits, relevance, weights, ks))
    bands, deciles = band_members(num_train_of_label), decile_members(num_train_of_label)
    by_frequency, band_sizes = score_groups(hits, counts, relevance, bands, inverse_propensity=weights)
    by_decile, decile_sizes = score_groups(hits, counts, relevance, deciles, inverse_propensity=weights)
    for name, members in deciles.items():
        frequencies = num_train_of_label[members] if members.any() else np.zeros(1)
        decile_sizes[name] |= {"least": int(frequencies.min()), "most": int(frequencies.max())}
    intervals = {}
    if num_resamples:
        intervals = bootstrap(ratios, num_resamples=num_resamples)
    predicted = ((top_ids >= 0) & (top_ids < relevance.shape[1])).sum(axis=1)
    return Report(
        metrics={name: ratio.value for name, ratio in ratios.items()} | label_metrics(counts),
        by_frequency=by_frequency,
        band_sizes=band_sizes,
        by_decile=by_decile,
        decile_sizes=decile_sizes,
        num_queries=len(top_ids),
        num_without_labels=int((np.diff(relevance.indptr) == 0).sum()),
        num_short=int((predicted < max(ks)).sum()),
        intervals=intervals,
        settings=_settings(ks, propensity, split, train_relevance)
        | {"num_predictions_removed": num_removed}
        | {"intervals": {"num_resamples": num_resamples, "confidence": CONFIDENCE, "seed": SEED}},
    )


def compare(
    before_ids: Any,
    after_ids: Any,
    split: Split,
    train_relevance: csr_matrix,
    *,
    ks: Sequence[int] = (1, 3, 5),
    propensity: tuple[float, float] = (0.55, 1.5),
    num_resamples: int = 1000,
) -> Comparison:
    """Compare two rankings of the same queries; a difference whose interval excludes zero is more than chance."""
    ks = checked_ks(ks)
    relevance = relevant_pairs(split.relevance)
    check_same_labels(relevance, train_relevance)
    weights = inverse_propensity(train_relevance, *propensity)
    before, after = (
        per_query(_without_filtered(top_ids, split, max(ks))[0], relevance, weights, ks)
        for top_ids in (before_ids, after_ids)
    )
    return Comparison(
        before={name: ratio.value for name, ratio in before.items()},
        after={name: ratio.value for name, ratio in after.items()},
        differences=paired_bootstrap(before, after, num_resamples=num_resamples),
        num_queries=int(relevance.shape[0]),
        settings=_settings(ks, propensity, split, train_relevance)
        | {"intervals": {"num_resamples": num_resamples, "confidence": CONFIDENCE, "seed": SEED}},
    )


def band_members(num_train_of_label: np.ndarray) -> dict[str, np.ndarray]:
    """Return for each frequency band a boolean array that marks its labels."""
    return {name: (num_train_of_label >= low) & (num_train_of_label <= high) for name, (low, high) in BANDS.items()}


def decile_members(num_train_of_label: np.ndarray) -> dict[str, np.ndarray]:
    """Return for each decile of training frequency, "1" to "10", a boolean array that marks its labels.

    The labels that have training queries are sorted by their number, largest first, and cut into ten groups whose sizes
    differ by at most one, larger groups first. Labels with equal numbers are sorted by id, so a cut may run through
    them: where half of all labels have one training query, several deciles hold nothing else and differ by chance only.
    Labels without training queries are in no decile; they are the band "unseen". With fewer than ten labels the last
    deciles are empty.
    """
    by_frequency = np.argsort(-num_train_of_label, kind="stable")[: np.count_nonzero(num_train_of_label)]
    members = {}
    for number, labels in enumerate(np.array_split(by_frequency, NUM_DECILES), start=1):
        members[str(number)] = np.zeros(len(num_train_of_label), dtype=bool)
        members[str(number)][labels] = True
    return members


def score_groups(
    hits: Hits,
    counts: Mapping[int, LabelCounts],
    relevance: csr_matrix,
    groups: Mapping[str, np.ndarray],
    *,
    inverse_propensity: np.ndarray | None = None,
) -> tuple[dict[str, dict[str, float]], dict[str, dict[str, int]]]:
    """Return the metrics restricted to each group of labels at the cut-offs of `counts`, and the sizes of the groups.

    Args:
        hits: the ranking's hits, from `find_hits`.
        counts: each label's counts by cut-off, from `count_labels`.
        relevance: queries x labels, from `relevant_pairs`.
        groups: by name, a boolean array that marks the labels of a group.
        inverse_propensity: one weight per label; without it PSP and PSnDCG are left out.
    """
    metrics, sizes = {}, {}
    for name, members in groups.items():
        in_group = restrict_to_labels(relevance, members)
        takes_part = np.diff(in_group.indptr) > 0
        ratios = query_ratios(hits.restrict(members[hits.labels]), in_group, inverse_propensity, tuple(counts))
        by_query = {
            metric: Ratio(ratio.numerator[takes_part], ratio.denominator[takes_part]).value for metric, ratio in ratios
        }
        metrics[name] = by_query | label_metrics(counts, members)
        sizes[name] = {"labels": int(members.sum()), "queries": int(takes_part.sum()), "pairs": int(in_group.nnz)}
    return metrics, sizes


def restrict_to_labels(relevance: csr_matrix, members: np.ndarray) -> csr_matrix:
    """Return the pairs whose label a boolean array chooses; shape and column numbers stay."""
    keep = members[relevance.indices]
    kept_before = np.r_[0, np.cumsum(keep)]
    return csr_matrix(
        (relevance.data[keep], relevance.indices[keep], kept_before[relevance.indptr]), shape=relevance.shape
    )


def test_split(dataset: Dataset) -> Split:
    """Return the test split, or raise an error that says how to get one."""
    if dataset.test is None:
        raise DataError(
            f"{dataset.name} has no test split: make one with `dexter data split DATA FOLDER`, train on that folder, "
            "or read the validation figures of the run"
        )
    return dataset.test


def _settings(
    ks: Sequence[int], propensity: tuple[float, float], split: Split, train_relevance: csr_matrix
) -> dict[str, Any]:
    """Return what the figures depend on besides the rankings."""
    return {
        "ks": list(ks),
        "propensity": {"a": propensity[0], "b": propensity[1], "num_train": int(train_relevance.shape[0])},
        "num_labels": split.num_labels,
        "num_filter_pairs": 0 if split.filtered is None else int(split.filtered.nnz),
    }


def _without_filtered(top_ids: Any, split: Split, k: int) -> tuple[np.ndarray, int]:
    """Return the first k places after filter pairs are removed, and how many predictions were removed.

    A ranking that was fetched with too few places is an error, because its lower places would count as misses.
    """
    ids = checked_top_ids(top_ids, len(split))
    if split.filtered is None:
        return ids[:, :k], 0
    num_places, num_labels = ids.shape[1], split.num_labels
    kept = remove_filtered(ids, np.zeros(ids.shape, dtype=np.float32), split.filtered, max(num_places, 1)).ids
    was_full = ((ids >= 0) & (ids < num_labels)).all(axis=1)
    left = ((kept >= 0) & (kept < num_labels)).sum(axis=1)
    num_removed = int(((ids >= 0) & (ids < num_labels)).sum() - left.sum())
    short = was_full & (left < k) & (left < num_places)
    if short.any() and num_places < min(num_labels, k + overfetch(split.filtered)):
        raise UsageError(
            f"{int(short.sum())} queries have fewer than {k} predictions left after filter pairs were removed from "
            f"{num_places} places: fetch {k + overfetch(split.filtered)} places"
        )
    return kept[:, :k], num_removed

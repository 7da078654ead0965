"""`dexter data check`: what a data set looks like and what is wrong with it, as one report."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dexter.data.dataset import Dataset, Split
from dexter.data.findings import Problem, find_problems
from dexter.data.places import Places
from dexter.data.plots import zipf_text
from dexter.types import BANDS


@dataclass(frozen=True, kw_only=True)
class SplitCounts:
    """The size of one split."""

    queries: int
    pairs: int
    """Relevant (query, label) pairs."""
    filter_pairs: int
    """Pairs that are removed from predictions before scoring."""
    labels_per_query_mean: float
    labels_per_query_median: float
    labels_per_query_max: int
    words_per_query_mean: float


@dataclass(frozen=True, kw_only=True)
class Counts:
    """The size of a data set."""

    labels: int
    queries_per_label_mean: float
    """Training queries per label, over all labels."""
    queries_per_label_median: float
    queries_per_label_max: int
    words_per_label_mean: float
    splits: Mapping[str, SplitCounts]


@dataclass(frozen=True, kw_only=True)
class BandCounts:
    """What one frequency band holds."""

    labels: int
    pairs: Mapping[str, int]
    """Relevant pairs with a label of this band, by split."""


@dataclass(frozen=True, kw_only=True)
class CheckReport:
    """What `check` found."""

    name: str
    source: Mapping[str, str]
    counts: Counts
    bands: Mapping[str, BandCounts]
    problems: Sequence[Problem]
    label_counts: np.ndarray
    """Number of training queries of each label: what the Zipf plot shows."""

    def to_json(self) -> dict[str, Any]:
        """Everything but the per-label counts, as plain values."""
        return {
            "name": self.name,
            "source": dict(self.source),
            "counts": asdict(self.counts),
            "bands": {name: asdict(band) for name, band in self.bands.items()},
            "problems": [asdict(problem) for problem in self.problems],
        }

    def render(self, width: int = 100) -> str:
        """The report as text for a terminal of that width."""
        parts = [
            f"{self.name} (read as {self.source['format']})" if "format" in self.source else self.name,
            _render_counts(self.counts),
            _render_bands(self.bands, width),
            zipf_text(self.label_counts, width=min(width, 100)),
            _render_problems(self.problems, width),
        ]
        return "\n\n".join(parts)


def check(dataset: Dataset, *, folder: str | Path | None = None, max_examples: int = 3) -> CheckReport:
    """Describe a data set and look for problems.

    Args:
        dataset: the data set.
        folder: where it was read from; problems then name file and line for formats with one line per row.
        max_examples: how many places to name for each kind of problem.
    """
    return CheckReport(
        name=dataset.name,
        source=dataset.source,
        counts=count(dataset),
        bands=count_bands(dataset),
        problems=tuple(find_problems(dataset, Places(dataset, folder), max_examples=max_examples)),
        label_counts=dataset.label_counts,
    )


def count(dataset: Dataset) -> Counts:
    """Measure a data set."""
    return Counts(
        labels=dataset.num_labels,
        queries_per_label_mean=_mean(dataset.label_counts),
        queries_per_label_median=float(np.median(dataset.label_counts)) if dataset.num_labels else 0.0,
        queries_per_label_max=int(dataset.label_counts.max(initial=0)),
        words_per_label_mean=_words(dataset.label_texts),
        splits={name: _count_split(split) for name, split in dataset.splits.items()},
    )


def count_bands(dataset: Dataset) -> dict[str, BandCounts]:
    """Labels and pairs of each frequency band; how often a label occurs in training decides its band."""
    per_label = {
        name: np.bincount(split.relevance.indices, minlength=dataset.num_labels)
        for name, split in dataset.splits.items()
    }
    bands = {}
    for band, (low, high) in BANDS.items():
        members = (dataset.label_counts >= low) & (dataset.label_counts <= high)
        pairs = {name: int(counts[members].sum()) for name, counts in per_label.items()}
        bands[band] = BandCounts(labels=int(members.sum()), pairs=pairs)
    return bands


def _count_split(split: Split) -> SplitCounts:
    sizes = np.diff(split.relevance.indptr)
    return SplitCounts(
        queries=len(split),
        pairs=int(split.relevance.nnz),
        filter_pairs=0 if split.filtered is None else int(split.filtered.nnz),
        labels_per_query_mean=_mean(sizes),
        labels_per_query_median=float(np.median(sizes)) if len(sizes) else 0.0,
        labels_per_query_max=int(sizes.max(initial=0)),
        words_per_query_mean=_words(split.texts),
    )


def _mean(values: np.ndarray) -> float:
    return float(values.mean()) if len(values) else 0.0


def _words(texts: Sequence[str]) -> float:
    """Mean number of words per text."""
    return sum(len(text.split()) for text in texts) / max(len(texts), 1)


def _render_counts(counts: Counts) -> str:
    lines = [f"{'split':<8}{'queries':>10}{'pairs':>12}{'filter pairs':>14}{'labels per query':>27}{'words':>8}"]
    for name, split in counts.splits.items():
        sizes = f"{split.labels_per_query_mean:.2f} (max {split.labels_per_query_max:,})"
        lines.append(
            f"{name:<8}{split.queries:>10,}{split.pairs:>12,}{split.filter_pairs:>14,}{sizes:>27}"
            f"{split.words_per_query_mean:>8.1f}"
        )
    lines.append(
        f"{'labels':<8}{counts.labels:>10,}   training queries per label: mean {counts.queries_per_label_mean:.2f}, "
        f"median {counts.queries_per_label_median:g}, max {counts.queries_per_label_max:,}; "
        f"{counts.words_per_label_mean:.1f} words"
    )
    return "\n".join(lines)


def _render_bands(bands: Mapping[str, BandCounts], width: int) -> str:
    """A histogram: a bar for the band's share of the labels, and its share of the pairs of each split in figures."""
    num_labels = max(sum(band.labels for band in bands.values()), 1)
    splits = list(next(iter(bands.values())).pairs)
    totals = {split: max(sum(band.pairs[split] for band in bands.values()), 1) for split in splits}
    bar_width = max(min(width - 46 - 14 * len(splits), 40), 8)
    header = f"{'band':<8}{'training queries':<18}{'labels':>9}  " + "".join(f"{f'{s} pairs':>14}" for s in splits)
    lines = [header + "  share of labels"]
    for name, band in bands.items():
        low, high = BANDS[name]
        limits = f"over {low - 1:,}" if high == np.inf else f"{low}" if low == high else f"{low}-{high}"
        shares = "".join(f"{band.pairs[split] / totals[split]:>14.1%}" for split in splits)
        lines.append(
            f"{name:<8}{limits:<18}{band.labels:>9,}  {shares}  {'█' * round(bar_width * band.labels / num_labels)}"
        )
    return "\n".join(lines)


def _render_problems(problems: Sequence[Problem], width: int) -> str:
    if not problems:
        return "No problems found."
    lines = ["Problems"]
    for problem in problems:
        share = f"{problem.total / max(problem.out_of, 1):.1%}"
        start = f"{problem.total:>9,} {share:>6}  "
        text = f"{problem.kind}: {problem.message}"
        indent = " " * len(start)
        lines += textwrap.wrap(text, width=max(width, 60), initial_indent=start, subsequent_indent=indent)
        lines += [f"{indent}{example}" for example in problem.examples]
        if problem.total > len(problem.examples):
            lines.append(f"{indent}... and {problem.total - len(problem.examples):,} more")
    return "\n".join(lines)

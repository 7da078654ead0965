"""`dexter data check`: sizes, label frequencies and findings of a data set, as one report."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dexter.data.benchmarks import describe_benchmark
from dexter.data.dataset import Dataset, Split
from dexter.data.findings import Finding, find
from dexter.data.own_labels import OwnLabels, find_own_labels
from dexter.types import BANDS

_WIDTH = 100
"""Characters of a line of the report."""
_BRAILLE = 0x2800
_BRAILLE_DOTS = np.array([[0x01, 0x08], [0x02, 0x10], [0x04, 0x20], [0x40, 0x80]])
"""Bit of each dot of a braille character, 4 rows x 2 columns."""


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
class DatasetCounts:
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
    """Labels and pairs of one frequency band."""

    labels: int
    pairs: Mapping[str, int]
    """Relevant pairs with a label of this band, by split."""


@dataclass(frozen=True, kw_only=True)
class CheckReport:
    """The result of `check`."""

    name: str
    source: Mapping[str, str]
    counts: DatasetCounts
    bands: Mapping[str, BandCounts]
    findings: Sequence[Finding]
    label_counts: np.ndarray
    """Number of training queries of each label, for a Zipf plot."""
    own_labels: OwnLabels
    """How many training queries have a label of their own, and what training does with it by default."""
    published: str | None = None
    """Which published data set it is, or what differs from one whose name or counts nearly match."""

    def to_json(self) -> dict[str, Any]:
        """Return everything but the per-label counts as plain values."""
        return {
            "name": self.name,
            "source": dict(self.source),
            "published": self.published,
            "own_labels": self.own_labels.to_json(),
            "counts": asdict(self.counts),
            "bands": {name: asdict(band) for name, band in self.bands.items()},
            "findings": [asdict(finding) for finding in self.findings],
        }

    def render(self) -> str:
        """Format the report as text."""
        title = f"{self.name} (read as {self.source['format']})" if "format" in self.source else self.name
        published = "" if self.published is None else "\n".join(["", *textwrap.wrap(self.published, _WIDTH)])
        own = "\n".join(textwrap.wrap(self.own_labels.describe(), _WIDTH))
        parts = [
            title + published,
            _render_counts(self.counts),
            _render_bands(self.bands),
            zipf_text(self.label_counts, width=_WIDTH),
            *([own] if own else []),
            _render_findings(self.findings),
        ]
        return "\n\n".join(parts)


def check(dataset: Dataset, *, folder: str | Path | None = None) -> CheckReport:
    """Describe a data set and look for what makes results worse or misleading.

    Args:
        dataset: the data set.
        folder: where it was read from; findings then name file and line for formats with one line per row.
    """
    return CheckReport(
        name=dataset.name,
        source=dataset.source,
        counts=_count(dataset),
        bands=_count_bands(dataset),
        findings=tuple(find(dataset, folder=folder)),
        label_counts=dataset.label_counts,
        published=describe_benchmark(dataset),
        own_labels=find_own_labels(dataset, "auto"),
    )


def _count(dataset: Dataset) -> DatasetCounts:
    return DatasetCounts(
        labels=dataset.num_labels,
        queries_per_label_mean=_mean(dataset.label_counts),
        queries_per_label_median=float(np.median(dataset.label_counts)) if dataset.num_labels else 0.0,
        queries_per_label_max=int(dataset.label_counts.max(initial=0)),
        words_per_label_mean=_words(dataset.label_texts),
        splits={name: _count_split(split) for name, split in dataset.splits.items()},
    )


def _count_bands(dataset: Dataset) -> dict[str, BandCounts]:
    """Count labels and pairs of each frequency band; how often a label occurs in training decides its band."""
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
    """Return the mean number of words per text."""
    return sum(len(text.split()) for text in texts) / max(len(texts), 1)


def _render_counts(counts: DatasetCounts) -> str:
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


def _render_bands(bands: Mapping[str, BandCounts]) -> str:
    """Format a histogram: a bar for each band's share of the labels, and its share of each split's pairs in figures."""
    num_labels = max(sum(band.labels for band in bands.values()), 1)
    splits = list(next(iter(bands.values())).pairs)
    totals = {split: max(sum(band.pairs[split] for band in bands.values()), 1) for split in splits}
    bar_width = max(min(_WIDTH - 48 - 14 * len(splits), 40), 8)
    header = f"{'band':<10}{'training queries':<18}{'labels':>9}  " + "".join(f"{f'{s} pairs':>14}" for s in splits)
    lines = [header + "  share of labels"]
    for name, band in bands.items():
        low, high = BANDS[name]
        limits = f"over {low - 1:,}" if high == np.inf else f"{low}" if low == high else f"{low}-{high}"
        shares = "".join(f"{band.pairs[split] / totals[split]:>14.1%}" for split in splits)
        lines.append(
            f"{name:<10}{limits:<18}{band.labels:>9,}  {shares}  {'█' * round(bar_width * band.labels / num_labels)}"
        )
    return "\n".join(lines)


def _render_findings(findings: Sequence[Finding]) -> str:
    if not findings:
        return "No problems found."
    lines = ["Problems"]
    for finding in findings:
        share = f"{finding.total / max(finding.out_of, 1):.1%}"
        start = f"{finding.total:>9,} {share:>6}  "
        text = f"{finding.kind}: {finding.message}"
        indent = " " * len(start)
        lines += textwrap.wrap(text, width=_WIDTH, initial_indent=start, subsequent_indent=indent)
        lines += [f"{indent}{example}" for example in finding.examples]
        if finding.total > len(finding.examples):
            lines.append(f"{indent}... and {finding.total - len(finding.examples):,} more")
    return "\n".join(lines)


def zipf_text(label_counts: np.ndarray, *, width: int, height: int = 10) -> str:
    """Draw how often each label occurs against its rank in braille characters, both axes logarithmic."""
    frequencies = np.sort(label_counts[label_counts > 0])[::-1]
    if not len(frequencies):
        return "(no label occurs in training)"
    largest, num_labels = int(frequencies[0]), len(frequencies)
    margin = len(f"{largest:,}") + 1
    num_columns = max(width - margin - 1, 10)
    canvas = _draw(frequencies, num_columns=num_columns, height=height)
    ticks = {_dot_row(tick, largest, height * 4) // 4: f"{tick:,}" for tick in _powers_of_ten(largest)}
    axis = ""
    for tick in _powers_of_ten(num_labels):  # one that does not fit is left out
        column = margin + 1 + int((num_columns - 1) * np.log(tick) / np.log(max(num_labels, 2)))
        if len(axis) < column and column + len(f"{tick:,}") <= margin + 1 + num_columns:
            axis = f"{axis:<{column}}{tick:,}"
    rows = [f"{ticks.get(row, ''):>{margin - 1}} ┤{canvas[row]}" for row in range(height)]
    return "\n".join(["training queries of each label, by rank", *rows, " " * margin + "└" + "─" * num_columns, axis])


def _draw(frequencies: np.ndarray, *, num_columns: int, height: int) -> list[str]:
    """Draw rows of braille characters; a steep step is a vertical line, so that the curve has no gaps."""
    num_dots_x, num_dots_y = num_columns * 2, height * 4
    ranks = len(frequencies) ** (np.arange(num_dots_x) / (num_dots_x - 1))
    rows = np.array([_dot_row(f, frequencies[0], num_dots_y) for f in frequencies[ranks.round().astype(int) - 1]])
    dots = np.zeros((num_dots_y, num_dots_x), dtype=bool)
    for column, (start, end) in enumerate(zip(np.r_[rows[0], rows[:-1]], rows, strict=True)):
        dots[min(start + 1, end) : end + 1, column] = True
    bits = (dots.reshape(height, 4, num_columns, 2) * _BRAILLE_DOTS[None, :, None, :]).sum(axis=(1, 3))
    return ["".join(chr(_BRAILLE + int(cell)) for cell in row) for row in bits]


def _dot_row(frequency: float, largest: float, num_rows: int) -> int:
    """Return the dot row of a frequency: the largest on top, 1 at the bottom, logarithmic between."""
    return round((num_rows - 1) * (1 - float(np.log(frequency) / np.log(max(largest, 2)))))


def _powers_of_ten(largest: float) -> list[int]:
    return [10**exponent for exponent in range(int(np.log10(max(largest, 1))) + 1)]

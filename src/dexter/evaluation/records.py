"""What an evaluation writes to disk: the result record, and a sample of the misses.

A result record is one JSON file with all that is needed to trust the figures and to repeat them. The misses are JSON
lines beside it: for every label a few test texts that have the label and did not get it.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import math
import os
import platform
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_matrix

from dexter.data import Dataset
from dexter.evaluation.report import Report, test_split
from dexter.files import open_regular, write_json, write_text

RECORD_VERSION = 2
MISSED_PLACES = 5
"""A label that is not among the first 5 predictions is missed."""
MISSED_TEXTS = 10_000
"""Number of test texts whose misses are collected."""
_MISSES_PER_LABEL = 5
_EXCERPT = 300
_PACKAGES = (
    "dexter-xmc",
    "numpy",
    "scipy",
    "torch",
    "transformers",
    "tokenizers",
    "scikit-learn",
    "faiss-cpu",
    "onnxruntime",
)


def make_record(
    report: Report,
    dataset: Dataset,
    *,
    model: Mapping[str, Any],
    search: Mapping[str, Any],
    scoring: Mapping[str, Any] | None = None,
    device: str | None = None,
    seconds: float | None = None,
) -> dict[str, Any]:
    """Return the result record of an evaluation on the test split; what is not known is null.

    Args:
        report: the figures.
        dataset: the data set whose test split was scored.
        model: what produced the scores: the model's hash, its encoder, head, seed, dtype and runtime.
        search: the number of places that were fetched, the index and its recall against exact search.
        scoring: what else the ranking depends on: votes of neighbours, frequency dial.
        device: where the model ran.
        seconds: how long the evaluation took.
    """
    scored = test_split(dataset)
    record = {
        "record_version": RECORD_VERSION,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "metrics": report.metrics,
        "num_queries": report.num_queries,
        "num_without_labels": report.num_without_labels,
        "num_short": report.num_short,
        "by_frequency": report.by_frequency,
        "band_sizes": report.band_sizes,
        "by_decile": report.by_decile,
        "decile_sizes": report.decile_sizes,
        "calibration_error": report.calibration,
        "hierarchy": report.hierarchy,
        "reliability": report.reliability,
        "own_labels": report.own_labels,
        "intervals": {name: asdict(interval) for name, interval in report.intervals.items()},
        "settings": report.settings,
        "data": {
            "name": dataset.name,
            "split": "test",
            "num_labels": dataset.num_labels,
            "num_train": len(dataset.train),
            "source": dict(dataset.source),
            "text_fields": dataset.text_fields,
            "relevance_sha256": pairs_sha256(scored.relevance),
            "train_relevance_sha256": pairs_sha256(dataset.train.relevance),
            "filter_sha256": None if scored.filtered is None else pairs_sha256(scored.filtered),
        },
        "model": model,
        "search": search,
        "scoring": scoring,
        "environment": describe_environment() | {"device": device},
        "command": sys.argv,
        "seconds": seconds,
        "peak_rss_bytes": peak_rss_bytes(),
    }
    return {key: json_values(value) for key, value in record.items()}


def write_record(path: str | Path, record: Mapping[str, Any]) -> None:
    """Write a record as JSON; a value that is not finite becomes null."""
    write_json(path, json_values(dict(record)))


@dataclass(frozen=True)
class Miss:
    """A text, a label that it has, and the labels that were predicted instead; labels by id."""

    label: str
    text: str
    """Its first 300 characters."""
    got: Sequence[str]


def find_misses(
    top_ids_NK: NDArray[np.int64], texts: Sequence[str], relevance: csr_matrix, label_ids: Sequence[str]
) -> Iterator[Miss]:
    """Yield the first few misses of each label, in the order of the texts.

    Args:
        top_ids_NK: the first predictions of each text, as columns of `relevance`; -1 for none.
        texts: one per row.
        relevance: texts x labels.
        label_ids: the labels' ids, by column.
    """
    seen: Counter[int] = Counter()
    for row, (text, top_ids) in enumerate(zip(texts, top_ids_NK, strict=True)):
        start, end = relevance.indptr[row : row + 2]
        relevant = relevance.indices[start:end][relevance.data[start:end] != 0]
        for label in np.setdiff1d(relevant, top_ids).tolist():
            seen[label] += 1
            if seen[label] <= _MISSES_PER_LABEL:
                yield Miss(label_ids[label], text[:_EXCERPT], [label_ids[place] for place in top_ids if place >= 0])


def write_misses(path: Path, misses: Iterable[Miss]) -> None:
    """Write one JSON object per line."""
    write_text(path, "".join(json.dumps(asdict(miss), ensure_ascii=False) + "\n" for miss in misses))


def read_misses(path: Path) -> Iterator[Miss]:
    """Yield what `write_misses` wrote; lines of another form are skipped, and what is no regular file."""
    try:
        opened = open_regular(path)
    except OSError:
        return
    with opened as file:
        for line in file:
            try:
                fields = json.loads(line)
                yield Miss(str(fields["label"]), str(fields["text"]), [str(label) for label in fields["got"]])
            except (ValueError, KeyError, TypeError, RecursionError):
                continue


def pairs_sha256(pairs: csr_matrix) -> str:
    """Hash which pairs a sparse matrix stores, whatever its values and integer types."""
    digest = hashlib.sha256(f"{pairs.shape[0]} {pairs.shape[1]}\n".encode())
    canonical = pairs if pairs.has_canonical_format else pairs.copy()
    canonical.sum_duplicates()
    for array in (canonical.indptr, canonical.indices):
        digest.update(np.ascontiguousarray(array, dtype="<i8").tobytes())
    return digest.hexdigest()


def describe_environment() -> dict[str, Any]:
    """Return versions, machine and the commit of the source, as far as they are known."""
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu_count": os.cpu_count(),
        "threads": os.environ.get("OMP_NUM_THREADS"),
        "packages": {name: _version(name) for name in _PACKAGES},
        "git_commit": git_commit(),
    }


def git_commit() -> str | None:
    """Return the commit that this source file is checked out at, or None where it is installed or git is absent."""
    source = Path(__file__).resolve()
    # The file has to be tracked: an environment may lie inside somebody else's repository.
    if _git(source.parent, "ls-files", "--error-unmatch", source.name) is None:
        return None
    return _git(source.parent, "rev-parse", "HEAD")


def peak_rss_bytes() -> int | None:
    """Return the peak resident memory of this process, or None where the system does not report it."""
    try:
        import resource
    except ImportError:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(peak) if sys.platform == "darwin" else int(peak) * 1024


def _git(folder: Path, *arguments: str) -> str | None:
    """Return the output of a git command, or None when it fails."""
    try:
        done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


def _version(package: str) -> str | None:
    """Return the installed version of a package, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def json_values(value: Any) -> Any:
    """Return a nested value with plain numbers, and None in place of NaN and infinity, which JSON does not have."""
    if isinstance(value, Mapping):
        return {str(key): json_values(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_values(item) for item in value]
    if isinstance(value, np.generic):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value

"""Result records: one JSON file per evaluation with all that is needed to trust the figures and to repeat them."""

from __future__ import annotations

import hashlib
import importlib.metadata
import math
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from scipy.sparse import csr_matrix

from dexter.data import Dataset
from dexter.errors import UsageError
from dexter.evaluation.reports import Report
from dexter.files import write_json

RECORD_VERSION = 1
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
    split: str = "test",
    model_hash: str | None = None,
    encoder: str | None = None,
    head: str | None = None,
    k: int | None = None,
    index: str | None = None,
    index_recall: float | None = None,
    scoring: Mapping[str, Any] | None = None,
    seed: int | None = None,
    dtype: str | None = None,
    runtime: str | None = None,
    batch_size: int | None = None,
    max_length: int | None = None,
    device: str | None = None,
    wall_seconds: float | None = None,
    command: Sequence[str] | None = None,
) -> dict[str, Any]:
    """Gather a result record; what is not known stays null.

    Args:
        report: the figures.
        dataset: the data they were computed on.
        split: the split that was scored.
        model_hash: SHA-256 that identifies the model, such as that of its manifest.
        encoder: the pretrained encoder and its revision.
        head: what produced the scores, such as "de", "clf", "unified" or the name of a baseline.
        k: places that were fetched.
        index: the index type.
        index_recall: the index's measured recall against exact search.
        scoring: what else the ranking depends on: neighbours, dial.
        seed: of the training run.
        dtype: of the encoder's weights.
        runtime: what encoded the queries.
        batch_size: of encoding.
        max_length: tokens per text.
        device: where the model ran.
        wall_seconds: how long the evaluation took.
        command: the command line; the process's own when not given.
    """
    if split not in dataset.splits:
        raise UsageError(f"data set {dataset.name!r} has no split {split!r}: it has {', '.join(dataset.splits)}")
    scored = dataset.splits[split]
    record = {
        "record_version": RECORD_VERSION,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "metrics": report.metrics,
        "num_queries": report.num_queries,
        "num_without_labels": report.num_without_labels,
        "num_short": report.num_short,
        "by_frequency": report.by_frequency,
        "band_sizes": report.band_sizes,
        "calibration_error": report.calibration,
        "intervals": {name: asdict(interval) for name, interval in report.intervals.items()},
        "settings": report.settings,
        "data": {
            "name": dataset.name,
            "split": split,
            "num_labels": dataset.num_labels,
            "num_train": len(dataset.train),
            "source": dict(dataset.source),
            "relevance_sha256": pairs_sha256(scored.relevance),
            "train_relevance_sha256": pairs_sha256(dataset.train.relevance),
            "filter_sha256": None if scored.filtered is None else pairs_sha256(scored.filtered),
        },
        "model": {
            "sha256": model_hash,
            "encoder": encoder,
            "head": head,
            "seed": seed,
            "dtype": dtype,
            "runtime": runtime,
            "batch_size": batch_size,
            "max_length": max_length,
        },
        "search": {"k": k, "index": index, "recall": index_recall},
        "scoring": None if scoring is None else dict(scoring),
        "environment": describe_environment() | {"device": device},
        "command": list(sys.argv if command is None else command),
        "wall_seconds": wall_seconds,
        "peak_rss_bytes": peak_rss_bytes(),
    }
    return {key: json_values(value) for key, value in record.items()}


def write_record(path: str | Path, record: Mapping[str, Any]) -> None:
    """Write a record as JSON; a value that is not finite becomes null."""
    write_json(path, json_values(dict(record)))


def pairs_sha256(pairs: csr_matrix) -> str:
    """A hash of which pairs a sparse matrix stores, whatever its values and integer types are."""
    digest = hashlib.sha256(f"{pairs.shape[0]} {pairs.shape[1]}\n".encode())
    canonical = pairs if pairs.has_canonical_format else pairs.copy()
    canonical.sum_duplicates()
    for array in (canonical.indptr, canonical.indices):
        digest.update(np.ascontiguousarray(array, dtype="<i8").tobytes())
    return digest.hexdigest()


def describe_environment() -> dict[str, Any]:
    """Versions, machine and the commit of the source, as far as they are known."""
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu_count": os.cpu_count(),
        "threads": os.environ.get("OMP_NUM_THREADS"),
        "packages": {name: _version(name) for name in _PACKAGES},
        "git_commit": git_commit(),
    }


def git_commit() -> str | None:
    """The commit this source file is checked out at, or None where it is installed or git is absent."""
    source = Path(__file__).resolve()
    # The file has to be tracked: an environment may lie inside somebody else's repository.
    if _git(source.parent, "ls-files", "--error-unmatch", source.name) is None:
        return None
    return _git(source.parent, "rev-parse", "HEAD")


def peak_rss_bytes() -> int | None:
    """The largest memory this process has held, or None where the system does not tell."""
    try:
        import resource
    except ImportError:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(peak) if sys.platform == "darwin" else int(peak) * 1024


def _git(folder: Path, *arguments: str) -> str | None:
    """The output of a git command, or None when it fails."""
    try:
        done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


def _version(package: str) -> str | None:
    """The installed version of a package, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def json_values(value: Any) -> Any:
    """The same nested value with plain numbers, and None in place of NaN and infinity, which JSON does not have."""
    if isinstance(value, Mapping):
        return {str(key): json_values(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_values(item) for item in value]
    if isinstance(value, np.generic):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value

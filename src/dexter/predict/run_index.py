"""The index of a run: built from the labels of its model, measured, stored as run/index/ beside run/model/, and opened.

Opening an index of another encoder is an error; one of another head is ignored, and search is exact.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dexter.index import (
    DatabaseAddress,
    ExactIndex,
    Index,
    Stamp,
    StoredIndex,
    build,
    default_backend,
    label_keys,
    open_index,
    save_index,
)
from dexter.index.base import checked_backend
from dexter.model.labels import Labels
from dexter.model.model import Model
from dexter.model.published import encoder_fingerprint, fingerprint, model_folder
from dexter.types import HeadName

log = logging.getLogger("dexter")
URL_VARIABLE = "DEXTER_INDEX_URL"
"""Environment variable with the address of a database; the address is never written to a file."""
_NUM_SAMPLED = 512
"""Texts that recall is measured on."""
_NUM_ROTATED = 2_048
"""Training queries that exact search of one text adapts to."""


@dataclass(frozen=True)
class IndexReport:
    """The index that `build_run_index` made."""

    folder: str
    backend: str
    chosen: bool
    """Whether the backend was chosen by the number of labels."""
    num_labels: int
    recall: float
    seconds: float
    num_bytes: int
    """Size of the folder."""


@dataclass(frozen=True)
class RunIndex:
    """The stored index of a run, which can be put over the labels of its model as they change."""

    stored: StoredIndex
    fingerprint: str
    """Fingerprint of the model's encoder."""

    def over(self, labels: Labels, vectors_LD: NDArray[np.float32], *, head: HeadName) -> Index:
        """Return the index over the given labels; an exact one where it was made for another head."""
        stored, made = self.stored, self.stored.stamp
        if self.fingerprint == made.fingerprint and (head, vectors_LD.shape[1]) != (made.head, stored.dimension):
            log.warning("%s is for head %s, not %s: search is exact", stored.folder, made.head, head)
            return ExactIndex(vectors_LD)
        return stored.over(vectors_LD, stamp=_stamp(labels, self.fingerprint, head))


def build_run_index(
    model: Model,
    folder: Path,
    *,
    head: HeadName,
    backend: str | None = None,
    queries: Sequence[str] | None = None,
    url: str | None = None,
) -> IndexReport:
    """Build the index of a run and store it beside the model.

    Args:
        model: gives the labels.
        folder: the published model.
        head: gives the label vectors.
        backend: one of `dexter.index.BACKENDS`; None: the number of labels decides.
        queries: texts to measure recall on; pairs of label texts if left out.
        url: the address of the database (pgvector, qdrant); that of the environment if left out.
    """
    started, num_labels = time.monotonic(), len(model.labels.ids)
    chosen = default_backend(num_labels) if backend is None else checked_backend(backend)
    if backend is None:
        log.info("index %s: the default for %s labels", chosen, f"{num_labels:,}")
    encoder_hash, database = encoder_fingerprint(folder), url or os.environ.get(URL_VARIABLE)
    address = None if database is None else DatabaseAddress(url=database, name=f"dexter_{encoder_hash}_{head}")
    sample = _sample_queries(model.labels) if not queries else list(queries[:_NUM_SAMPLED])
    index = build(
        chosen,
        model.label_vectors(head=head),
        queries_ND=None if chosen == "exact" else model.query_vectors(sample, head=head),
        address=address,
    )
    save_index(index, index_folder(folder), stamp=_stamp(model.labels, encoder_hash, head))
    return IndexReport(
        folder=str(index_folder(folder)),
        backend=chosen,
        chosen=backend is None,
        num_labels=num_labels,
        recall=1.0 if index.recall is None else index.recall,
        seconds=time.monotonic() - started,
        num_bytes=sum(path.stat().st_size for path in index_folder(folder).iterdir()),
    )


def open_run_index(folder: Path, *, url: str | None = None) -> RunIndex | None:
    """Open the index beside a published model; None where there is none."""
    if not index_folder(folder).exists():
        return None
    stored = open_index(index_folder(folder), url=url or os.environ.get(URL_VARIABLE))
    return RunIndex(stored, encoder_fingerprint(folder))


def index_labels(model: Model, *, head: HeadName, run_index: RunIndex | None, dial: float | None = None) -> Index:
    """Return an index over the labels of a model: the run's where it has one, else an exact one.

    The run's index serves every dial of a model with a learned prior; for others a dial above 0 makes other vectors.
    """
    vectors_LD = model.label_vectors(head=head, dial=dial)
    if run_index is None:
        return ExactIndex(vectors_LD, model.device, partial(_sample_vectors, model, head, dial))
    return run_index.over(model.labels, vectors_LD, head=head)


def _sample_vectors(model: Model, head: HeadName, dial: float | None) -> NDArray[np.float32] | None:
    """Return search vectors of some training queries; None where the model does not keep their vectors."""
    kept = model.training_queries
    if kept is None or kept.index is None:
        return None
    representations_ND = kept.index.vectors(np.arange(0, len(kept), max(1, len(kept) // _NUM_ROTATED)))
    return model.search_vectors(representations_ND, head=head, dial=dial)


def index_folder(folder: Path) -> Path:
    """Return the folder of a published model's index: run/index for run/model, NAME-index for any other NAME."""
    place = folder.resolve()
    return place.with_name("index" if place.name == "model" else f"{place.name}-index")


def published_version(run: Path) -> tuple[str, str | None]:
    """Return the fingerprints of a run's published model and of its index, if it has one."""
    model = model_folder(run)
    index = index_folder(model)
    return fingerprint(model), fingerprint(index) if index.is_dir() else None


def describe(report: IndexReport) -> str:
    """Describe the index in one line."""
    why = " (by their number)" if report.chosen else ""
    return (
        f"{report.folder}: {report.backend} over {report.num_labels:,} labels{why}, recall@100 {report.recall:.4f}, "
        f"made in {report.seconds:.1f} s, {report.num_bytes / 2**20:.1f} MB"
    )


def _stamp(labels: Labels, fingerprint: str, head: HeadName) -> Stamp:
    return Stamp(fingerprint=fingerprint, head=head, label_keys=label_keys(labels.ids, labels.texts))


def _sample_queries(labels: Labels) -> list[str]:
    """Make texts that lie between labels, as queries with several labels do, from two label texts each."""
    pairs: Any = np.random.default_rng(0).integers(0, len(labels.ids), (_NUM_SAMPLED, 2))
    return [f"{labels.texts[first]} {labels.texts[second]}" for first, second in pairs.tolist()]

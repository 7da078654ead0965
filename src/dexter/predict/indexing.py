"""The index of a run: made from a model's labels, measured, kept beside the model, and found again.

run/index/ belongs to run/model/. An index of another encoder is an error; one of another head is passed over.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

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
from dexter.model.store import encoder_fingerprint, fingerprint, model_folder
from dexter.types import HeadName

log = logging.getLogger("dexter")
URL_VARIABLE = "DEXTER_INDEX_URL"
"""Where the address of a database is looked for; it is never written to a file."""
_NUM_SAMPLED = 512


@dataclass(frozen=True)
class IndexReport:
    """What `build_run_index` made."""

    folder: str
    backend: str
    chosen: bool
    """Whether the number of labels chose the backend."""
    num_labels: int
    recall: float
    seconds: float
    num_bytes: int
    """Of the folder."""


@dataclass(frozen=True)
class RunIndex:
    """The index of a run, ready for the labels of its model, however they change."""

    stored: StoredIndex
    fingerprint: str
    """Of the model's encoder."""

    def over(self, labels: Labels, vectors_LD: Tensor, *, head: HeadName) -> Index:
        """The index over labels as they are now; exact where it was made for another head."""
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
    """Make the index of a run and keep it beside the model.

    Args:
        model: whose labels are indexed.
        folder: of the published model.
        head: which vectors are indexed.
        backend: one of `dexter.index.BACKENDS`; None: the number of labels decides.
        queries: texts that recall is measured on; pairs of label texts if left out.
        url: the address of the database (pgvector, qdrant); the environment's if left out.
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
    """The index beside a published model, where there is one."""
    if not index_folder(folder).exists():
        return None
    stored = open_index(index_folder(folder), url=url or os.environ.get(URL_VARIABLE))
    return RunIndex(stored, encoder_fingerprint(folder))


def index_labels(model: Model, *, head: HeadName, run_index: RunIndex | None, dial: float | None = None) -> Index:
    """An index over a model's labels as they are now: the run's where it has one, exact otherwise.

    The run's serves every dial of a model with a label prior; for others a dial above 0 makes other vectors.
    """
    vectors_LD = model.label_vectors(head=head, dial=dial)
    return ExactIndex(vectors_LD) if run_index is None else run_index.over(model.labels, vectors_LD, head=head)


def index_folder(folder: Path) -> Path:
    """Where the index of a published model is: run/index for run/model, NAME-index for a model folder on its own."""
    place = folder.resolve()
    return place.with_name("index" if place.name == "model" else f"{place.name}-index")


def published_version(run: Path) -> tuple[str, str | None]:
    """Return the fingerprints of a run's published model and of its index, if it has one."""
    model = model_folder(run)
    index = index_folder(model)
    return fingerprint(model), fingerprint(index) if index.is_dir() else None


def describe(report: IndexReport) -> str:
    """One line for a reader."""
    why = " (by their number)" if report.chosen else ""
    return (
        f"{report.folder}: {report.backend} over {report.num_labels:,} labels{why}, recall@100 {report.recall:.4f}, "
        f"made in {report.seconds:.1f} s, {report.num_bytes / 2**20:.1f} MB"
    )


def _stamp(labels: Labels, fingerprint: str, head: HeadName) -> Stamp:
    return Stamp(fingerprint=fingerprint, head=head, label_keys=label_keys(labels.ids, labels.texts))


def _sample_queries(labels: Labels) -> list[str]:
    """Texts that lie between labels, as queries with several labels do: two label texts each."""
    pairs: Any = np.random.default_rng(0).integers(0, len(labels.ids), (_NUM_SAMPLED, 2))
    return [f"{labels.texts[first]} {labels.texts[second]}" for first, second in pairs.tolist()]

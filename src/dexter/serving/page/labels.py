"""The page /labels: search, frequency bands and their metrics; one label with what resembles it and what missed it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from fastapi import APIRouter, Query
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from dexter.evaluation.records import Miss, read_misses
from dexter.files import read_regular
from dexter.predict import LabelEntry, Predictor, SimilarLabel
from dexter.serving.page.view import Renderer, as_number, page_router
from dexter.serving.problems import Problem
from dexter.serving.runs import ServedRun, ServedRuns
from dexter.serving.settings import ServeSettings
from dexter.types import BANDS

_PER_PAGE = 50
_NUM_SIMILAR = 8
_METRICS = ("P@1", "P@5", "PSP@5", "R@10", "nDCG@5")
_MAX_RECORDS, _MAX_RECORD_BYTES, _MAX_TITLE_PART = 100, 4 * 2**20, 100
_MAX_MISSES = 100


@dataclass(frozen=True)
class LabelDetail:
    """One label."""

    label: LabelEntry
    similar: Sequence[SimilarLabel]
    missed: Sequence[Miss]
    """Test texts that have the label and did not get it."""
    texts: Mapping[str, str]
    """Texts of the labels that the missed texts got instead, by id."""


@dataclass(frozen=True)
class BandTable:
    """The metrics of an evaluation: a row for all labels, and one for each band."""

    title: str
    metrics: Sequence[str]
    rows: Sequence[tuple[str, Mapping[str, float | None]]]


def labels_routes(runs: ServedRuns, render: Renderer) -> APIRouter:
    """Make the route GET /labels."""
    router = page_router(render)

    @router.get("/labels")
    async def labels(
        q: Annotated[str, Query(max_length=1_000)] = "",
        band: str = "",
        start: Annotated[int, Query(ge=0, le=2**31)] = 0,
        label: Annotated[str | None, Query(max_length=1_000)] = None,
        model: str | None = None,
    ) -> Response:
        """Show the labels that match, and one of them in detail."""
        run = runs.get(model)
        if not run.is_ready:
            return render.waiting(run)
        if band and band not in BANDS:
            raise Problem(422, "band", f"the bands are {', '.join(BANDS)}")
        _, (entries, sizes) = await run.read_labels(lambda predictor: _list_labels(predictor, q, band, start))
        detail = None if label is None else await _describe_label(run, label, runs.settings)
        tables = [] if run.folder is None else await run_in_threadpool(read_tables, run.folder)
        return render(
            "labels",
            model=run.name,
            q=q,
            band=band,
            start=start,
            per_page=_PER_PAGE,
            listing=entries,
            sizes=sizes,
            total=sizes[band] if band else sum(sizes.values()),
            detail=detail,
            tables=tables,
            ranges={name: _format_range(*ends) for name, ends in BANDS.items()},
        )

    return router


def _list_labels(predictor: Predictor, query: str, band: str, start: int) -> tuple[list[LabelEntry], dict[str, int]]:
    """Return a page of the labels that match the query and are in the band (in any if empty), and all bands' sizes."""
    labels = predictor.labels
    found = np.asarray(labels.find_rows(query), dtype=np.int64)
    counts = labels.counts[found]
    banded = {name: found[(counts >= least) & (counts <= most)] for name, (least, most) in BANDS.items()}
    wanted = banded[band] if band else found
    entries = [labels.entry(row) for row in wanted[start : start + _PER_PAGE].tolist()]
    return entries, {name: len(rows) for name, rows in banded.items()}


async def _describe_label(run: ServedRun, label_id: str, settings: ServeSettings) -> LabelDetail:
    def read(predictor: Predictor) -> tuple[LabelEntry, list[SimilarLabel]]:
        labels = predictor.labels
        if label_id not in labels.ids:
            raise Problem(404, "label", "no label has this id")
        [row] = labels.rows([label_id])
        near = predictor.similar_labels(labels.texts[row], _NUM_SIMILAR + 1) if len(labels.ids) > 1 else []
        similar = [label for label in near if label.id != label_id][:_NUM_SIMILAR]
        return labels.entry(row), similar

    _, (entry, similar) = await run.read_labels(read)
    missed: Sequence[Miss] = []
    if run.folder is not None and settings.training_texts:
        missed = await run_in_threadpool(read_missed_texts, run.folder, label_id)
    wanted, labels = {got for miss in missed for got in miss.got}, run.predictor.labels
    texts = {each: text for each, text in zip(labels.ids, labels.texts, strict=True) if each in wanted}
    return LabelDetail(entry, similar, missed, texts)


def read_tables(folder: Path) -> list[BandTable]:
    """Read the evaluations in a run folder, newest first; other files, and what is no number, are ignored."""
    found = sorted((folder / "results").glob("*.json"), key=_modified, reverse=True)[:_MAX_RECORDS]
    return [table for path in found if (table := _read_table(path)) is not None]


def _modified(path: Path) -> float:
    try:
        return path.lstat().st_mtime
    except OSError:
        return 0.0


def read_missed_texts(folder: Path, label_id: str) -> list[Miss]:
    """Read the test texts that have the label and did not get it, from all evaluations in a run folder."""
    files = sorted((folder / "results").glob("*.misses.jsonl"))[:_MAX_RECORDS]
    found = (miss for path in files for miss in read_misses(path) if miss.label == label_id)
    return list(islice(found, _MAX_MISSES))


def _read_table(path: Path) -> BandTable | None:
    try:
        record: Any = json.loads(read_regular(path, limit=_MAX_RECORD_BYTES))
        overall, by_band = dict(record["metrics"]), dict(record["by_frequency"])
        metrics = [name for name in _METRICS if name in overall]
        bands = [("all", overall), *((name, dict(by_band[name])) for name in BANDS if name in by_band)]
        rows = [(name, {metric: as_number(values.get(metric)) for metric in metrics}) for name, values in bands]
        title = (record["data"]["name"], record["data"]["split"], record.get("model", {}).get("head") or "?")
        return BandTable(", ".join(str(part)[:_MAX_TITLE_PART] for part in title), metrics, rows)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def _format_range(least: float, most: float) -> str:
    """Format the counts of a band, such as 10–100."""
    return f"{least:.0f}+" if math.isinf(most) else f"{least:.0f}–{most:.0f}" if least < most else f"{most:.0f}"

"""The page /labels: search, frequency bands and their figures; one label with its neighbours and what missed it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from fastapi import APIRouter, Query
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from dexter.evaluation.misses import Miss
from dexter.model.labels import LabelEntry, Labels, find_rows
from dexter.model.similar import SimilarLabel
from dexter.predict.predictor import Predictor
from dexter.serving.page.rendering import Renderer
from dexter.serving.page.results import missed_texts, read_tables
from dexter.serving.page.telling import page_router
from dexter.serving.problems import Problem
from dexter.serving.runs import Run
from dexter.serving.service import Service
from dexter.types import BANDS

_PER_PAGE = 50
_SIMILAR = 8


@dataclass(frozen=True)
class Listing:
    """A page of the labels that were looked for."""

    labels: Sequence[LabelEntry]
    total: int
    sizes: Mapping[str, int]
    """How many of those found are in each band."""


@dataclass(frozen=True)
class Detail:
    """One label."""

    label: LabelEntry
    similar: Sequence[SimilarLabel]
    missed: Sequence[Miss]
    names: Mapping[str, str]
    """Texts of the labels that the missed texts got, by id."""


def exploring_routes(service: Service, render: Renderer) -> APIRouter:
    """GET /labels."""
    router = page_router(render)

    @router.get("/labels")
    async def labels(
        q: Annotated[str, Query(max_length=1_000)] = "",
        band: str = "",
        start: Annotated[int, Query(ge=0, le=2**31)] = 0,
        label: Annotated[str | None, Query(max_length=1_000)] = None,
        model: str | None = None,
    ) -> Response:
        """Labels that match, and all about one of them."""
        run = service.run(model)
        if not run.is_ready:
            return render.waiting(run)
        if band and band not in BANDS:
            raise Problem(422, "band", f"the bands are {', '.join(BANDS)}")
        _, listing = await run.look(lambda predictor: list_labels(predictor.labels, q, band, start))
        detail = None if label is None else await _detail(run, label)
        tables = [] if run.folder is None else await run_in_threadpool(read_tables, run.folder)
        return render(
            "labels",
            model=run.name,
            q=q,
            band=band,
            start=start,
            per_page=_PER_PAGE,
            listing=listing,
            detail=detail,
            tables=tables,
            ranges={name: _range(*ends) for name, ends in BANDS.items()},
        )

    return router


def list_labels(labels: Labels, query: str, band: str, start: int) -> Listing:
    """A page of the labels that hold the query and are in the band (in any, if empty)."""
    found = np.asarray(find_rows(labels, query), dtype=np.int64)
    counts = np.asarray(labels.counts)[found]
    banded = {name: found[(counts >= least) & (counts <= most)] for name, (least, most) in BANDS.items()}
    wanted = banded[band] if band else found
    shown = [
        LabelEntry(labels.ids[row], labels.texts[row], int(labels.counts[row]))
        for row in wanted[start : start + _PER_PAGE].tolist()
    ]
    return Listing(shown, len(wanted), {name: len(rows) for name, rows in banded.items()})


async def _detail(run: Run, label_id: str) -> Detail:
    _, (entry, similar) = await run.look(lambda predictor: _about(predictor, label_id))
    missed = [] if run.folder is None else await run_in_threadpool(missed_texts, run.folder, label_id)
    wanted = {got for miss in missed for got in miss.got}
    return Detail(entry, similar, missed, _names(run.predictor.labels, wanted))


def _about(predictor: Predictor, label_id: str) -> tuple[LabelEntry, list[SimilarLabel]]:
    labels = predictor.labels
    row = next((row for row, each in enumerate(labels.ids) if each == label_id), None)
    if row is None:
        raise Problem(404, "label", "no label has this id")
    text = labels.texts[row]
    near = predictor.similar_labels(text, _SIMILAR + 1) if len(labels.ids) > 1 else []
    similar = [label for label in near if label.id != label_id][:_SIMILAR]
    return LabelEntry(label_id, text, int(labels.counts[row])), similar


def _range(least: float, most: float) -> str:
    """The counts of a band, in words."""
    return f"{least:.0f}+" if math.isinf(most) else f"{least:.0f}–{most:.0f}" if least < most else f"{most:.0f}"


def _names(labels: Labels, wanted: set[str]) -> dict[str, str]:
    return {label_id: text for label_id, text in zip(labels.ids, labels.texts, strict=True) if label_id in wanted}

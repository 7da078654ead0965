"""The page /map."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from dexter.model.labels import find_rows
from dexter.serving.page.label_map import LabelMap, map_labels
from dexter.serving.page.rendering import Renderer
from dexter.serving.page.telling import page_router
from dexter.serving.runs import Seen
from dexter.serving.service import Service

_MOST_FOUND = 200


def mapping_routes(service: Service, render: Renderer) -> APIRouter:
    """GET /map."""
    router = page_router(render)
    known: dict[str, tuple[str | None, Seen[LabelMap]]] = {}

    @router.get("/map")
    async def label_map(q: Annotated[str, Query(max_length=1_000)] = "", model: str | None = None) -> Response:
        """The labels as points; laid out once for each version of the labels. Those that are looked for are drawn."""
        run = service.run(model)
        if not run.is_ready:
            return render.waiting(run)
        fingerprint, seen = known.get(run.name, (None, None))
        current = run.predictor
        if seen is None or (fingerprint, seen.version) != (current.fingerprint, current.version):
            seen = await run.look(lambda predictor: map_labels(predictor.model))
            known[run.name] = current.fingerprint, seen
        laid_out = seen.answer
        found = (await run_in_threadpool(find_rows, laid_out.labels, q))[:_MOST_FOUND] if q.strip() else []
        return render("map", model=run.name, map=laid_out, points=laid_out.points(found), found=found, q=q)

    return router

"""The page /map."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import Response

from dexter.serving.page.label_map import LabelMap, map_labels
from dexter.serving.page.rendering import Renderer
from dexter.serving.runs import Seen
from dexter.serving.service import Service


def mapping_routes(service: Service, render: Renderer) -> APIRouter:
    """GET /map."""
    router = APIRouter(include_in_schema=False)
    known: dict[str, tuple[str | None, Seen[LabelMap]]] = {}

    @router.get("/map")
    async def label_map(model: str | None = None) -> Response:
        """The labels as points; laid out once for each version of the labels."""
        run = service.run(model)
        if not run.is_ready:
            return render.waiting(run)
        fingerprint, seen = known.get(run.name, (None, None))
        current = run.predictor
        if seen is None or (fingerprint, seen.version) != (current.fingerprint, current.version):
            seen = await run.look(lambda predictor: map_labels(predictor.model))
            known[run.name] = current.fingerprint, seen
        return render("map", model=run.name, map=seen.answer)

    return router

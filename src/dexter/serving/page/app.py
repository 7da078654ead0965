"""The routes of all pages, and the files they need."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import Response
from starlette.staticfiles import StaticFiles

from dexter.serving.page.annotate import annotate_routes
from dexter.serving.page.label_map import map_routes
from dexter.serving.page.labels import labels_routes
from dexter.serving.page.predict import predict_page_routes
from dexter.serving.page.training import training_routes
from dexter.serving.page.view import HERE, Renderer, page_router
from dexter.serving.runs import ServedRuns


def page_routes(runs: ServedRuns) -> APIRouter:
    """Make the routes of the page."""
    router = APIRouter(include_in_schema=False)
    render = Renderer(runs)
    for routes in (predict_page_routes, labels_routes, map_routes, training_routes, _batch_routes, annotate_routes):
        router.include_router(routes(runs, render))
    router.mount("/static", StaticFiles(directory=HERE / "static"), name="static")
    return router


def _batch_routes(runs: ServedRuns, render: Renderer) -> APIRouter:
    """Make the route GET /batch. The browser reads the file and posts its texts to /v1/predict."""
    router = page_router(render)

    @router.get("/batch")
    async def batch(model: str | None = None) -> Response:
        """Show a form for a file; its script does the rest."""
        return render("batch", model=runs.get(model).name, limits=runs.settings)

    return router

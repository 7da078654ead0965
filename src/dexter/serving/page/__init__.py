"""The page: what a person sees. Server-rendered; the content security policy allows our own files only.

rendering.py   templates
telling.py     problems, as pages
trying.py      / : labels of a text, why, heads side by side, a new label; asked.py reads its form
shown, why, comparing, proposing, sharing, examples: the parts of it that know no HTTP
exploring.py   /labels, with results.py: what evaluations have left in a run folder
training.py    /training, with curves.py
mapping.py     /map, with label_map.py
batch.py       /batch
templates/, static/   HTML; one style sheet, small modules without a build step
"""

from __future__ import annotations

from fastapi import APIRouter
from starlette.staticfiles import StaticFiles

from dexter.serving.page.batch import batch_routes
from dexter.serving.page.exploring import exploring_routes
from dexter.serving.page.mapping import mapping_routes
from dexter.serving.page.rendering import HERE, Renderer
from dexter.serving.page.training import training_routes
from dexter.serving.page.trying import trying_routes
from dexter.serving.service import Service


def page_routes(service: Service) -> APIRouter:
    """Everything for people, and the files it needs."""
    router = APIRouter(include_in_schema=False)
    render = Renderer(service)
    for routes in (trying_routes, exploring_routes, mapping_routes, training_routes, batch_routes):
        router.include_router(routes(service, render))
    router.mount("/static", StaticFiles(directory=HERE / "static"), name="static")
    return router

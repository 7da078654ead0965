"""The page: what a person sees at `/`. Server-rendered; the content security policy allows our own files only."""

from __future__ import annotations

from pathlib import Path

from fastapi import APIRouter
from jinja2 import Environment, FileSystemLoader, select_autoescape
from starlette.responses import HTMLResponse, Response
from starlette.staticfiles import StaticFiles

from dexter.serving.predicting import answer
from dexter.serving.protocol import PredictRequest
from dexter.serving.service import Service

_HERE = Path(__file__).parent


def page_routes(service: Service) -> APIRouter:
    """GET / and the files it needs."""
    router = APIRouter(include_in_schema=False)
    templates = Environment(loader=FileSystemLoader(_HERE / "templates"), autoescape=select_autoescape(["html"]))
    template = templates.get_template("index.html")

    @router.get("/")
    async def index(text: str = "", model: str | None = None) -> Response:
        """A form, and the labels of the text in it."""
        found = await answer(service, PredictRequest(inputs=text, k=10, model=model)) if text.strip() else None
        names = [run.name for run in service.runs]
        return HTMLResponse(template.render(text=text, found=found, names=names, model=model))

    router.mount("/static", StaticFiles(directory=_HERE / "static"), name="static")
    return router

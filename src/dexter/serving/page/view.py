"""Templates and their filters. Everything is escaped, and no page has inline scripts or styles."""

from __future__ import annotations

import re
from collections.abc import Callable, Coroutine
from http import HTTPStatus
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape
from starlette.responses import HTMLResponse, Response

from dexter import __version__
from dexter.serving.problems import Problem
from dexter.serving.runs import ServedRun, ServedRuns
from dexter.types import BANDS, band_of

_MAX_SHOWN_NUMBER = 1e15
HERE = Path(__file__).parent
_LONG_WORD = re.compile(r"\S{18}")
_BREAKS = re.compile(r"(?<=\w[._/:-])(?=\w)")
_PAGES = [
    ("predict", "./", "Try it"),
    ("labels", "labels", "Labels"),
    ("map", "map", "Map"),
    ("training", "training", "Training"),
    ("batch", "batch", "Batch"),
    ("annotate", "annotate", "Annotate"),
]
"""Template, address and title of each page."""
_Handler = Callable[[Request], Coroutine[Any, Any, Response]]


class Renderer:
    """Renders the templates of the page."""

    def __init__(self, runs: ServedRuns) -> None:
        self._runs = runs
        self._templates = Environment(
            loader=FileSystemLoader(HERE / "templates"),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        self._templates.filters.update(
            breakable=breakable, duration=duration, excerpt=excerpt, figure=figure, move=move, percent=percent
        )
        self._templates.globals.update(pages=_PAGES, bands=list(BANDS), band_of=band_of, app_version=__version__)

    def __call__(self, name: str, *, status: int = 200, model: str | None = None, **values: Any) -> HTMLResponse:
        """Render a template; `model` is the name of the run that the page is about."""
        names = [run.name for run in self._runs]
        page = self._templates.get_template(f"{name}.html")
        return HTMLResponse(page.render(page=name, names=names, model=model or names[0], **values), status)

    def waiting(self, run: ServedRun) -> HTMLResponse:
        """Render what is shown in place of a page while its run has no model."""
        return self("waiting", status=503, model=run.name)


def page_router(render: Renderer) -> APIRouter:
    """Make a router whose problems are shown as pages; those of the API are JSON."""

    class PageRoute(APIRoute):
        def get_route_handler(self) -> _Handler:
            handle = super().get_route_handler()

            async def handle_as_page(request: Request) -> Response:
                try:
                    return await handle(request)
                except Problem as error:
                    problem = error
                except RequestValidationError:
                    problem = Problem(422, "address", "this address has a part that cannot be read")
                title = HTTPStatus(problem.status).phrase
                page = render("problem", status=problem.status, title=title, detail=problem.detail)
                page.headers.update(problem.headers)
                return page

            return handle_as_page

    return APIRouter(include_in_schema=False, route_class=PageRoute)


def as_number(value: object) -> float | None:
    """Return a value of a file that anyone may have written, if it is a finite number that can be shown."""
    if not isinstance(value, int | float) or abs(value) > _MAX_SHOWN_NUMBER or value != value:
        return None
    return float(value)


def excerpt(text: str, length: int) -> str:
    """Return the beginning of a text on one line."""
    flat = " ".join(text[: 4 * length].split())
    return flat if len(flat) <= length else flat[: length - 1].rstrip() + "…"


def breakable(text: str) -> Markup:
    """Let long words, such as dotted names, break after their punctuation."""
    return Markup("<wbr>").join(_BREAKS.split(text)) if _LONG_WORD.search(text) else escape(text)


def figure(value: float | None) -> str:
    """Format a number of any size in a few characters."""
    if value is None or value != value:
        return "–"
    return f"{value:,.0f}" if abs(value) >= 1_000 else f"{value:.3g}"


def duration(seconds: float) -> str:
    """Format a time span in its two largest units."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"


def percent(share: float) -> str:
    """Format a share as an attribute value, clipped to 0 to 100%."""
    return f"{100 * min(max(share, 0.0), 1.0):.1f}%"


def move(places: int | None) -> str:
    """Say in words how far a label has moved, for screen readers."""
    if places is None:
        return "new here"
    if not places:
        return "same rank"
    return f"{'up' if places > 0 else 'down'} {abs(places)}"

"""Templates: how the pages are filled in. Everything is escaped; a page has no inline script or style."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape
from starlette.responses import HTMLResponse

from dexter import __version__
from dexter.serving.runs import Run
from dexter.serving.service import Service
from dexter.types import BANDS, band_of

HERE = Path(__file__).parent
_EXCERPT = 240
_LONG_WORD = re.compile(r"\S{18}")
_BREAKS = re.compile(r"(?<=\w[._/:-])(?=\w)")
PAGES = [
    ("try", "./", "Try it"),
    ("labels", "labels", "Labels"),
    ("map", "map", "Map"),
    ("training", "training", "Training"),
    ("batch", "batch", "Batch"),
]
"""Template, address and title of each page."""


class Renderer:
    """Fills in the templates of the page."""

    def __init__(self, service: Service) -> None:
        self._service = service
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
        self._templates.globals.update(pages=PAGES, bands=list(BANDS), band_of=band_of, app_version=__version__)

    def __call__(self, name: str, *, status: int = 200, model: str | None = None, **values: Any) -> HTMLResponse:
        """A page; `model` is the run it is about."""
        names = [run.name for run in self._service.runs]
        page = self._templates.get_template(f"{name}.html")
        return HTMLResponse(page.render(page=name, names=names, model=model or names[0], **values), status)

    def waiting(self, run: Run) -> HTMLResponse:
        """What is shown in place of a page that needs a model, while there is none."""
        return self("waiting", status=503, model=run.name)


def excerpt(text: str, length: int = _EXCERPT) -> str:
    """The beginning of a text on one line."""
    flat = " ".join(text[: 4 * length].split())
    return flat if len(flat) <= length else flat[: length - 1].rstrip() + "…"


def breakable(text: str) -> Markup:
    """A text whose long words, such as dotted names, may break after their punctuation."""
    return Markup("<wbr>").join(_BREAKS.split(text)) if _LONG_WORD.search(text) else escape(text)


def figure(value: float | None) -> str:
    """A number of any size, short."""
    if value is None or value != value:
        return "–"
    return f"{value:,.0f}" if abs(value) >= 1_000 else f"{value:.3g}"


def duration(seconds: float) -> str:
    """A time span in its two largest units."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"


def percent(share: float) -> str:
    """A share from 0 to 1 as an attribute value; also what lies outside stays inside a bar."""
    return f"{100 * min(max(share, 0.0), 1.0):.1f}%"


def move(places: int | None) -> str:
    """How far a label has moved, in words that are read aloud."""
    if places is None:
        return "new here"
    if not places:
        return "same rank"
    return f"{'up' if places > 0 else 'down'} {abs(places)}"

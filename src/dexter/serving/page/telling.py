"""What a person sees in place of a page that cannot be shown: the problem in words, and a way back."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from http import HTTPStatus
from typing import Any

from fastapi import APIRouter, Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.responses import Response

from dexter.serving.page.rendering import Renderer
from dexter.serving.problems import Problem

_Handler = Callable[[Request], Coroutine[Any, Any, Response]]


def page_router(render: Renderer) -> APIRouter:
    """A router for pages: their problems are pages too, while those of the API are JSON."""

    class PageRoute(APIRoute):
        def get_route_handler(self) -> _Handler:
            handle = super().get_route_handler()

            async def handle_or_tell(request: Request) -> Response:
                try:
                    return await handle(request)
                except Problem as problem:
                    return _tell(render, problem)
                except RequestValidationError:
                    return _tell(render, Problem(422, "address", "this address has a part that cannot be read"))

            return handle_or_tell

    return APIRouter(include_in_schema=False, route_class=PageRoute)


def _tell(render: Renderer, problem: Problem) -> Response:
    title = HTTPStatus(problem.status).phrase
    page = render("problem", status=problem.status, title=title, detail=problem.detail)
    page.headers.update(problem.headers)
    return page

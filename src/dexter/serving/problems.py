"""Errors as application/problem+json (RFC 9457): what is wrong and what to do, and never a word of the input."""

from __future__ import annotations

import json
import logging
import traceback
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dexter.errors import DexterError

log = logging.getLogger("dexter")
MEDIA_TYPE = "application/problem+json"
_MAX_ERRORS = 10


class Problem(Exception):
    """An answer other than the one asked for. `detail` must not quote the request."""

    def __init__(
        self, status: int, code: str, detail: str, *, headers: Mapping[str, str] | None = None, **more: Any
    ) -> None:
        super().__init__(detail)
        self.status, self.code, self.detail = status, code, detail
        self.headers = dict(headers or {})
        self.more = more

    def response(self, scope: Scope) -> Response:
        """The problem as it is sent."""
        content = {
            "type": "about:blank",
            "title": HTTPStatus(self.status).phrase,
            "status": self.status,
            "code": self.code,
            "detail": self.detail,
            "request_id": scope.get("state", {}).get("request_id"),
            **self.more,
        }
        body = json.dumps(content, ensure_ascii=False).encode()
        return Response(body, self.status, headers=self.headers, media_type=MEDIA_TYPE)


def busy(what: str) -> Problem:
    """429: come back in a second."""
    return Problem(429, "busy", f"{what}: try again in a second", headers={"Retry-After": "1"})


def install(app: FastAPI) -> None:
    """Answer every error of the application with a problem."""
    app.add_exception_handler(Problem, _on_problem)
    app.add_exception_handler(RequestValidationError, _on_invalid)
    app.add_exception_handler(HTTPException, _on_http)
    app.add_exception_handler(DexterError, _on_refused)


async def _on_problem(request: Request, error: Exception) -> Response:
    assert isinstance(error, Problem)
    return error.response(request.scope)


async def _on_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    status = HTTPStatus(error.status_code)
    details = {404: "there is nothing at this path", 405: "this path does not take this method"}
    headers = {**(error.headers or {}), **({"Connection": "close"} if status == 413 else {})}
    detail = details.get(status, f"{status.phrase.lower()}: see /openapi.json for what is expected")
    code = status.name.lower()
    return Problem(status, code, detail, headers=headers).response(request.scope)


async def _on_refused(request: Request, error: Exception) -> Response:
    """A refusal of the library that no endpoint foresaw: its message may quote the input, so it is not sent."""
    log.warning("%s: the library refused a request: %s", request.state.request_id, type(error).__name__)
    return Problem(422, "refused", "the model refused this request").response(request.scope)


async def _on_invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    found = error.errors()
    if any(entry["type"] == "json_invalid" for entry in found):
        return Problem(400, "not_json", "the body is not JSON").response(request.scope)
    errors = [{"at": _place(entry), "message": str(entry["msg"])} for entry in found[:_MAX_ERRORS]]
    detail = "; ".join(f"{entry['at']}: {entry['message']}" for entry in errors[:3])
    return Problem(422, "invalid", detail, errors=errors).response(request.scope)


def _place(entry: Mapping[str, Any]) -> str:
    """Where in the request; the name of an unknown field is the sender's own word and left out."""
    places = [str(place) for place in entry["loc"]]
    if entry["type"] == "extra_forbidden":
        places = [*places[:-1], "(unknown field)"]
    return ".".join(places)


class BugMiddleware:
    """Answers an error that nobody foresaw with 500, and logs where it happened but not what was sent."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        started = False

        async def watched_send(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self.app(scope, receive, watched_send)
        except Exception as error:
            request_id = scope.get("state", {}).get("request_id")
            places = traceback.extract_tb(error.__traceback__)[-1:]
            log.error("%s: %s at %s", request_id, type(error).__name__, [f"{p.filename}:{p.lineno}" for p in places])
            if started or scope["type"] != "http":
                raise
            problem = Problem(500, "bug", "an error in the service: its log has more under the request id")
            await problem.response(scope)(scope, receive, send)

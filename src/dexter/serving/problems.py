"""Errors as application/problem+json (RFC 9457). No error repeats anything of the request."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import Scope

from dexter.errors import DexterError
from dexter.serving.protocol import ProblemDetails

log = logging.getLogger("dexter")
_MEDIA_TYPE = "application/problem+json"
_MAX_ERRORS = 10
RESPONSES: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": ProblemDetails, "description": "The request is refused; `detail` says why."},
    "5XX": {"model": ProblemDetails, "description": "No answer now; `Retry-After` says when to try again."},
}
"""OpenAPI responses that every route may give besides its own."""


class Problem(Exception):
    """An error that is answered as problem details. `detail` must not quote the request."""

    def __init__(
        self,
        status: int,
        code: str,
        detail: str,
        *,
        headers: Mapping[str, str] | None = None,
        errors: Sequence[Mapping[str, str]] = (),
    ) -> None:
        super().__init__(detail)
        self.status, self.code, self.detail = status, code, detail
        self.headers = dict(headers or {})
        self.errors = errors

    def response(self, scope: Scope) -> Response:
        """Return the problem as a response to the request of the scope."""
        content = {
            "type": "about:blank",
            "title": HTTPStatus(self.status).phrase,
            "status": self.status,
            "code": self.code,
            "detail": self.detail,
            "request_id": scope.get("state", {}).get("request_id"),
            **({"errors": self.errors} if self.errors else {}),
        }
        body = json.dumps(content, ensure_ascii=False).encode()
        return Response(body, self.status, headers=self.headers, media_type=_MEDIA_TYPE)


class Busy(Problem):
    """The service has too much to do: 429, try again in a second."""

    def __init__(self, reason: str) -> None:
        super().__init__(429, "busy", f"{reason}: try again in a second", headers={"Retry-After": "1"})


def install_problems(app: FastAPI) -> None:
    """Answer every error of the application with a problem, and describe problems in its OpenAPI schema."""
    app.add_exception_handler(Problem, _on_problem)
    app.add_exception_handler(RequestValidationError, _on_invalid_request)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(DexterError, _on_library_error)
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        """Generate the schema; FastAPI would give problems the media type application/json."""
        if app.openapi_schema is None:
            for path in generate()["paths"].values():
                for operation in path.values():
                    for status in RESPONSES:
                        content = operation["responses"][status]["content"]
                        content[_MEDIA_TYPE] = content.pop("application/json")
        return generate()

    app.openapi = openapi  # type: ignore[method-assign]


async def _on_problem(request: Request, error: Exception) -> Response:
    assert isinstance(error, Problem)
    return error.response(request.scope)


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    status = HTTPStatus(error.status_code)
    details = {404: "there is nothing at this path", 405: "this path does not take this method"}
    headers = {**(error.headers or {}), **({"Connection": "close"} if status == 413 else {})}
    detail = details.get(status, f"{status.phrase.lower()}: see /openapi.json for what is expected")
    return Problem(status, status.name.lower(), detail, headers=headers).response(request.scope)


async def _on_library_error(request: Request, error: Exception) -> Response:
    """Answer an error of the library that no route expected. Its message may quote the input, so it is not sent."""
    log.warning("%s: the library refused a request: %s", request.state.request_id, type(error).__name__)
    return Problem(422, "refused", "the model refused this request").response(request.scope)


async def _on_invalid_request(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    found = error.errors()
    if any(entry["type"] == "json_invalid" for entry in found):
        return Problem(400, "not_json", "the body is not JSON").response(request.scope)
    errors = [{"at": _field_path(entry), "message": str(entry["msg"])} for entry in found[:_MAX_ERRORS]]
    detail = "; ".join(f"{entry['at']}: {entry['message']}" for entry in errors[:3])
    return Problem(422, "invalid", detail, errors=errors).response(request.scope)


def _field_path(entry: Mapping[str, Any]) -> str:
    """Return where in the request the error is; the name of an unknown field is input, and left out."""
    parts = [str(part) for part in entry["loc"]]
    if entry["type"] == "extra_forbidden":
        parts = [*parts[:-1], "(unknown field)"]
    return ".".join(parts)

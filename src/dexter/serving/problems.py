"""Errors as application/problem+json (RFC 9457). No error repeats anything of the request."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import Scope

from dexter.errors import DexterError, ResourceError
from dexter.serving.protocol import ProblemDetails

log = logging.getLogger("dexter")
_MEDIA_TYPE = "application/problem+json"
_MAX_ERRORS, _MAX_COUNTED_ERRORS = 10, 100
_REFERENCE = "#/components/schemas/{model}"
_BODIES: list[type[BaseModel]] = []
"""Models of bodies, for the OpenAPI schema."""
_FIELD_NAME = re.compile(r"\d+|(?!str$|int$|float$|bool$)[a-z_]\w*")
_MESSAGES = {
    "missing": "is missing",
    "extra_forbidden": "the request takes no such field, see /openapi.json",
    "string_*": "expected a text in quotes",
    "string_too_short": "expected at least {min_length} characters",
    "string_too_long": "expected at most {max_length} characters",
    "string_pattern_mismatch": "expected more than blanks",
    "int_*": "expected a whole number",
    "float_*": "expected a number",
    "finite_number": "expected a finite number",
    "bool_*": "expected true or false",
    "list_*": "expected a list [...]",
    "model_*": "expected an object {{...}}",
    "model_attributes_*": "expected an object {{...}}",
    "dict_*": "expected an object {{...}}",
    "too_short": "expected at least {min_length}",
    "too_long": "expected at most {max_length}",
    "greater_than": "expected more than {gt}",
    "greater_than_equal": "expected {ge} or more",
    "less_than_equal": "expected {le} or less",
    "literal_error": "expected {expected}",
    "none_required": "expected null",
}
"""Messages by pydantic's kind of error, with its limits."""
M = TypeVar("M", bound=BaseModel)
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


class Unavailable(Problem):
    """Something that the service needs is not to be had now: 503, try again in a few seconds."""

    def __init__(self, reason: str) -> None:
        super().__init__(503, "unavailable", f"{reason}: try again in a few seconds", headers={"Retry-After": "5"})


class AnswerTooLarge(Problem):
    """The answer would have too many bytes."""

    def __init__(self, most: int) -> None:
        super().__init__(
            422, "answer_too_large", f"the answer would exceed {most:,} bytes: ask for fewer texts or labels"
        )


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
            schema = generate()
            models = models_json_schema([(model, "validation") for model in _BODIES], ref_template=_REFERENCE)
            schema["components"]["schemas"].update(models[1]["$defs"])
            for path in schema["paths"].values():
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
    assert isinstance(error, DexterError)
    return refusal(error, request.state.request_id).response(request.scope)


def refusal(error: DexterError, request_id: str) -> Problem:
    """Return the problem of a library error that no route expected. Its message may quote the input: it is not sent."""
    log.warning("%s: the library refused a request: %s", request_id, type(error).__name__)
    if isinstance(error, ResourceError):
        return Unavailable("disk, memory or a database that the model needs is not to be had")
    return Problem(422, "refused", "the model refused this request")


async def _on_invalid_request(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return invalid(error.errors()).response(request.scope)


async def read_json(request: Request, model: type[M]) -> M:
    """Read the body of a request as JSON of a model."""
    check_json_type(request.headers.get("content-type", ""))
    return parse_json(await request.body(), model)


def check_json_type(content_type: str) -> None:
    """Refuse a body that is not said to be JSON."""
    kind = content_type.partition(";")[0].strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        raise Problem(415, "not_json", "expected JSON: Content-Type: application/json")


def parse_json(body: bytes, model: type[M]) -> M:
    """Parse JSON of a model; what is wrong is told, but no more of it than a reader needs."""
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        if error.error_count() > _MAX_COUNTED_ERRORS:
            raise Problem(422, "invalid", f"more than {_MAX_COUNTED_ERRORS} errors: see /openapi.json") from None
        raise invalid(error.errors(include_url=False, include_input=False), "body") from None


def invalid(found: Sequence[Any], *place: str) -> Problem:
    """Return the problem of a request that is not as described; `place` says what the errors are in."""
    if any(entry["type"] == "json_invalid" for entry in found):
        return Problem(400, "not_json", "the body is not JSON")
    messages: dict[str, dict[str, None]] = {}
    for entry in found[:_MAX_ERRORS]:
        messages.setdefault(_field_path(entry, place), {})[_plain_message(entry)] = None
    # Of the alternatives that a field allows, those that the request came further with say more.
    kept = [path for path in messages if not any(other.startswith(path + ".") for other in messages)]
    errors = [{"at": path, "message": ", or ".join(messages[path])} for path in kept]
    detail = "; ".join(f"{entry['at']}: {entry['message']}" for entry in errors[:3])
    return Problem(422, "invalid", detail, errors=errors)


def json_body(model: type[BaseModel]) -> dict[str, Any]:
    """Return what OpenAPI says of a body that `read_json` reads."""
    _BODIES.append(model)
    schema = {"$ref": _REFERENCE.format(model=model.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def _plain_message(entry: Mapping[str, Any]) -> str:
    """Return what is wrong with a field, in words of JSON; limits are told, input is not."""
    kind, limits = entry["type"], entry.get("ctx") or {}
    template = _MESSAGES.get(kind) or _MESSAGES.get(kind.rpartition("_")[0] + "_*")
    return "is not as /openapi.json describes it" if template is None else template.format(**limits)


def _field_path(entry: Mapping[str, Any], place: Sequence[str]) -> str:
    """Return where in the request the error is; the name of an unknown field is input, and left out."""
    # Of a field with alternatives, the location also has the name of the type that was tried.
    names = (part for part in map(str, entry["loc"]) if _FIELD_NAME.fullmatch(part))
    parts = [*place, *names]
    if entry["type"] == "extra_forbidden":
        parts = [*place, *map(str, entry["loc"][:-1]), "(unknown field)"]
    return ".".join(parts)

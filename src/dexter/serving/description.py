"""The OpenAPI description, with problems under their own media type."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI

from dexter.serving.problems import MEDIA_TYPE
from dexter.serving.protocol import ProblemDetails

RESPONSES: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": ProblemDetails, "description": "The request is refused; `detail` says why."},
    "5XX": {"model": ProblemDetails, "description": "There is no answer now; `Retry-After` says when to ask again."},
}
"""What every endpoint may answer besides."""


def install(app: FastAPI) -> None:
    """FastAPI describes every answer as application/json: say what problems really are."""
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            for path in generate()["paths"].values():
                for operation in path.values():
                    for status in RESPONSES:
                        content = operation["responses"][status]["content"]
                        content[MEDIA_TYPE] = content.pop("application/json")
        return generate()

    app.openapi = openapi  # type: ignore[method-assign]

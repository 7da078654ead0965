"""Annif's REST dialect: a run looks like a project, so that Annif's own `http` backend can use it unchanged.

Annif takes scores in (0, 1] and drops what is not above 0. A label's score there is its probability where the run has
probabilities, and a logistic function of its score otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Annotated, Any
from urllib.parse import parse_qsl

from fastapi import APIRouter, Query, Request
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.responses import Response

from dexter import __version__
from dexter.predict.predictor import Prediction
from dexter.serving.problems import Problem
from dexter.serving.protocol import Text, to_json
from dexter.serving.runs import Gone, Run
from dexter.serving.service import Service

_MAX_DOCUMENTS = 32
_MAX_FIELDS = 1_000
_LEAST_SCORE = 1e-9
_STEP = 1.0 - 1e-6
"""Between two scores that would be equal or out of order; single precision, which Annif uses, tells them apart."""
Limit = Annotated[int, Field(ge=0, le=2**31)]
Threshold = Annotated[float, Field(ge=0.0, le=1.0)]


class _Suggestion(BaseModel):
    uri: str
    label: str
    notation: str | None = None
    score: float


class _Suggestions(BaseModel):
    results: list[_Suggestion]


class _DocumentSuggestions(_Suggestions):
    document_id: str | None = None


class _Form(BaseModel):
    """The fields of `suggest` that are read; Annif sends others too."""

    model_config = ConfigDict(extra="ignore")
    text: Text
    limit: Limit = 10
    threshold: Threshold = 0.0


class _Document(BaseModel):
    text: Text
    document_id: Text | None = None
    metadata: dict[str, Any] = {}


class _Batch(BaseModel):
    documents: list[_Document] = Field(max_length=_MAX_DOCUMENTS)


def annif_routes(service: Service) -> APIRouter:
    """/v1/projects and below."""
    router = APIRouter(prefix="/v1", tags=["annif"])

    @router.get("/")
    async def api() -> dict[str, str]:
        """Which API this is."""
        return {"title": "Annif REST API", "version": f"dexter {__version__}"}

    @router.get("/projects")
    async def projects() -> dict[str, list[dict[str, Any]]]:
        """The runs, as projects."""
        return {"projects": [_project(run) for run in service.runs]}

    @router.get("/projects/{project_id}")
    async def project(project_id: str) -> dict[str, Any]:
        """A run, as a project."""
        return _project(service.run(project_id))

    @router.post("/projects/{project_id}/suggest", response_model=_Suggestions, openapi_extra=_FORM_SCHEMA)
    async def suggest(project_id: str, request: Request) -> Response:
        """Labels for a text, sent as a form: text, limit, threshold."""
        run, form = service.run(project_id), await _read_form(request)
        [found] = await _suggest(service, run, [form.text], form.limit, form.threshold, request.is_disconnected)
        return to_json(_Suggestions(results=found))

    @router.post("/projects/{project_id}/suggest-batch", response_model=list[_DocumentSuggestions])
    async def suggest_batch(
        project_id: str,
        body: _Batch,
        request: Request,
        limit: Annotated[int, Query(ge=0, le=2**31)] = 10,
        threshold: Annotated[float, Query(ge=0.0, le=1.0)] = 0.0,
        language: Annotated[str, Query(max_length=100)] = "",
    ) -> list[_DocumentSuggestions]:
        """Labels for up to 32 documents."""
        run, texts = service.run(project_id), [document.text for document in body.documents]
        answers = await _suggest(service, run, texts, limit, threshold, request.is_disconnected)
        return [
            _DocumentSuggestions(results=found, document_id=document.document_id)
            for found, document in zip(answers, body.documents, strict=True)
        ]

    return router


async def _suggest(
    service: Service, run: Run, texts: list[str], limit: int, threshold: float, gone: Gone
) -> list[list[_Suggestion]]:
    """The suggestions of each text; none for a text without a word, as Annif has it."""
    places = [place for place, text in enumerate(texts) if text.strip()]
    k = min(limit, service.settings.max_k)
    found: list[list[_Suggestion]] = [[] for _ in texts]
    limits = range(0, len(places), service.settings.max_inputs) if k else []
    for start in limits:
        part = places[start : start + service.settings.max_inputs]
        inputs = service.read_texts([texts[place] for place in part])
        answers = await service.ask(run.predict(inputs.texts, k, gone=gone))
        for place, answer in zip(part, answers, strict=True):
            found[place] = [each for each in _suggestions(answer.labels) if each.score >= threshold]
    return found


def _suggestions(labels: Sequence[Prediction]) -> list[_Suggestion]:
    """Labels with scores that fall from each to the next: Annif orders by score, and is to find our order."""
    shown: list[_Suggestion] = []
    for label in labels:
        score = _logistic(label.score) if label.probability is None else label.probability
        ceiling = shown[-1].score * _STEP if shown else 1.0
        shown.append(_Suggestion(uri=label.id, label=label.text, score=max(_LEAST_SCORE, min(score, ceiling))))
    return shown


def _logistic(value: float) -> float:
    return 1.0 / (1.0 + math.exp(-value)) if value >= 0 else math.exp(value) / (1.0 + math.exp(value))


def _project(run: Run) -> dict[str, Any]:
    changed = None
    if run.folder is not None:
        changed = datetime.fromtimestamp(run.folder.stat().st_mtime, UTC).isoformat()
    return {
        "project_id": run.name,
        "name": run.name,
        "language": "und",
        "backend": {"backend_id": "dexter"},
        "is_trained": run.is_ready,
        "modification_time": changed,
    }


async def _read_form(request: Request) -> _Form:
    """The fields of a form; only what is URL-encoded is read, no files."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/x-www-form-urlencoded":
        raise Problem(415, "form", "expected a form: application/x-www-form-urlencoded")
    body = await request.body()
    try:
        fields = dict(parse_qsl(body.decode(), keep_blank_values=True, max_num_fields=_MAX_FIELDS))
        return _Form.model_validate(fields)
    except ValidationError as error:
        names = sorted({str(entry["loc"][0]) for entry in error.errors()})
        raise Problem(400, "form", f"missing or not valid: {', '.join(names)}") from None
    except ValueError:
        raise Problem(400, "form", "the body is not a form in UTF-8") from None


_FIELD_SCHEMAS: dict[str, dict[str, Any]] = {
    "text": {"type": "string"},
    "limit": {"type": "integer", "minimum": 0, "default": 10},
    "threshold": {"type": "number", "minimum": 0, "maximum": 1, "default": 0},
    "language": {"type": "string"},
}
_FORM_SCHEMA: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            "application/x-www-form-urlencoded": {
                "schema": {"type": "object", "required": ["text"], "properties": _FIELD_SCHEMAS}
            }
        },
    }
}

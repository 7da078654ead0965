"""Annif's REST API: a run is a project, so that Annif's own `http` backend can use it unchanged.

Annif takes scores in (0, 1]. Ours are the labels' probabilities if the run has any, otherwise a logistic function of
their scores.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dexter import __version__
from dexter.predict import Prediction
from dexter.serving.batching import IsDisconnected
from dexter.serving.problems import Problem, json_body, read_json
from dexter.serving.routes import check_answer_size, cut_texts, read_form
from dexter.serving.runs import PredictOptions, ServedRun, ServedRuns
from dexter.serving.settings import MAX_K

_MAX_DOCUMENTS = 32
_MIN_SCORE = 1e-9
_STEP = 1.0 - 1e-6
"""Ratio of two scores that would be equal or out of order; Annif's single precision can tell them apart."""


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
    """The fields of a form that are read; Annif sends others too."""

    model_config = ConfigDict(extra="ignore")
    text: str
    limit: int = Field(10, ge=0, le=2**31)
    threshold: float = Field(0.0, ge=0.0, le=1.0)


class _Document(BaseModel):
    text: str
    document_id: str | None = None
    metadata: dict[str, Any] = {}


class _Batch(BaseModel):
    documents: list[_Document] = Field(max_length=_MAX_DOCUMENTS, fail_fast=True)


def annif_routes(runs: ServedRuns) -> APIRouter:
    """Make the routes /v1/projects and below."""
    router = APIRouter(prefix="/v1", tags=["annif"])

    @router.get("/")
    async def api() -> dict[str, str]:
        """Name the API."""
        return {"title": "Annif REST API", "version": f"dexter {__version__}"}

    @router.get("/projects")
    async def projects() -> dict[str, list[dict[str, Any]]]:
        """List the runs as projects."""
        return {"projects": [_project(run) for run in runs]}

    @router.get("/projects/{project_id}")
    async def project(project_id: str) -> dict[str, Any]:
        """Describe a run as a project."""
        return _project(runs.get(project_id))

    @router.post("/projects/{project_id}/suggest", openapi_extra=_FORM_SCHEMA)
    async def suggest(project_id: str, request: Request) -> _Suggestions:
        """Suggest labels for a text, sent as a form: text, limit, threshold."""
        run, form = runs.get(project_id), _parse_form(await read_form(request))
        [found] = await suggest_all(run, [form.text], form.limit, form.threshold, request.state.is_disconnected)
        return _Suggestions(results=found)

    @router.post("/projects/{project_id}/suggest-batch", openapi_extra=json_body(_Batch))
    async def suggest_batch(
        project_id: str,
        request: Request,
        limit: Annotated[int, Query(ge=0, le=2**31)] = 10,
        threshold: Annotated[float, Query(ge=0.0, le=1.0)] = 0.0,
        language: Annotated[str, Query(max_length=100)] = "",
    ) -> list[_DocumentSuggestions]:
        """Suggest labels for up to 32 documents."""
        run, body = runs.get(project_id), await read_json(request, _Batch)
        texts = [document.text for document in body.documents]
        found = await suggest_all(run, texts, limit, threshold, request.state.is_disconnected)
        return [
            _DocumentSuggestions(results=results, document_id=document.document_id)
            for results, document in zip(found, body.documents, strict=True)
        ]

    async def suggest_all(
        run: ServedRun, texts: list[str], limit: int, threshold: float, is_disconnected: IsDisconnected | None
    ) -> list[list[_Suggestion]]:
        """Return the suggestions of each text; as in Annif, none for an empty text."""
        found: list[list[_Suggestion]] = [[] for _ in texts]
        rows = [row for row, text in enumerate(texts) if text.strip()] if limit else []
        for start in range(0, len(rows), runs.settings.max_inputs):
            part = rows[start : start + runs.settings.max_inputs]
            inputs = cut_texts([texts[row] for row in part], runs.settings)
            options = PredictOptions(min(limit, MAX_K))
            answers = await run.predict(inputs, options, is_disconnected=is_disconnected)
            check_answer_size([label for answer in answers for label in answer.labels], runs.settings)
            for row, answer in zip(part, answers, strict=True):
                found[row] = [each for each in _suggestions(answer.labels) if each.score >= threshold]
        return found

    return router


def _suggestions(labels: Sequence[Prediction]) -> list[_Suggestion]:
    """Give labels scores that fall from each to the next: Annif sorts by score, and should keep our order."""
    suggestions: list[_Suggestion] = []
    for label in labels:
        score = _logistic(label.score) if label.probability is None else label.probability
        ceiling = suggestions[-1].score * _STEP if suggestions else 1.0
        score = max(_MIN_SCORE, min(score, ceiling))
        suggestions.append(_Suggestion(uri=label.id, label=label.text, score=score))
    return suggestions


def _logistic(value: float) -> float:
    return 1.0 / (1.0 + math.exp(-value)) if value >= 0 else math.exp(value) / (1.0 + math.exp(value))


def _project(run: ServedRun) -> dict[str, Any]:
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


def _parse_form(fields: dict[str, str]) -> _Form:
    try:
        return _Form.model_validate(fields)
    except ValidationError as error:
        names = sorted({str(entry["loc"][0]) for entry in error.errors()})
        raise Problem(400, "form", f"missing or not valid: {', '.join(names)}") from None


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

"""Routes for programs: prediction, embeddings, labels, and the status of the service."""

from __future__ import annotations

import base64
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from json.encoder import encode_basestring as _quote
from typing import Annotated, Any, NamedTuple
from urllib.parse import parse_qsl

import numpy as np
from fastapi import APIRouter, Header, Query, Request
from numpy.typing import NDArray
from prometheus_client import generate_latest
from starlette.responses import Response

from dexter import __version__
from dexter.errors import ModelError, ResourceError, UsageError
from dexter.predict import (
    Explanation,
    LabelChange,
    LabelEntry,
    LabelRefused,
    Prediction,
    Predictor,
    VersionConflict,
)
from dexter.predict.filters import LabelFilter, UnknownLabel
from dexter.serving.batching import BATCH_WAIT_SECONDS, IsDisconnected
from dexter.serving.keys import ApiKey
from dexter.serving.middleware import Metrics, OpenRequests
from dexter.serving.problems import AnswerTooLarge, Problem, json_body, read_json
from dexter.serving.protocol import (
    PREDICT_RESPONSE,
    AddLabelsRequest,
    Embedding,
    EmbeddingsRequest,
    EmbeddingsResponse,
    LabelExplanation,
    LabelledText,
    LabelsChanged,
    LabelsHistory,
    LabelsPage,
    PastEdit,
    PredictRequest,
    PredictResponse,
    RankedLabel,
    Readiness,
    RenameLabelsRequest,
    RunName,
    SimilarLabels,
    UndoRequest,
    Usage,
)
from dexter.serving.runs import Answer, PredictOptions, ServedRun, ServedRuns, choose_ranking
from dexter.serving.settings import MAX_K, ServeSettings

log = logging.getLogger("dexter")
PREDICT_PATH = "/v1/predict"
_DEFAULT_K, _DEFAULT_K_WITH_THRESHOLD = 5, 100
_MAX_EXPLAINED_TEXTS, _MAX_EXPLAINED_LABELS = 4, 20
"""Explaining encodes a text once more for each of its words."""
_MAX_LABELS_PER_PAGE = 1_000
_MAX_FORM_FIELDS = 1_000
_DIGITS = ".9g"
"""Format of scores and probabilities: all that a float32 has."""
_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SHOWN_LIMITS = (
    "max_body_bytes",
    "max_inputs",
    "max_characters",
    "max_in_flight",
    "max_queued_texts",
    "max_answer_bytes",
    "timeout_seconds",
    "batch_texts",
)
_REFUSALS = {
    "unknown": (
        404,
        "label",
        "the run has no label with the id at position {} of the request: see GET /v1/labels",
    ),
    "repeated": (404, "label", "the id at position {} of the request is given twice: leave one out"),
    "taken": (409, "taken", "the id at position {} of the request is in use: choose another, or rename that label"),
    "retired": (
        409,
        "refused",
        "the id at position {} is that of a removed label: send reuse_ids: true to use it again",
    ),
    "example label": (
        422,
        "label",
        "example {} has a label that the run lacks: add it first, or send add_labels: true",
    ),
    "example": (404, "example", "no example has the id at position {} of the request: see GET /v1/examples"),
    "last": (409, "last", "a run needs at least one label: add another before you remove the last one"),
}
"""By reason of a refused change: status, code and detail. Labels are named by position, from 1, never by id."""
IfMatch = Annotated[str | None, Header(max_length=40, description="Change the labels only if this is their version.")]


def predict_routes(runs: ServedRuns) -> APIRouter:
    """Make the routes POST /v1/predict and POST /v1/embeddings."""
    router = APIRouter()

    @router.post(
        PREDICT_PATH, tags=["predict"], response_model=PredictResponse, openapi_extra=json_body(PredictRequest)
    )
    async def predict(request: Request) -> Response:
        """Rank the labels of each text."""
        body = await read_json(request, PredictRequest)
        answer = await predict_json(runs, body, is_disconnected=request.state.is_disconnected)
        return Response(answer, media_type="application/json")

    @router.post("/v1/embeddings", tags=["embeddings"], openapi_extra=json_body(EmbeddingsRequest))
    async def embeddings(request: Request) -> EmbeddingsResponse:
        """Embed texts, in the form of OpenAI's API. Inner products of the vectors are the encoder's scores."""
        body = await read_json(request, EmbeddingsRequest)
        run = runs.get(body.model)
        given = [body.input] if isinstance(body.input, str) else body.input
        texts = cut_texts(given, runs.settings)
        embedded = await run.embed(texts, side=body.side, is_disconnected=request.state.is_disconnected)
        num_tokens = sum(each.num_tokens for each in embedded)
        return EmbeddingsResponse(
            data=[
                Embedding(index=index, embedding=_encode(each.vector_D, body.encoding_format))
                for index, each in enumerate(embedded)
            ],
            model=run.name,
            usage=Usage(prompt_tokens=num_tokens, total_tokens=num_tokens),
            inputs_left_out=len(given) - len(texts),
        )

    return router


async def predict_json(
    runs: ServedRuns, body: PredictRequest, *, is_disconnected: IsDisconnected | None = None
) -> bytes:
    """Answer a request to /v1/predict: the JSON of its `PredictResponse`."""
    if body.explain:
        return PREDICT_RESPONSE.dump_json(await answer_predict(runs, body, is_disconnected=is_disconnected))
    asked = _read_predict(runs, body)
    answers = await asked.predict(runs.settings, is_disconnected)
    results = []
    for (item_id, full_text), text, answer in zip(asked.items, asked.texts, answers, strict=False):
        labels = ",".join(
            [
                f'{{"id":{_quote(label.id)},"text":{_quote(asked.names.get(label.id, label.text))},'
                f'"score":{label.score:{_DIGITS}},"probability":{_or_null(label.probability)},"rank":{rank},"explanation":null}}'
                for rank, label in enumerate(answer.labels, start=1)
            ]
        )
        item_json = "null" if item_id is None else _quote(item_id)
        truncated = "true" if len(text) < len(full_text) else "false"
        results.append(f'{{"id":{item_json},"labels":[{labels}],"truncated":{truncated}}}')
    return (
        f'{{"model":{_quote(asked.run.name)},"version":{answers[0].version},"results":[{",".join(results)}],'
        f'"inputs_left_out":{len(asked.items) - len(asked.texts)}}}'
    ).encode()


def _or_null(number: float | None) -> str:
    return "null" if number is None else f"{number:{_DIGITS}}"


async def answer_predict(
    runs: ServedRuns, body: PredictRequest, *, is_disconnected: IsDisconnected | None = None
) -> PredictResponse:
    """Answer a request of the page, or one for explanations."""
    asked = _read_predict(runs, body)
    answers = await asked.predict(runs.settings, is_disconnected)
    results = []
    for (item_id, full_text), text, answer in zip(asked.items, asked.texts, answers, strict=False):
        explanations = await asked.run.explain(text, answer) if body.explain else None
        labels = _ranked_labels(answer, explanations, asked.names, runs.settings)
        results.append(LabelledText(id=item_id, labels=labels, truncated=len(text) < len(full_text)))
    return PredictResponse(
        model=asked.run.name,
        version=answers[0].version,
        results=results,
        inputs_left_out=len(asked.items) - len(asked.texts),
    )


class _Asked(NamedTuple):
    """What a request to /v1/predict asks for, checked."""

    run: ServedRun
    options: PredictOptions
    names: Mapping[str, str]
    """Texts of labels in the language of the request, by id."""
    items: list[tuple[str | None, str]]
    """Ids and texts as they were sent."""
    texts: list[str]
    """Texts within the limits."""

    async def predict(self, settings: ServeSettings, is_disconnected: IsDisconnected | None) -> list[Answer]:
        ids = [item_id for item_id, _ in self.items[: len(self.texts)]]
        try:
            answers = await self.run.predict(self.texts, self.options, ids=ids, is_disconnected=is_disconnected)
        except UnknownLabel:
            raise Problem(422, "label", "a label that exclude or only names was removed meanwhile") from None
        check_answer_size([label for answer in answers for label in answer.labels], settings)
        return answers


def _read_predict(runs: ServedRuns, body: PredictRequest) -> _Asked:
    run = runs.get(body.model)
    given = [body.inputs] if isinstance(body.inputs, str) else body.inputs
    options = _read_options(body, run.predictor, runs.settings, num_texts=len(given))
    names = _read_names(body.language, run.predictor)
    if body.id is not None and not isinstance(body.inputs, str):
        raise Problem(422, "id", "id belongs to a single text: give several texts as a list of {id, text}")
    items = [(body.id, each) if isinstance(each, str) else (each.id, each.text) for each in given]
    return _Asked(run, options, names, items, cut_texts([text for _, text in items], runs.settings))


def cut_texts(texts: Sequence[str], settings: ServeSettings) -> list[str]:
    """Cut the texts of a request to the limits, in number and in length; refuse empty ones."""
    kept = [text[: settings.max_characters] for text in texts[: settings.max_inputs]]
    if not kept:
        raise Problem(422, "empty", "there is no text in the request")
    for position, text in enumerate(kept):
        if not text.strip():
            raise Problem(422, "empty", f"the text at position {position + 1} of the request is empty")
    return kept


async def read_form(request: Request) -> dict[str, str]:
    """Read the fields of a URL-encoded form; files are refused."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/x-www-form-urlencoded":
        raise Problem(415, "form", "expected a form: application/x-www-form-urlencoded")
    try:
        body = (await request.body()).decode()
        return dict(parse_qsl(body, keep_blank_values=True, max_num_fields=_MAX_FORM_FIELDS))
    except ValueError:
        raise Problem(400, "form", "the body is not a form in UTF-8") from None


def _read_options(
    body: PredictRequest, predictor: Predictor, settings: ServeSettings, *, num_texts: int
) -> PredictOptions:
    """Return the options of a request; refuse those that the run or the service does not offer."""
    if body.k is not None and body.k > MAX_K:
        raise Problem(422, "k", f"k may be {MAX_K} at most")
    if body.head is not None and body.head not in predictor.heads:
        raise Problem(422, "head", f"this run has the heads {', '.join(predictor.heads)}")
    if body.explain and ((body.k or _DEFAULT_K) > _MAX_EXPLAINED_LABELS or num_texts > _MAX_EXPLAINED_TEXTS):
        detail = f"explain takes {_MAX_EXPLAINED_TEXTS} texts and a k of {_MAX_EXPLAINED_LABELS} at most"
        raise Problem(422, "explain", detail)
    if body.explain and not settings.explanations:
        raise Problem(403, "explain", "explanations are switched off here")
    if body.neighbours and not predictor.has_training_queries:
        raise Problem(422, "neighbours", "this run has kept no training texts")
    default_k = _DEFAULT_K if body.threshold is None or body.explain else _DEFAULT_K_WITH_THRESHOLD
    for name, ids in (("exclude", body.exclude), ("only", body.only)):
        if ids and (unknown := predictor.labels.find_unknown(ids)) is not None:
            raise Problem(422, "label", f"the run has no label with the id at position {unknown + 1} of {name}")
    labels = LabelFilter.of(body.exclude, body.only, body.bands)
    options = PredictOptions(body.k or default_k, body.threshold, body.head, body.neighbours, body.dial, labels)
    if body.threshold is not None and (
        predictor.calibration is None or choose_ranking(predictor, options) != predictor.choice
    ):
        detail = "no probabilities for labels ranked this way: leave head, neighbours and dial out, or tune the run"
        raise Problem(422, "threshold", detail)
    return options


def _read_names(language: str | None, predictor: Predictor) -> Mapping[str, str]:
    try:
        return predictor.names(language)
    except UsageError:
        raise Problem(422, "language", "the labels of this run have no names in this language") from None


def _ranked_labels(
    answer: Answer, explanations: Sequence[Explanation] | None, names: Mapping[str, str], settings: ServeSettings
) -> list[RankedLabel]:
    return [
        RankedLabel(
            id=label.id,
            text=names.get(label.id, label.text),
            score=label.score,
            probability=label.probability,
            rank=place + 1,
            explanation=None if explanations is None else _why(explanations[place], settings),
        )
        for place, label in enumerate(answer.labels)
    ]


def _why(explanation: Explanation, settings: ServeSettings) -> LabelExplanation:
    why = LabelExplanation(**explanation.to_json())
    return why if settings.training_texts else why.model_copy(update={"neighbours": []})


def check_answer_size(labels: Iterable[Prediction | LabelEntry], settings: ServeSettings) -> None:
    """Refuse an answer whose labels alone have more characters than an answer may have bytes, before it is made."""
    if sum(len(label.id) + len(label.text) for label in labels) > settings.max_answer_bytes:
        raise AnswerTooLarge(settings.max_answer_bytes)


def _encode(vector_D: NDArray[np.float32], encoding_format: str) -> list[float] | str:
    if encoding_format == "base64":
        return base64.b64encode(vector_D.astype("<f4").tobytes()).decode("ascii")
    return [float(value) for value in vector_D]


def label_routes(runs: ServedRuns) -> APIRouter:
    """Make the routes /v1/labels and below."""
    router = APIRouter(tags=["labels"])

    @router.get("/v1/labels")
    async def list_labels(
        q: Annotated[str, Query(max_length=1_000, description="Only labels with this in their id or text.")] = "",
        cursor: Annotated[int, Query(ge=0, le=2**31, description="`next` of the page before.")] = 0,
        limit: Annotated[int, Query(ge=1, le=_MAX_LABELS_PER_PAGE)] = 50,
        model: RunName = None,
    ) -> LabelsPage:
        """List labels: those that begin with `q` first, then in the order of the run."""
        run = runs.get(model)
        version, page = await run.read_labels(lambda predictor: predictor.search_labels(q, limit=limit, offset=cursor))
        check_answer_size(page.labels, runs.settings)
        return LabelsPage(
            model=run.name,
            version=version,
            total=page.total,
            labels=page.labels,
            next=cursor + limit if cursor + limit < page.total else None,
        )

    @router.get("/v1/labels/similar")
    async def similar_labels(
        text: Annotated[str, Query(min_length=1, max_length=20_000, description="Text of a label, new or known.")],
        k: Annotated[int, Query(ge=1, le=100)] = 5,
        model: RunName = None,
    ) -> SimilarLabels:
        """Find the labels that mean nearly the same as a label with this text would."""
        run = runs.get(model)
        version, found = await run.read_labels(lambda predictor: predictor.similar_labels(text, k))
        return SimilarLabels(model=run.name, version=version, labels=found)

    @router.post("/v1/labels", openapi_extra=json_body(AddLabelsRequest))
    async def add_labels(request: Request, if_match: IfMatch = None) -> LabelsChanged:
        """Add labels, all or none. They can be predicted from now on, without training."""
        body = await read_json(request, AddLabelsRequest)
        labels = [(label.id, label.text) for label in body.labels]
        examples = {label.id: label.examples for label in body.labels if label.examples}
        change = LabelChange(add=labels, examples=examples, reuse_ids=body.reuse_ids)
        return await change_labels(runs.get(body.model), change, request, if_match)

    @router.patch("/v1/labels", openapi_extra=json_body(RenameLabelsRequest))
    async def rename_labels(request: Request, if_match: IfMatch = None) -> LabelsChanged:
        """Give labels new texts, all or none. They are predicted by these from now on."""
        body = await read_json(request, RenameLabelsRequest)
        labels = [(label.id, label.text) for label in body.labels]
        change = LabelChange(rename=labels, keep_vectors=body.keep_vectors)
        return await change_labels(runs.get(body.model), change, request, if_match)

    @router.delete("/v1/labels")
    async def remove_labels(
        request: Request,
        id: Annotated[list[str], Query(min_length=1, max_length=1_000, description="Repeat for several.")],  # noqa: A002
        model: RunName = None,
        if_match: IfMatch = None,
    ) -> LabelsChanged:
        """Remove labels, all or none. They are not predicted any more."""
        return await change_labels(runs.get(model), LabelChange(remove=id), request, if_match)

    @router.get("/v1/labels/history")
    async def label_history(
        id: Annotated[str | None, Query(max_length=1_000, description="Only edits of this label.")] = None,  # noqa: A002
        limit: Annotated[int, Query(ge=1, le=_MAX_LABELS_PER_PAGE)] = 50,
        model: RunName = None,
    ) -> LabelsHistory:
        """List the edits of the labels that were written to the run folder, newest first."""
        run = runs.get(model)
        version, edits = await run.read_labels(lambda predictor: predictor.label_history(id))
        listed = [PastEdit(**edit._asdict()) for edit in edits[:limit]]
        return LabelsHistory(model=run.name, version=version, edits=listed)

    @router.post("/v1/labels/undo", openapi_extra=json_body(UndoRequest))
    async def undo_labels(request: Request) -> LabelsChanged:
        """Undo an edit, as one more edit; refused (409) if a later one changed the same labels."""
        body = await read_json(request, UndoRequest)
        run = runs.get(body.model)
        with editing(request) as author:
            result = await run.undo_labels(body.edit, by=author)
        return LabelsChanged(model=run.name, version=result.version, duplicates=[])

    return router


async def change_labels(
    run: ServedRun, change: LabelChange, request: Request, if_match: str | None = None
) -> LabelsChanged:
    """Change the labels of a run, if the key of the request may.

    `if_match` is an If-Match header with the version that the change is for.
    """
    with editing(request) as author:
        result = await run.change_labels(change, expected=_read_version(if_match), by=author)
    return LabelsChanged(model=run.name, version=result.version, duplicates=list(result.duplicates))


@contextmanager
def editing(request: Request) -> Iterator[str | None]:
    """Check that the key of a request may edit, give its name, and turn what goes wrong into problems."""
    key: ApiKey | None = request.state.key
    if key is not None and key.role != "edit":
        raise Problem(403, "role", "this API key may read, but not change labels")
    try:
        yield None if key is None else key.name
    except VersionConflict:
        raise Problem(412, "version", "the labels have another version by now: list them and try again") from None
    except LabelRefused as error:
        status, code, detail = _REFUSALS[error.reason]
        raise Problem(status, code, detail.format(error.position + 1)) from None
    except UsageError:
        detail = "the change does not fit the labels as they are now: list them and their history, then try again"
        raise Problem(409, "refused", detail) from None
    except (ResourceError, OSError) as error:
        log.warning("%s: labels not changed: %s", request.state.request_id, type(error).__name__)
        detail = "another process is changing the labels, or there is no room or permission to write them"
        raise Problem(503, "write", detail, headers={"Retry-After": "1"}) from None
    except ModelError:
        detail = "the run is in training or was replaced: change its labels when it has finished"
        raise Problem(409, "model", detail) from None


def _read_version(if_match: str | None) -> int | None:
    if if_match is None or if_match.strip() == "*":
        return None
    value = if_match.strip().strip('"')
    if not (value.isascii() and value.isdecimal()):
        raise Problem(422, "version", "If-Match takes the number of a version")
    return int(value)


def status_routes(runs: ServedRuns, metrics: Metrics, traffic: OpenRequests) -> APIRouter:
    """Make the routes /healthz, /readyz, /info and /metrics."""
    router = APIRouter(tags=["status"])

    @router.get("/healthz")
    async def healthz() -> dict[str, str]:
        """Answer as long as the process runs."""
        return {"status": "ok"}

    @router.get("/readyz")
    async def readyz() -> Readiness:
        """Say whether requests are answered: 503 while the service is stopping, a run has no model or a search fails.

        `degraded` means that texts are answered, but labels are not followed or were not written; `problems` says why.
        """
        if traffic.draining:
            raise Problem(503, "draining", "the service is stopping", headers={"Retry-After": "5"})
        problems = [f"{run.name}: {problem}" for run in runs for problem in await run.check_ready()]
        return Readiness(status="degraded" if problems else "ready", problems=problems)

    @router.get("/info")
    async def info() -> dict[str, Any]:
        """Describe the service: version, runs and limits."""
        limits = {name: getattr(runs.settings, name) for name in _SHOWN_LIMITS}
        return {
            "name": "dexter",
            "version": __version__,
            "default": runs.default.name,
            "runs": [_describe_run(run) for run in runs],
            "limits": {**limits, "max_k": MAX_K, "batch_wait_seconds": BATCH_WAIT_SECONDS},
        }

    @router.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
    async def metrics_text() -> Response:
        """Return all metrics in Prometheus' text format."""
        metrics.in_flight.set(traffic.in_flight)
        metrics.held_bytes.set(traffic.held_bytes)
        for code, count in traffic.refused.items():
            metrics.refused.labels(code).set(count)
        for run in runs:
            metrics.queued.labels(run.name).set(run.num_queued)
            if run.is_ready:
                metrics.labels.labels(run.name).set(len(run.predictor.labels.ids))
                metrics.version.labels(run.name).set(run.predictor.version)
        return Response(generate_latest(metrics.registry), media_type=_METRICS_TYPE)

    return router


def _describe_run(run: ServedRun) -> dict[str, Any]:
    if not run.is_ready:
        return {"name": run.name, "ready": False}
    predictor = run.predictor
    return {
        "name": run.name,
        "ready": True,
        "num_labels": len(predictor.labels.ids),
        "version": predictor.version,
        "heads": list(predictor.heads),
        "head": predictor.choice.head,
        "dial": predictor.choice.dial,
        "neighbours": predictor.choice.uses_neighbours,
        "has_neighbours": predictor.has_training_queries,
        "has_probabilities": predictor.calibration is not None,
        "excludes_own_labels": predictor.own_labels.excludes,
        "index": predictor.index.backend,
        "fingerprint": predictor.fingerprint,
        "dimension": predictor.dimension,
        "facts": predictor.facts,
    }

"""`/v1/predict`: texts in, ranked labels out."""

from __future__ import annotations

from collections.abc import Sequence

from fastapi import APIRouter, Request
from starlette.responses import Response

from dexter.predict.explain import Explanation
from dexter.predict.predictor import Prediction, Predictor
from dexter.serving.problems import Problem
from dexter.serving.protocol import LabelledText, PredictRequest, PredictResponse, RankedLabel, Why, to_json
from dexter.serving.runs import Gone, Variant
from dexter.serving.service import Service

_DEFAULT_K, _DEFAULT_K_ABOVE_THRESHOLD = 5, 100
_EXPLAINED_TEXTS, _EXPLAINED_LABELS = 4, 20
"""A text is encoded once more for each of its words."""


def predicting_routes(service: Service) -> APIRouter:
    """POST /v1/predict."""
    router = APIRouter(tags=["predict"])

    @router.post("/v1/predict", response_model=PredictResponse)
    async def predict(body: PredictRequest, request: Request) -> Response:
        """The best labels of each text."""
        return to_json(await answer(service, body, gone=request.is_disconnected))

    return router


async def answer(service: Service, body: PredictRequest, *, gone: Gone | None = None) -> PredictResponse:
    """What `/v1/predict` answers."""
    run = service.run(body.model)
    k, variant = _choices(body, run.predictor, service.settings.max_k)
    given = [body.inputs] if isinstance(body.inputs, str) else body.inputs
    inputs = service.read_texts([each if isinstance(each, str) else each.text for each in given])
    asked = run.predict(inputs.texts, k, threshold=body.threshold, variant=variant, gone=gone)
    answers = await service.ask(asked)
    results = [
        LabelledText(
            id=None if isinstance(each, str) else each.id,
            labels=_ranked(found.labels, await run.explain(text, found) if body.explain else None),
            truncated=truncated,
        )
        for each, text, found, truncated in zip(given, inputs.texts, answers, inputs.truncated, strict=False)
    ]
    return PredictResponse(
        model=run.name, version=answers[0].version, results=results, inputs_left_out=inputs.num_left_out
    )


def _choices(body: PredictRequest, predictor: Predictor, max_k: int) -> tuple[int, Variant]:
    """How many labels are asked for and how they are ranked, or the problem with that."""
    model = predictor.model
    if body.k is not None and body.k > max_k:
        raise Problem(422, "k", f"k may be {max_k} at most")
    if body.head is not None and body.head not in model.heads:
        raise Problem(422, "head", f"this run has the heads {', '.join(model.heads)}")
    if body.explain and ((body.k or _DEFAULT_K) > _EXPLAINED_LABELS or _num_texts(body) > _EXPLAINED_TEXTS):
        detail = f"explain takes {_EXPLAINED_TEXTS} texts and a k of {_EXPLAINED_LABELS} at most"
        raise Problem(422, "explain", detail)
    if body.neighbours and model.training_queries is None:
        raise Problem(422, "neighbours", "this run has kept no training texts")
    variant = Variant(body.head, body.neighbours, body.dial)
    is_tuned = variant.resolved(predictor) == Variant().resolved(predictor) and predictor.calibration is not None
    if body.threshold is not None and not is_tuned:
        detail = "no probabilities for labels ranked this way: leave head, neighbours and dial out, or tune the run"
        raise Problem(422, "threshold", detail)
    default = _DEFAULT_K if body.threshold is None or body.explain else _DEFAULT_K_ABOVE_THRESHOLD
    return min(body.k or default, max_k), variant


def _num_texts(body: PredictRequest) -> int:
    return 1 if isinstance(body.inputs, str) else len(body.inputs)


def _ranked(labels: Sequence[Prediction], explanations: Sequence[Explanation] | None) -> list[RankedLabel]:
    reasons = [None] * len(labels) if explanations is None else [Why(**each.to_json()) for each in explanations]
    return [
        RankedLabel(id=label.id, text=label.text, score=label.score, probability=label.probability, rank=rank, why=why)
        for rank, (label, why) in enumerate(zip(labels, reasons, strict=True), start=1)
    ]

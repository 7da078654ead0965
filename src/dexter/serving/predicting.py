"""`/v1/predict`: texts in, ranked labels out."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from dexter.predictor import Prediction, Predictor
from dexter.serving.problems import Problem
from dexter.serving.protocol import LabelledText, PredictRequest, PredictResponse, RankedLabel, to_json
from dexter.serving.runs import Gone, Variant
from dexter.serving.service import Service

_DEFAULT_K, _DEFAULT_K_ABOVE_THRESHOLD = 5, 100


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
        LabelledText(id=None if isinstance(each, str) else each.id, labels=_ranked(found.labels), truncated=truncated)
        for each, found, truncated in zip(given, answers, inputs.truncated, strict=False)
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
    if body.memory and model.memory is None:
        raise Problem(422, "memory", "this run has no memory of its training texts")
    variant = Variant(body.head, body.memory, body.dial)
    is_tuned = variant.resolved(predictor) == Variant().resolved(predictor) and predictor.calibration is not None
    if body.threshold is not None and not is_tuned:
        detail = "no probabilities for labels ranked this way: leave head, memory and dial out, or tune the run"
        raise Problem(422, "threshold", detail)
    default = _DEFAULT_K if body.threshold is None else _DEFAULT_K_ABOVE_THRESHOLD
    return min(body.k or default, max_k), variant


def _ranked(labels: list[Prediction]) -> list[RankedLabel]:
    return [
        RankedLabel(id=label.id, text=label.text, score=label.score, probability=label.probability, rank=rank)
        for rank, label in enumerate(labels, start=1)
    ]

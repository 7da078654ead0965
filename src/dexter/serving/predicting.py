"""`/v1/predict`: texts in, ranked labels out."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from dexter.serving.problems import Problem
from dexter.serving.protocol import LabelledText, PredictRequest, PredictResponse, RankedLabel, to_json
from dexter.serving.runs import Gone, Variant
from dexter.serving.service import Service


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
    if body.k > service.settings.max_k:
        raise Problem(422, "k", f"k may be {service.settings.max_k} at most")
    if body.head is not None and body.head not in run.predictor.model.heads:
        raise Problem(422, "head", f"this run has the heads {', '.join(run.predictor.model.heads)}")
    given = [body.inputs] if isinstance(body.inputs, str) else body.inputs
    inputs = service.read_texts([each if isinstance(each, str) else each.text for each in given])
    answers = await service.ask(run.predict(inputs.texts, body.k, variant=Variant(body.head), gone=gone))
    results = [
        LabelledText(
            id=None if isinstance(each, str) else each.id,
            labels=[
                RankedLabel(id=label.id, text=label.text, score=label.score, rank=rank)
                for rank, label in enumerate(found.labels, start=1)
            ],
            truncated=truncated,
        )
        for each, found, truncated in zip(given, answers, inputs.truncated, strict=False)
    ]
    return PredictResponse(
        model=run.name, version=answers[0].version, results=results, inputs_left_out=inputs.num_left_out
    )

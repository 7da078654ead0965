"""`/healthz`, `/readyz`, `/info`, `/metrics`: what those who run a service ask."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from dexter import __version__
from dexter.serving.metrics import MEDIA_TYPE
from dexter.serving.problems import Problem
from dexter.serving.runs import Run
from dexter.serving.service import Service

_LIMITS = ("max_body_bytes", "max_inputs", "max_characters", "max_k", "max_in_flight", "max_queued_texts")
_TIMES = ("timeout_seconds", "batch_texts", "batch_wait_seconds")


def status_routes(service: Service) -> APIRouter:
    """What those who run a service ask."""
    router = APIRouter(tags=["status"])

    @router.get("/healthz")
    async def healthz() -> dict[str, str]:
        """Whether the process lives."""
        return {"status": "ok"}

    @router.get("/readyz")
    async def readyz() -> dict[str, str]:
        """Whether requests are answered: 503 while the service stops, or a run has no model yet."""
        if service.traffic.draining:
            raise Problem(503, "draining", "the service is stopping", headers={"Retry-After": "5"})
        if not all(run.is_ready for run in service.runs):
            raise Problem(503, "no_model", "a run has no model yet", headers={"Retry-After": "5"})
        return {"status": "ready"}

    @router.get("/info")
    async def info() -> dict[str, Any]:
        """Version, runs and limits."""
        return {
            "name": "dexter",
            "version": __version__,
            "default": service.runs.default.name,
            "runs": [describe(run) for run in service.runs],
            "limits": {name: getattr(service.settings, name) for name in (*_LIMITS, *_TIMES)},
        }

    @router.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
    async def metrics() -> Response:
        """Everything counted, for Prometheus."""
        measured = service.metrics
        measured.in_flight.set(service.traffic.in_flight)
        for run in service.runs:
            measured.queued.labels(run.name).set(run.num_queued)
            if not run.is_ready:
                continue
            measured.labels.labels(run.name).set(len(run.predictor.labels.ids))
            measured.version.labels(run.name).set(run.predictor.version)
        return Response(measured.render(), media_type=MEDIA_TYPE)

    return router


def describe(run: Run) -> dict[str, Any]:
    """A run in a few words."""
    if not run.is_ready:
        return {"name": run.name, "ready": False}
    model = run.predictor.model
    return {
        "name": run.name,
        "ready": True,
        "labels": len(run.predictor.labels.ids),
        "version": run.predictor.version,
        "heads": list(model.heads),
        "head": run.predictor.head,
        "dial": run.predictor.dial,
        "neighbours": run.predictor.uses_neighbours,
        "has_neighbours": model.training_queries is not None,
        "has_probabilities": run.predictor.calibration is not None,
        "index": type(run.predictor.index).__name__,
        "fingerprint": run.predictor.fingerprint,
        "dimension": model.encoder.dimension,
        "facts": model.facts,
    }

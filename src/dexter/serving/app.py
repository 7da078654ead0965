"""create_app: the service as an ASGI application, from predictors that are loaded already."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from fastapi import FastAPI
from starlette.middleware.body_limit import RequestBodyLimitMiddleware
from starlette.types import Scope

from dexter import __version__
from dexter.predictor import Predictor
from dexter.serving import problems
from dexter.serving.embedding import embedding_routes
from dexter.serving.headers import HeadersMiddleware
from dexter.serving.labels import label_routes
from dexter.serving.limits import GateMiddleware
from dexter.serving.metrics import Metrics, MetricsMiddleware
from dexter.serving.page import page_routes
from dexter.serving.predicting import predicting_routes
from dexter.serving.protocol import ProblemDetails
from dexter.serving.runs import Run, Runs
from dexter.serving.service import Service
from dexter.serving.settings import ServeSettings
from dexter.serving.status import status_routes

log = logging.getLogger("dexter")


def create_app(predictors: Predictor | Mapping[str, Predictor], settings: ServeSettings | None = None) -> FastAPI:
    """The service over one predictor, or over several by name; the first is the default.

    The application owns the predictors from now on: what it computes with them happens in its worker threads.
    `app.state.service` has the runs, the settings and what is under way.
    """
    settings = settings or ServeSettings()
    named = predictors if isinstance(predictors, Mapping) else {"default": predictors}
    metrics = Metrics()
    runs = Runs({name: Run(name, each, settings, observe=metrics.batch_observer(name)) for name, each in named.items()})
    service = Service(runs, settings, metrics)
    app = FastAPI(
        title="dexter",
        version=__version__,
        summary="Ranked labels for texts; labels can be added and removed at any time.",
        docs_url=None,
        redoc_url=None,
        lifespan=_lifespan,
        responses={"4XX": {"model": ProblemDetails}, "5XX": {"model": ProblemDetails}},
    )
    app.state.service = service
    for routes in (predicting_routes, embedding_routes, label_routes, status_routes, page_routes):
        app.include_router(routes(service))
    problems.install(app)
    # The last one added is the first to see a request.
    app.add_middleware(RequestBodyLimitMiddleware, max_body_size=settings.max_body_bytes)
    app.add_middleware(GateMiddleware, settings=settings, traffic=service.traffic)
    app.add_middleware(problems.BugMiddleware)
    app.add_middleware(MetricsMiddleware, metrics=metrics, log=_log_request if settings.log_requests else None)
    app.add_middleware(HeadersMiddleware)
    return app


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    yield
    for run in app.state.service.runs:
        run.close()


def _log_request(scope: Scope, route: str, status: int, seconds: float) -> None:
    request_id = scope["state"]["request_id"]
    log.info("%s %s %s %d %.1f ms", request_id, scope["method"], route, status, 1_000 * seconds)

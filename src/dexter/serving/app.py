"""create_app: the service as an ASGI application."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

from fastapi import FastAPI, Request
from starlette.middleware.body_limit import RequestBodyLimitMiddleware
from starlette.responses import Response
from starlette.types import Scope

from dexter import __version__
from dexter.predict.predictor import Predictor
from dexter.serving import description, problems
from dexter.serving.annif import annif_routes
from dexter.serving.embedding import embedding_routes
from dexter.serving.following import Follower, open_folder
from dexter.serving.headers import HeadersMiddleware
from dexter.serving.labels import label_routes
from dexter.serving.limits import GateMiddleware
from dexter.serving.metrics import Metrics, MetricsMiddleware
from dexter.serving.page import page_routes
from dexter.serving.predicting import predicting_routes
from dexter.serving.problems import Problem
from dexter.serving.runs import NotReady, Run, Runs
from dexter.serving.service import Service
from dexter.serving.settings import ServeSettings
from dexter.serving.status import status_routes

log = logging.getLogger("dexter")


def create_app(
    predictors: Predictor | Mapping[str, Predictor | Path], settings: ServeSettings | None = None
) -> FastAPI:
    """The service over one predictor, or over several by name; the first is the default.

    A path is a run folder: it is loaded, or waited for while its training has no model yet, and what changes there is
    taken up. The application owns the predictors from now on. `app.state.service` has the runs, the settings and what
    is under way.
    """
    settings = settings or ServeSettings()
    named = predictors if isinstance(predictors, Mapping) else {"default": predictors}
    metrics = Metrics()
    runs = Runs({name: _open(name, each, settings, metrics) for name, each in named.items()})
    service = Service(runs, settings, metrics)
    app = FastAPI(
        title="dexter",
        version=__version__,
        summary="Ranked labels for texts; labels can be added and removed at any time.",
        docs_url=None,
        redoc_url=None,
        lifespan=_lifespan,
        responses=description.RESPONSES,
    )
    app.state.service = service
    for routes in (predicting_routes, embedding_routes, label_routes, annif_routes, status_routes, page_routes):
        app.include_router(routes(service))
    description.install(app)
    problems.install(app)
    app.add_exception_handler(NotReady, _on_not_ready)
    # The last one added is the first to see a request.
    app.add_middleware(RequestBodyLimitMiddleware, max_body_size=settings.max_body_bytes)
    app.add_middleware(GateMiddleware, settings=settings, traffic=service.traffic)
    app.add_middleware(problems.BugMiddleware)
    app.add_middleware(MetricsMiddleware, metrics=metrics, log=_log_request if settings.log_requests else None)
    app.add_middleware(HeadersMiddleware)
    return app


def _open(name: str, source: Predictor | Path, settings: ServeSettings, metrics: Metrics) -> Run:
    folder = source if isinstance(source, Path) else None
    predictor = open_folder(source, _loader(settings)) if isinstance(source, Path) else source
    return Run(name, predictor, settings, folder=folder, observe=metrics.batch_observer(name))


def _loader(settings: ServeSettings) -> Callable[[Path], Predictor]:
    return partial(Predictor.load, persistent=settings.keep_edits, runtime=settings.runtime)


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    service: Service = app.state.service
    settings = service.settings
    for run in service.runs:
        if not run.is_open:
            run.open()
    followers = [
        asyncio.create_task(Follower(run, run.folder, _loader(settings)).follow(seconds=settings.follow_seconds))
        for run in service.runs
        if run.folder is not None
    ]
    yield
    for follower in followers:
        follower.cancel()
    for run in service.runs:
        run.close()


async def _on_not_ready(request: Request, error: Exception) -> Response:
    return Problem(503, "no_model", "this run has no model yet", headers={"Retry-After": "5"}).response(request.scope)


def _log_request(scope: Scope, route: str, status: int, seconds: float) -> None:
    request_id = scope["state"]["request_id"]
    log.info("%s %s %s %d %.1f ms", request_id, scope["method"], route, status, 1_000 * seconds)

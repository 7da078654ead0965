"""create_app: the service as an ASGI application."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from fastapi import FastAPI

from dexter import __version__
from dexter.predict import Predictor
from dexter.serving.annif import annif_routes
from dexter.serving.direct import DirectPredictions
from dexter.serving.examples import example_routes
from dexter.serving.keys import KeyRing
from dexter.serving.label_studio import label_studio_routes
from dexter.serving.middleware import Gate, GateMiddleware, Metrics, OpenRequests, WatchMiddleware
from dexter.serving.page.app import page_routes
from dexter.serving.problems import RESPONSES, install_problems
from dexter.serving.routes import label_routes, predict_routes, status_routes
from dexter.serving.runs import ServedRun, ServedRuns
from dexter.serving.settings import ServeSettings


def create_app(
    predictors: Predictor | Mapping[str, Predictor | Path],
    settings: ServeSettings | None = None,
    *,
    worker: int | None = None,
) -> FastAPI:
    """Make the service over one predictor, or over several by name; a request without a name asks the first.

    A path is a run folder: see `ServedRun`. The application owns the predictors from now on. `app.state` has `runs` (by
    name, with the settings), `traffic` (requests under way), `keys`, and `direct` (predictions past ASGI). Limits on
    connections are those of the server, see `make_server`. `worker` is the number of this process among several, which
    its metrics then have as a label.
    """
    settings = settings or ServeSettings()
    named = predictors if isinstance(predictors, Mapping) else {"default": predictors}
    metrics = Metrics(worker, log_requests=settings.log_requests)
    gate = Gate(settings, OpenRequests(), KeyRing(settings.keys, settings.keys_file))
    runs = ServedRuns(
        [
            ServedRun(name, source, settings, metrics.batches.labels(name).observe, gate.traffic.computed)
            for name, source in named.items()
        ],
        settings,
    )
    app = FastAPI(
        title="dexter",
        version=__version__,
        summary="Ranked labels for texts; labels can be added and removed at any time.",
        docs_url=None,
        redoc_url=None,
        lifespan=_lifespan,
        responses=RESPONSES,
    )
    app.state.runs, app.state.traffic, app.state.keys = runs, gate.traffic, gate.keys
    app.state.direct = DirectPredictions(runs, gate, metrics)
    for routes in (predict_routes, label_routes, example_routes, annif_routes, label_studio_routes, page_routes):
        app.include_router(routes(runs))
    app.include_router(status_routes(runs, metrics, gate.traffic))
    install_problems(app)
    # The last one added is the first to see a request.
    app.add_middleware(GateMiddleware, gate=gate)
    app.add_middleware(WatchMiddleware, metrics=metrics)
    return app


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    runs: ServedRuns = app.state.runs
    for run in runs:
        if not run.is_running:
            run.start()
    followers = [asyncio.create_task(run.follow_folder()) for run in runs if run.folder is not None]
    yield
    for follower in followers:
        follower.cancel()
    for run in runs:
        run.stop()

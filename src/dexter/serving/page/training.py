"""The page /training: a run's curves, which grow while it is going."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from dexter.serving.page.curves import make_charts, read_records
from dexter.serving.page.rendering import Renderer
from dexter.serving.service import Service
from dexter.training.run import is_finished


def training_routes(service: Service, render: Renderer) -> APIRouter:
    """GET /training."""
    router = APIRouter(include_in_schema=False)

    @router.get("/training")
    async def training(model: str | None = None) -> Response:
        """The curves of a run's `metrics.jsonl`."""
        run = service.run(model)
        folder = run.folder
        records = [] if folder is None else await run_in_threadpool(read_records, folder / "metrics.jsonl")
        live = folder is not None and bool(records) and not is_finished(folder)
        last: dict[str, Any] = next((record for record in reversed(records) if record.get("kind") == "train"), {})
        return render("training", model=run.name, charts=make_charts(records), live=live, last=last)

    return router

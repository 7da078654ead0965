"""The page /training: a run's curves, which grow while it is going."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastapi import APIRouter
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from dexter.config import load_config
from dexter.errors import DexterError
from dexter.serving.page.curves import Chart, make_charts, read_records
from dexter.serving.page.rendering import Renderer
from dexter.serving.page.telling import page_router
from dexter.serving.service import Service
from dexter.training.run import is_finished


@dataclass(frozen=True, kw_only=True)
class Training:
    """What is known of a run's training."""

    charts: Sequence[Chart] = ()
    live: bool = False
    """Whether it is going on."""
    step: int = 0
    epoch: float = 0.0
    epochs: float | None = None
    """How many there will be."""
    seconds: float | None = None
    best: Mapping[str, float] | None = None
    """The validation of the model that is kept."""

    @property
    def share(self) -> float:
        """How much of it is done, from 0 to 1."""
        return min(self.epoch / self.epochs, 1.0) if self.epochs else 0.0

    @property
    def seconds_left(self) -> float | None:
        """If it goes on as before; None where that cannot be told."""
        return self.seconds * (1 - self.share) / self.share if self.seconds and self.share > 0 else None


def training_routes(service: Service, render: Renderer) -> APIRouter:
    """GET /training."""
    router = page_router(render)

    @router.get("/training")
    async def training(model: str | None = None) -> Response:
        """The curves of a run's `metrics.jsonl`."""
        run = service.run(model)
        seen = Training() if run.folder is None else await run_in_threadpool(read_training, run.folder)
        return render("training", model=run.name, training=seen)

    return router


def read_training(folder: Path) -> Training:
    """What the files of a run tell, also while they are written."""
    records = read_records(folder / "metrics.jsonl")
    last = _last(records, "kind", "train")
    best = _last(records, "best", True)
    return Training(
        charts=make_charts(records),
        live=bool(records) and not is_finished(folder),
        step=int(last.get("step", 0)),
        epoch=float(last.get("epoch", 0.0)),
        epochs=_epochs(folder),
        seconds=last.get("seconds"),
        best={name: best[name] for name in ("P@1", "P@5", "nDCG@5", "PSP@5") if name in best},
    )


def _last(records: Sequence[dict[str, Any]], key: str, value: object) -> dict[str, Any]:
    return next((record for record in reversed(records) if record.get(key) == value), {})


def _epochs(folder: Path) -> float | None:
    try:
        return float(load_config(folder / "config.toml").train.epochs)
    except (DexterError, OSError):
        return None

"""The page /batch. The browser reads the file and asks `/v1/predict` for its texts: nothing is uploaded whole."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import Response

from dexter.serving.page.rendering import Renderer
from dexter.serving.page.telling import page_router
from dexter.serving.service import Service


def batch_routes(service: Service, render: Renderer) -> APIRouter:
    """GET /batch."""
    router = page_router(render)

    @router.get("/batch")
    async def batch(model: str | None = None) -> Response:
        """A form for a file; its script does the rest."""
        return render("batch", model=service.run(model).name, limits=service.settings)

    return router

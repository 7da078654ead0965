"""`/v1/labels`: list, search, add, rename and remove labels. An edit is whole or refused, and makes a new version."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from fastapi import APIRouter, Header, Query
from starlette.responses import Response

from dexter.errors import ModelError, ResourceError, UsageError
from dexter.model.edits import LabelChange, VersionConflict
from dexter.model.labels import Labels
from dexter.model.similar import SimilarLabel
from dexter.serving.problems import Problem
from dexter.serving.protocol import (
    AddLabelsRequest,
    KnownLabel,
    LabelsChanged,
    LabelsPage,
    NearLabel,
    RenameLabelsRequest,
    Resemblance,
    RunName,
    SimilarLabels,
    to_json,
)
from dexter.serving.runs import Run
from dexter.serving.service import Service

IfMatch = Annotated[str | None, Header(max_length=40, description="Edit only if this is the version of the labels.")]
_MAX_PAGE = 1_000


def label_routes(service: Service) -> APIRouter:
    """GET, POST, PATCH and DELETE /v1/labels."""
    router = APIRouter(tags=["labels"])

    @router.get("/v1/labels", response_model=LabelsPage)
    async def list_labels(
        q: Annotated[str, Query(max_length=1_000, description="Only labels whose id or text holds this.")] = "",
        cursor: Annotated[int, Query(ge=0, le=2**31, description="Where to go on: `next` of the last page.")] = 0,
        limit: Annotated[int, Query(ge=1, le=_MAX_PAGE)] = 50,
        model: RunName = None,
    ) -> Response:
        """A page of the labels: those that begin with `q` first, else in the order of the run."""
        run = service.run(model)
        version, page = await run.look(lambda predictor: predictor.search_labels(q, limit=limit, offset=cursor))
        shown = [KnownLabel(id=label.id, text=label.text, count=label.count) for label in page.labels]
        following = cursor + limit if cursor + limit < page.total else None
        return to_json(LabelsPage(model=run.name, version=version, total=page.total, labels=shown, next=following))

    @router.get("/v1/labels/similar", response_model=SimilarLabels)
    async def similar_labels(
        text: Annotated[str, Query(min_length=1, max_length=20_000, description="What a new label would be called.")],
        k: Annotated[int, Query(ge=1, le=100)] = 5,
        model: RunName = None,
    ) -> Response:
        """The labels that mean nearly the same as a text would as a label."""
        run = service.run(model)
        version, found = await run.look(lambda predictor: predictor.similar_labels(text, k))
        return to_json(SimilarLabels(model=run.name, version=version, labels=_near(found)))

    @router.post("/v1/labels", response_model=LabelsChanged)
    async def add_labels(body: AddLabelsRequest, if_match: IfMatch = None) -> Response:
        """Add labels: they compete from now on, without training. Either all of them are added or none."""
        run = service.run(body.model)
        _check_new(run.predictor.labels, [label.id for label in body.labels])
        labels = [(label.id, label.text) for label in body.labels]
        return to_json(await change(run, LabelChange(add=labels, reuse_ids=body.reuse_ids), if_match))

    @router.patch("/v1/labels", response_model=LabelsChanged)
    async def rename_labels(body: RenameLabelsRequest, if_match: IfMatch = None) -> Response:
        """Give labels new texts, by which they are found from now on. Either all of them are renamed or none."""
        run = service.run(body.model)
        _check_known(run.predictor.labels, [label.id for label in body.labels])
        labels = [(label.id, label.text) for label in body.labels]
        return to_json(await change(run, LabelChange(rename=labels, keep_vectors=body.keep_vectors), if_match))

    @router.delete("/v1/labels", response_model=LabelsChanged)
    async def remove_labels(
        id: Annotated[list[str], Query(min_length=1, max_length=1_000, description="Repeat for several.")],  # noqa: A002
        model: RunName = None,
        if_match: IfMatch = None,
    ) -> Response:
        """Take labels out of every later prediction. Either all of them go or none."""
        run = service.run(model)
        _check_known(run.predictor.labels, id)
        if len(id) == len(run.predictor.labels.ids):
            raise Problem(409, "last", "a run needs at least one label: the last one stays")
        return to_json(await change(run, LabelChange(remove=id), if_match))

    return router


async def change(run: Run, edit: LabelChange, if_match: str | None) -> LabelsChanged:
    """Change the labels; a problem where that is refused."""
    try:
        result = await run.edit(edit, expected=_version(if_match))
    except VersionConflict:
        raise Problem(412, "version", "the labels have another version by now: list them and try again") from None
    except UsageError:
        detail = "an id is unknown or in use by now, or belonged to a label that was removed (see reuse_ids)"
        raise Problem(409, "refused", detail) from None
    except ResourceError:
        detail = "another process changes the labels, or there is no room or permission to write them"
        raise Problem(503, "write", detail, headers={"Retry-After": "1"}) from None
    except ModelError:
        raise Problem(409, "model", "the run is in training or was replaced: its labels cannot be changed") from None
    return LabelsChanged(
        model=run.name,
        version=result.version,
        duplicates=[Resemblance(id=each.id, resembles=_near(each.resembles)) for each in result.duplicates],
    )


def _near(found: Sequence[SimilarLabel]) -> list[NearLabel]:
    return [NearLabel(id=each.id, text=each.text, similarity=each.similarity) for each in found]


def _version(if_match: str | None) -> int | None:
    if if_match is None or if_match.strip() == "*":
        return None
    value = if_match.strip().strip('"')
    if not (value.isascii() and value.isdecimal()):
        raise Problem(422, "version", "If-Match takes the number of a version")
    return int(value)


def _check_new(labels: Labels, ids: Sequence[str]) -> None:
    """Ids are named by their place: an answer does not repeat what was sent."""
    taken = set(labels.ids)
    for position, label_id in enumerate(ids):
        if label_id in taken:
            raise Problem(409, "taken", f"the id of label {position} is in use: remove that label first")
        taken.add(label_id)


def _check_known(labels: Labels, ids: Sequence[str]) -> None:
    known = set(labels.ids)
    for position, label_id in enumerate(ids):
        if label_id not in known:
            raise Problem(404, "label", f"no label has id {position} of the request")
        known.remove(label_id)
